"""The status verb tells what the page tells."""

import os
from pathlib import Path

import pytest

from rollmesh.cli.status import main, newest
from rollmesh.core.errors import UserError
from rollmesh.testing.run_folder import FakeRun


def test_a_run_is_described_from_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FakeRun(tmp_path / "demo", num_steps=60)
    run.add_baseline(0.66)
    run.add_steps(12)
    assert main([str(run.folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "demo: silent, step 12 of 60"
    assert "untrained 0.66, policy version 12, oldest sample 2" in lines[1]
    assert "engine http://127.0.0.1:30000: READY, policy version 12, 61 running" in lines
    assert any(line.startswith("worker-1: ready,") for line in lines)
    assert "pid 101 router: 63 MB" in lines


def test_a_run_that_has_just_begun_is_described_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FakeRun(tmp_path / "demo", num_steps=60)
    assert main([str(run.folder)]) == 0
    assert capsys.readouterr().out.startswith("demo: waiting, step 0 of 60\nsuccess -")


def test_the_newest_run_is_taken(tmp_path: Path) -> None:
    for number, name in enumerate(("b", "a", "c")):
        config = FakeRun(tmp_path / name).folder / "config.json"
        os.utime(config, (100 - number, 100 - number))
    assert newest(tmp_path) == tmp_path / "b"


def test_no_run_at_all_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no runs there"):
        newest(tmp_path)
