"""A key file is written once, for its owner only."""

import stat
from pathlib import Path

import pytest

from rollmesh.cli.main import main
from rollmesh.wire.keys import read_keys


def test_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    assert main(["keys", str(file)]) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_keys({"ROLLMESH_KEYS": str(file)}) is not None


def test_an_existing_file_is_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.json"
    file.write_text("mine")
    assert main(["keys", str(file)]) == 2
    assert "choose another name" in capsys.readouterr().err
    assert file.read_text() == "mine"
