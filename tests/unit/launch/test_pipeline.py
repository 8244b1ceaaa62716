"""A run begins on a shared fleet only if its pipeline is free; a dead run's processes end first."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from rollmesh.core.config import LaunchConfig
from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.core.orphans import MARK_VARIABLE, new_mark
from rollmesh.core.process import start_ticks
from rollmesh.core.share import Share
from rollmesh.launch import pipeline
from rollmesh.launch.devices import GrantedGpus
from rollmesh.launch.pipeline import (
    check_share,
    claim_name,
    new_claim,
    read_grant,
    release_name,
)
from rollmesh.scheduler.planning.state import PipelinePhase
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.scheduling import ClaimPipeline, ReadScheduler, RunClaim
from tests.ports import free_ports
from tests.unit.launch.claimed_fleet import fleet

SETTINGS = LaunchConfig(scheduler_wait_s=0.0)
WAITING = LaunchConfig(scheduler_wait_s=60.0, scheduler_timeout_s=0.5)
HASTY = LaunchConfig(scheduler_wait_s=0.0, scheduler_timeout_s=0.1, release_timeout_s=0.1)


def test_a_pipeline_needs_as_many_engines_as_generation_workers() -> None:
    with fleet() as address:
        check_share(Share(address, "math"), 2, SETTINGS)
        with pytest.raises(ConfigError, match="3 engines where the scheduler has 2 generation"):
            check_share(Share(address, "math"), 3, SETTINGS)


def test_the_gpus_of_engines_and_trainer_are_read_from_the_scheduler() -> None:
    with fleet() as address:
        granted = read_grant(Share(address, "math"), SETTINGS)
    assert granted == GrantedGpus(engines=((0, 1), (2, 3)), trainer=(0, 1))


@pytest.mark.parametrize(
    ("pipeline", "num_engines", "phase", "line"),
    [
        ("unknown", 2, PipelinePhase.ADMITTED, "--pipeline unknown: .*unknown"),
        ("math", 1, PipelinePhase.ADMITTED, "engine.num_embedded, engine.urls: 1 engines where"),
        ("math", 2, PipelinePhase.REGISTERED, "`rollmesh scheduler admit math` first"),
    ],
)
def test_a_share_that_cannot_work_is_refused_in_one_line(
    pipeline: str, num_engines: int, phase: PipelinePhase, line: str
) -> None:
    with fleet(phase) as address, pytest.raises(ConfigError, match=line):
        check_share(Share(address, pipeline), num_engines, SETTINGS)


def test_launch_waits_with_one_line_for_a_pipeline_to_be_admitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "RESEND_S", 0.05)
    reported: list[str] = []
    with fleet(num_registered=3) as address:
        check_share(Share(address, "math"), 2, WAITING, report=reported.append)
    [line] = reported
    assert "--pipeline math: registered but not admitted" in line
    assert "waiting up to 60 s" in line


def test_launch_waits_for_the_scheduler_to_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "RESEND_S", 0.05)
    [port] = free_ports(1)
    reported: list[str] = []
    with ExitStack() as stack:

        def start(line: str) -> None:
            reported.append(line)
            stack.enter_context(fleet(bind=f"tcp://127.0.0.1:{port}"))

        check_share(Share(f"tcp://127.0.0.1:{port}", "math"), 2, WAITING, report=start)
    [line] = reported
    assert "no answer within" in line


def test_a_silent_scheduler_is_an_address_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "RESEND_S", 0.1)
    with pytest.raises(AddressError, match="no answer within"):
        check_share(Share("tcp://127.0.0.1:1", "math"), 1, HASTY)


def test_a_pipeline_that_is_driven_without_a_claim_is_not_started_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two coordinators of one name would place the engines of both on the same GPUs."""
    monkeypatch.setattr(pipeline, "RESEND_S", 0.1)
    line = "--pipeline math: another run has that name and is running"
    with fleet(num_driven=1000) as address, pytest.raises(ConfigError, match=line):
        check_share(Share(address, "math"), 2, msgspec.structs.replace(SETTINGS, driver_gone_s=0.3))


def test_a_pipeline_whose_driver_has_just_died_may_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "RESEND_S", 0.1)
    received: list[AnyMessage] = []
    with fleet(num_driven=3, received=received) as address:
        check_share(Share(address, "math"), 2, SETTINGS)
    assert len(received) >= 4


def test_the_driver_of_a_claimed_pipeline_is_not_checked() -> None:
    received: list[AnyMessage] = []
    run = RunClaim("dead", "h", 7)
    with fleet(num_driven=1000, received=received, run=run) as address:
        check_share(Share(address, "math"), 2, SETTINGS)
    assert {type(each) for each in received} == {ReadScheduler}


PATIENCE_S = 60.0
FREE_PID = 4_194_304
"""Above the largest pid of Linux."""
SHARE = Share("tcp://127.0.0.1:1", "math")


@contextmanager
def process(mark: str = "") -> Iterator[psutil.Process]:
    """Run a process with that mark until it is killed."""
    argv = [sys.executable, "-I", "-S", "-c", "input()"]
    environment = os.environ | {MARK_VARIABLE: mark} if mark else None
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env=environment) as started:
        yield psutil.Process(started.pid)
        started.kill()


def claimed(received: list[AnyMessage]) -> list[tuple[str, str]]:
    """Return (claiming run, replaced run) of each claim."""
    asked = [each for each in received if isinstance(each, ClaimPipeline)]
    return [(each.run.run_id if each.run else "", each.after) for each in asked]


@pytest.fixture
def ours(tmp_path: Path) -> RunClaim:
    return new_claim(SHARE, new_mark("test"), tmp_path, owns_engines=True)


def dead_run(runs: Path, mark: str, launch: int, start: str = "0") -> RunClaim:
    """Write the record of a run whose launch has ended; return its claim."""
    run = new_claim(SHARE, mark, runs, owns_engines=True)
    record = Path(run.record)
    record_fields = msgspec.json.decode(record.read_bytes()) | {"pid": launch, "life": start}
    record.write_bytes(msgspec.json.encode(record_fields))
    return msgspec.structs.replace(run, pid=launch, started_ticks=start)


def test_a_free_name_is_claimed_and_released_and_no_record_is_left(
    ours: RunClaim, tmp_path: Path
) -> None:
    received: list[AnyMessage] = []
    with fleet(received=received) as address:
        claim_name(Share(address, "math"), ours, SETTINGS)
        assert Path(ours.record).stat().st_mode & 0o777 == 0o600
        assert Path(ours.record).parent.stat().st_mode & 0o777 == 0o700
        assert release_name(Share(address, "math"), ours, SETTINGS) == ""
    assert claimed(received) == [(ours.run_id, ""), ("", ours.run_id)]
    assert list((tmp_path / ".claims").iterdir()) == []


def test_no_message_contains_the_mark(ours: RunClaim) -> None:
    mark = msgspec.json.decode(Path(ours.record).read_bytes())["mark"]
    received: list[AnyMessage] = []
    with fleet(received=received) as address:
        claim_name(Share(address, "math"), ours, SETTINGS)
        release_name(Share(address, "math"), ours, SETTINGS)
    assert mark not in repr(received)


def test_processes_of_a_dead_run_are_ended_before_its_name_is_claimed(
    ours: RunClaim, tmp_path: Path
) -> None:
    mark, received = new_mark("test"), list[AnyMessage]()
    with process(f"{mark}/engine-0.1") as left, process() as launch:
        dead = dead_run(tmp_path, mark, launch.pid)
        with fleet(received=received, run=dead) as address:
            claim_name(Share(address, "math"), ours, SETTINGS)
        assert psutil.wait_procs([left], PATIENCE_S)[0] == [left]
        assert launch.is_running(), "its pid belongs to another process now"
    assert claimed(received) == [(ours.run_id, dead.run_id)]
    assert not Path(dead.record).exists()


def test_a_process_older_than_the_launch_is_not_ended(ours: RunClaim, tmp_path: Path) -> None:
    mark = new_mark("test")
    with process(f"{mark}/engine-0.1") as other:
        later = str(int(start_ticks(other.pid)) + 1)
        dead = dead_run(tmp_path, mark, FREE_PID, later)
        with fleet(run=dead) as address:
            claim_name(Share(address, "math"), ours, SETTINGS)
        assert other.is_running()


@pytest.mark.parametrize("fault", ["missing", "readable", "pipe", "garbled", "pipeline", "run"])
def test_a_record_that_cannot_be_trusted_ends_nothing_and_the_remedy_is_named(
    fault: str, ours: RunClaim, tmp_path: Path
) -> None:
    mark = new_mark("test")
    dead = dead_run(tmp_path, mark, FREE_PID)
    record = Path(dead.record)
    record_fields = msgspec.json.decode(record.read_bytes())
    if fault == "readable":
        record.chmod(0o640)
    elif fault == "garbled":
        record.write_bytes(msgspec.json.encode(record_fields | {"pid": 1}))
    elif fault == "pipeline":
        record.write_bytes(msgspec.json.encode(record_fields | {"pipeline_id": "code"}))
    elif fault == "run":
        record.write_bytes(msgspec.json.encode(record_fields | {"run_id": "run-other"}))
    else:
        record.unlink()
    if fault == "pipe":
        os.mkfifo(record, 0o600)
    line = r"--pipeline math: .*did not end cleanly, and its record .*kill math --dead` frees"
    with process(mark) as left, fleet(run=dead) as address:
        with pytest.raises(ConfigError, match=line):
            claim_name(Share(address, "math"), ours, SETTINGS)
        assert left.is_running()


def test_a_zombie_launch_counts_as_dead() -> None:
    with process() as launch:
        assert start_ticks(launch.pid)
        launch.kill()
        while launch.status() != psutil.STATUS_ZOMBIE:
            pass
        assert start_ticks(launch.pid) == ""
    assert start_ticks(launch.pid) == ""


def test_the_name_of_a_run_that_is_alive_is_refused_in_one_line_and_nothing_is_ended(
    ours: RunClaim, tmp_path: Path
) -> None:
    mark, received = new_mark("test"), list[AnyMessage]()
    other = new_claim(SHARE, mark, tmp_path, owns_engines=True)
    with process(mark) as left, fleet(received=received, run=other) as address:
        with pytest.raises(ConfigError, match=rf"math \(pid {os.getpid()} on .*is running; end it"):
            claim_name(Share(address, "math"), ours, SETTINGS)
        assert left.is_running()
    assert [type(each) for each in received] == [ReadScheduler]
    assert not Path(ours.record).exists()
    assert Path(other.record).exists()


def test_a_claim_that_names_another_pid_than_its_record_does_not_hide_a_run_that_is_alive(
    ours: RunClaim, tmp_path: Path
) -> None:
    mark = new_mark("test")
    other = new_claim(SHARE, mark, tmp_path, owns_engines=True)
    forged = msgspec.structs.replace(other, pid=FREE_PID, started_ticks="1")
    with process(mark) as left, fleet(run=forged) as address:
        with pytest.raises(ConfigError, match=rf"math \(pid {os.getpid()}\): .*is running"):
            claim_name(Share(address, "math"), ours, SETTINGS)
        assert left.is_running()


def test_a_run_on_another_machine_is_not_considered_dead(ours: RunClaim) -> None:
    elsewhere = msgspec.structs.replace(ours, host="gpu-07", place="elsewhere", started_ticks="")
    line = r"pid \d+ on gpu-07.*cannot be checked.*`rollmesh scheduler kill math --dead`"
    with fleet(run=elsewhere) as address, pytest.raises(ConfigError, match=line):
        claim_name(Share(address, "math"), ours, SETTINGS)


def test_of_two_claims_the_second_is_refused_with_the_schedulers_error(ours: RunClaim) -> None:
    line = "--pipeline math: another run has that name"
    refused = fleet(error="another run has that name")
    with refused as address, pytest.raises(ConfigError, match=line):
        claim_name(Share(address, "math"), ours, SETTINGS)


def test_an_unanswered_release_is_no_error_and_names_the_remedy(
    ours: RunClaim,
) -> None:
    line = release_name(SHARE, ours, HASTY)
    assert "(no answer); its GPUs are freed by its next run from here, or by `rollmesh" in line
    assert Path(ours.record).exists(), "the next run needs it"


def test_a_scheduler_that_does_not_answer_a_claim_is_reported(
    ours: RunClaim,
) -> None:
    with pytest.raises(AddressError, match="no answer within"):
        claim_name(SHARE, ours, HASTY)
