"""Whoever watches a run reads at once what is to be mended, not only when the run has ended."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.core.config import Config, RunConfig
from rollmesh.launch.complaints import Complaints
from rollmesh.launch.folder import RunFolder
from tests.disks import full_disk

ROW = {
    "event": "journal.failed",
    "level": "error",
    "error": "/runs/demo/journal: No space left on device",
    "fix": "make room; nothing is lost",
}
TOLD = "the trainer: /runs/demo/journal: No space left on device; make room; nothing is lost"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(Config(run=RunConfig(name="demo", folder=str(tmp_path))))


def say(folder: RunFolder, **changes: Any) -> None:
    """A line of the trainer's log."""
    with (folder.logs / "trainer.log").open("ab") as file:
        file.write(msgspec.json.encode(ROW | changes) + b"\n")


def test_what_the_trainer_waits_for_is_told_once(folder: RunFolder) -> None:
    complaints = Complaints(folder)
    assert complaints.new() == []
    say(folder)
    assert complaints.new() == [TOLD]
    assert complaints.new() == []
    say(folder)
    assert complaints.new() == [TOLD]


def test_what_needs_nobody_is_not_told(folder: RunFolder) -> None:
    complaints = Complaints(folder)
    say(folder, level="warning")
    say(folder, fix=None)
    say(folder, error="", why="it is full")
    assert complaints.new() == ["the trainer: it is full; make room; nothing is lost"]


def test_complaints_of_before_are_not_told_again(folder: RunFolder) -> None:
    for number in range(20):
        say(folder, error=f"{number} {'x' * 100_000}")
    complaints = Complaints(folder)
    say(folder)
    assert complaints.new() == [TOLD]


def test_where_the_disk_takes_no_log_launch_says_it_by_itself(folder: RunFolder) -> None:
    complaints = Complaints(folder)
    with full_disk(0):
        folder.add_telemetry(b"{}")
    told = f"{folder.path / 'telemetry.jsonl'} could not be written: file too large"
    assert complaints.new() == [told]
    folder.add_telemetry(b"{}")
    assert complaints.new() == []


def test_a_warning_that_says_why_and_what_to_do_is_shown(folder: RunFolder) -> None:
    complaints = Complaints(folder)
    say(folder, level="warning", error="", why="no group differs", fix="check the rewards")
    assert complaints.new() == ["the trainer: no group differs; check the rewards"]
