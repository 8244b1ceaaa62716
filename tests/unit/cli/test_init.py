"""The written mesh.toml is the settings themselves."""

from pathlib import Path

import pytest

from rollmesh.cli.init import commented_toml, docstrings, main
from rollmesh.core.config import Config, load_config
from rollmesh.core.errors import UserError


def test_what_is_written_reads_back_as_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    assert main([str(path)]) == 0
    assert load_config(path) == Config()


def test_every_setting_stands_there_under_its_meaning() -> None:
    lines = commented_toml().splitlines()
    written = {
        line.split(" = ")[0]: lines[at - 1] for at, line in enumerate(lines) if " = " in line
    }
    keys = [
        key
        for name in Config.__struct_fields__
        for key in getattr(getattr(Config(), name), "__struct_fields__", [])
    ]
    assert set(keys) <= written.keys()
    assert all(written[key].startswith("# ") for key in keys)


def test_comments_are_the_docstrings_of_the_source() -> None:
    docs = docstrings()
    assert docs["RunConfig.folder"] == "# Where run folders stand.\n"
    assert docs["ModelConfig.renderer"].count("\n# ") == 1


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        main([str(path)])
    assert path.read_text() == "mine"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none/mesh\.toml: No such file or directory"):
        main([str(tmp_path / "none" / "mesh.toml")])
