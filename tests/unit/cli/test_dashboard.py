"""`rollmesh dashboard` without a folder lists the runs."""

import os
from pathlib import Path

import pytest

from rollmesh.cli.main import main
from rollmesh.core.process import OK, USAGE
from rollmesh.testing.run_folder import FakeRun


def test_without_a_folder_the_runs_are_listed_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("old", "new")):
        run = FakeRun(tmp_path / "runs" / name, num_steps=60)
        run.add_steps(3 + number)
        os.utime(run.folder / "config.json", (1e9 + 1e5 * number, 1e9 + 1e5 * number))
    assert main(["dashboard"]) == OK
    first, second, hint = capsys.readouterr().out.splitlines()
    assert first.startswith("runs/new  2001-09-1")
    assert first.endswith("step 4 of 60")
    assert second.startswith("runs/old  2001-09-0")
    assert second.endswith("step 3 of 60")
    assert hint == "`rollmesh dashboard RUN_FOLDER` serves the page of one"


def test_a_folder_without_runs_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["dashboard"]) == USAGE
    assert capsys.readouterr().err == "rollmesh: runs: no runs there; name a run folder\n"
