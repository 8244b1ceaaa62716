"""Whoever watches a run reads at once what is to be mended, not only when the run has ended."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.core.config import Config, RunConfig
from rollmesh.launch.complaints import MAX_PLACES, Complaints, RolloutFailures
from rollmesh.launch.folder import RunFolder
from rollmesh.launch.sampler import Telemetry
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


def pulse(**worker: Any) -> Telemetry:
    return Telemetry(0.0, [], {"workers": [{"worker_id": "worker-0", "in_flight": 3} | worker]})


def failed(line: int, error: str = "agent_error: ValueError: no") -> dict[str, Any]:
    """A worker's row after a rollout failed in this line of the environment."""
    place = {"kind": "ValueError", "file": "/h/my_env.py", "line": line, "function": "run"}
    last_error = f"{error} (my_env.py:{line} in run)"
    return {"last_error": last_error, "last_place": place, "last_task_id": f"t{line}"}


def test_a_failed_rollout_is_shown_once_with_its_place_task_and_log(folder: RunFolder) -> None:
    failures = RolloutFailures(folder.logs)
    assert failures.new(pulse(last_error="")) == []
    assert failures.new(pulse(**failed(15))) == [
        (
            "worker-0: agent_error: ValueError: no (my_env.py:15 in run); "
            f"task t15, log {folder.logs / 'worker-0.log'}"
        )
    ]
    assert failures.new(pulse(**failed(15, "agent_error: ValueError: never"))) == []
    assert len(failures.new(pulse(**failed(16)))) == 1
    for line in range(99):
        failures.new(pulse(**failed(line)))
    assert failures.new(pulse(**failed(MAX_PLACES + 99))) == [], "a terminal is not a log"


def test_failures_without_a_place_are_told_apart_by_their_kind(folder: RunFolder) -> None:
    failures = RolloutFailures(folder.logs)
    for error in ("infra_error: EngineGone: a", "infra_error: EngineGone: b", "infra_error: X: a"):
        failures.new(pulse(last_error=error))
    assert failures.new(pulse(last_error="infra_error: EngineGone: c")) == []
    assert failures.new(pulse(last_error="infra_error: Y: c")) != []


def test_a_router_that_does_not_answer_reports_no_failures(folder: RunFolder) -> None:
    assert RolloutFailures(folder.logs).new(Telemetry(0.0, [], None)) == []
