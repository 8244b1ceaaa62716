"""A verb looks at the run that is meant, and at nothing that is none."""

import os
from pathlib import Path

import pytest

from rollmesh.cli.run_folder import newest, page_folder, run_folder
from rollmesh.core.errors import UserError
from rollmesh.testing.run_folder import FakeRun


def make_model(folder: Path) -> Path:
    """Its file of settings bears the name of a run's."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return folder


def test_the_newest_run_is_taken(tmp_path: Path) -> None:
    for number, name in enumerate(("b", "a", "c")):
        config = FakeRun(tmp_path / name).folder / "config.json"
        os.utime(config, (100 - number, 100 - number))
    make_model(tmp_path / "model")
    assert newest(tmp_path) == tmp_path / "b"


def test_of_an_evaluation_its_mesh_is_meant(tmp_path: Path) -> None:
    mesh = FakeRun(tmp_path / "eval" / "mesh")
    (tmp_path / "eval" / "eval.json").write_text("{}")
    assert run_folder(tmp_path / "eval") == mesh.folder


def test_the_page_of_an_evaluation_is_its_own(tmp_path: Path) -> None:
    mesh = FakeRun(tmp_path / "eval" / "mesh")
    (tmp_path / "eval" / "eval.json").write_text("{}")
    assert page_folder(tmp_path / "eval") == tmp_path / "eval"
    assert page_folder(mesh.folder) == mesh.folder


def test_an_evaluation_on_another_s_mesh_has_none_to_look_at(tmp_path: Path) -> None:
    (tmp_path / "eval.json").write_text("{}")
    with pytest.raises(UserError, match="it runs on another's mesh; ask that by --router"):
        run_folder(tmp_path)


def test_a_folder_that_is_no_run_is_told(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    with pytest.raises(UserError, match="no runs there"):
        newest(tmp_path)
    for folder in (tmp_path, model, tmp_path / "none"):
        with pytest.raises(UserError) as told:
            run_folder(folder)
        assert str(told.value) == f"{folder}: no such run folder; runs stand in runs/NAME"
