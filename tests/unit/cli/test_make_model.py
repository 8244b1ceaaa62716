"""`rollmesh make-model` never overwrites a model unless it is asked to."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh.cli.main import main
from rollmesh.core.model_folder import why_no_model
from rollmesh.core.process import USAGE

KEEP = """
import sys
from rollmesh.cli.main import main
assert main(["make-model", "--keep", sys.argv[1]]) == 0
assert "torch" not in sys.modules
"""


def test_a_model_that_is_there_is_kept_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine")
    argv = [sys.executable, "-c", KEEP, str(tmp_path)]
    kept = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert kept.returncode == 0, kept.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_folder_that_cannot_be_created_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["make-model", str(tmp_path / "file" / "model")]) == USAGE
    told = f"rollmesh: {tmp_path}/file/model: Not a directory; name another folder\n"
    assert capsys.readouterr().err == told


def test_a_model_that_is_there_is_not_overwritten_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("mine")
    assert main(["make-model", str(tmp_path)]) == USAGE
    told = capsys.readouterr().err
    assert told.startswith(f"rollmesh: {tmp_path}: there is a model already; ")
    assert "--force" in told
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("config.json", "mine")
    ]


@pytest.mark.slow
def test_force_overwrites_a_model_and_says_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("mine")
    assert main(["make-model", "--force", str(tmp_path)]) == 0
    assert f"wrote {tmp_path}; " in capsys.readouterr().out
    assert why_no_model(str(tmp_path)) == ""
