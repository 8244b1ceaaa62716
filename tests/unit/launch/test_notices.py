"""Faults and recoveries are shown on the terminal during the run."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.core.config import Config, RunConfig
from rollmesh.launch.folder import RunFolder
from rollmesh.launch.notices import (
    MAX_PLACES,
    EngineLoads,
    ErrorTail,
    RecoveryTail,
    RolloutFailures,
)
from rollmesh.launch.telemetry import Telemetry
from tests.disks import full_disk

ROW = {
    "event": "journal.failed",
    "level": "error",
    "error": "/runs/demo/journal: No space left on device",
    "fix": "make room; nothing is lost",
}
NOTICE = "the trainer: /runs/demo/journal: No space left on device; make room; nothing is lost"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(Config(run=RunConfig(name="demo", folder=str(tmp_path))))


def log_row(folder: RunFolder, **changes: Any) -> None:
    """Append a line to the trainer's log."""
    with (folder.logs / "trainer.log").open("ab") as file:
        file.write(msgspec.json.encode(ROW | changes) + b"\n")


def test_a_trainers_error_is_shown_once(folder: RunFolder) -> None:
    errors = ErrorTail(folder)
    assert errors.new() == []
    log_row(folder)
    assert errors.new() == [NOTICE]
    assert errors.new() == []
    log_row(folder)
    assert errors.new() == [NOTICE]


def test_rows_without_a_remedy_are_not_shown(folder: RunFolder) -> None:
    errors = ErrorTail(folder)
    log_row(folder, level="warning")
    log_row(folder, fix=None)
    log_row(folder, error="", why="it is full")
    assert errors.new() == ["the trainer: it is full; make room; nothing is lost"]


def test_errors_from_before_launch_began_are_not_shown(folder: RunFolder) -> None:
    for number in range(20):
        log_row(folder, error=f"{number} {'x' * 100_000}")
    errors = ErrorTail(folder)
    log_row(folder)
    assert errors.new() == [NOTICE]


def test_a_full_disk_is_reported_by_launch_itself(folder: RunFolder) -> None:
    errors = ErrorTail(folder)
    with full_disk(0):
        folder.add_telemetry(b"{}")
    notice = f"{folder.path / 'telemetry.jsonl'} could not be written: file too large"
    assert errors.new() == [notice]
    folder.add_telemetry(b"{}")
    assert errors.new() == []


def test_a_warning_with_a_reason_and_a_remedy_is_shown(folder: RunFolder) -> None:
    errors = ErrorTail(folder)
    log_row(folder, level="warning", error="", why="no group differs", fix="check the rewards")
    assert errors.new() == ["the trainer: no group differs; check the rewards"]


def pulse(**worker: Any) -> Telemetry:
    return Telemetry(0.0, [], {"workers": [{"worker_id": "worker-0", "in_flight": 3} | worker]})


def failed(line: int, error: str = "agent_error: ValueError: no") -> dict[str, Any]:
    """Fields of a worker's row after a rollout failed at this line of the environment."""
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
    assert failures.new(pulse(**failed(MAX_PLACES + 99))) == [], "the number of places is bounded"


def test_failures_without_a_place_are_distinguished_by_their_kind(folder: RunFolder) -> None:
    failures = RolloutFailures(folder.logs)
    for error in ("infra_error: EngineGone: a", "infra_error: EngineGone: b", "infra_error: X: a"):
        failures.new(pulse(last_error=error))
    assert failures.new(pulse(last_error="infra_error: EngineGone: c")) == []
    assert failures.new(pulse(last_error="infra_error: Y: c")) != []


def test_a_router_that_does_not_answer_reports_no_failures(folder: RunFolder) -> None:
    assert RolloutFailures(folder.logs).new(Telemetry(0.0, [], None)) == []


RECOVERY_ROW: dict[str, Any] = {
    "life": 2,
    "savepoint": "000004-step-28",
    "redone_steps": [28, 29],
    "num_ready": 7,
    "num_open": 9,
    "num_dropped": 0,
    "lost": [],
}


def add(folder: Path, **changes: Any) -> None:
    with (folder / "recoveries.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(RECOVERY_ROW | changes) + b"\n")


def test_each_restart_is_shown_once(tmp_path: Path) -> None:
    recoveries = RecoveryTail(tmp_path)
    assert recoveries.new() == []
    add(tmp_path)
    notice = (
        "the trainer resumes from checkpoint 000004-step-28; steps to repeat: 2; "
        "groups ready: 7, open: 9, dropped: 0"
    )
    assert recoveries.new() == [notice]
    assert recoveries.new() == []


def test_restarts_from_before_launch_began_are_not_shown(tmp_path: Path) -> None:
    add(tmp_path)
    recoveries = RecoveryTail(tmp_path)
    add(tmp_path, savepoint="", num_dropped=1, lost=["steps 5 to 7 are lost"])
    notice = (
        "the trainer resumes from its first weights; steps to repeat: 2; "
        "groups ready: 7, open: 9, dropped: 1; steps 5 to 7 are lost"
    )
    assert recoveries.new() == [notice]


def test_a_line_of_another_format_is_skipped(tmp_path: Path) -> None:
    recoveries = RecoveryTail(tmp_path)
    (tmp_path / "recoveries.jsonl").write_bytes(b"{}\n")
    add(tmp_path)
    assert len(recoveries.new()) == 1


def test_the_progress_of_a_load_is_read_until_the_engine_serves(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    earlier = {"event": "engine.loading", "phase": "of an earlier run"}
    log.write_bytes(msgspec.json.encode(earlier) + b"\n")
    loads = EngineLoads(tmp_path, ["engine-0", "engine-1"])
    loads.read()
    assert loads.states == {}
    for row, wanted in (
        ({"event": "engine.loading", "phase": "loading weights", "amount": "3/8"}, "3/8"),
        ({"event": "engine.serving"}, None),
        ({"event": "engine.loading", "phase": "loading weights"}, ""),
        ({"event": "engine.starting"}, None),
    ):
        with log.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        loads.read()
        found = loads.states.get("engine-0")
        assert (found and found.amount) == wanted
