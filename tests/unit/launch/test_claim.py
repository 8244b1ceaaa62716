"""A name is taken from a run that is dead, and from no other; nothing of it is left by then."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from rollmesh.core.errors import AddressError, ConfigError
from rollmesh.core.process import start_ticks
from rollmesh.core.share import Share
from rollmesh.core.warden import MARK_VARIABLE, new_mark
from rollmesh.launch import claim as claims
from rollmesh.launch import share as checks
from rollmesh.launch.claim import claim_of, give_back, take
from rollmesh.wire.messages import AnyMessage
from rollmesh.wire.scheduling import ClaimPipeline, ReadScheduler, RunClaim
from tests.unit.launch.claimed_fleet import fleet

PATIENCE_S = 60.0
FREE_PID = 4_194_304
"""Above any pid of Linux."""
SHARE = Share("tcp://127.0.0.1:1", "math")


@contextmanager
def process(mark: str = "") -> Iterator[psutil.Process]:
    """One that waits to be ended, with that mark."""
    argv = [sys.executable, "-I", "-S", "-c", "input()"]
    environment = os.environ | {MARK_VARIABLE: mark} if mark else None
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env=environment) as started:
        yield psutil.Process(started.pid)
        started.kill()


def claimed(heard: list[AnyMessage]) -> list[tuple[str, str]]:
    """(whose, after whose) of each claim."""
    asked = [each for each in heard if isinstance(each, ClaimPipeline)]
    return [(each.run.run_id if each.run else "", each.after) for each in asked]


@pytest.fixture
def ours(tmp_path: Path) -> RunClaim:
    return claim_of(SHARE, new_mark("test"), tmp_path, owns_engines=True)


def dead_run(runs: Path, mark: str, launch: int, life: str = "0") -> RunClaim:
    """The claim of a run whose launch has ended, and whose record is there."""
    run = claim_of(SHARE, mark, runs, owns_engines=True)
    record = Path(run.record)
    told = msgspec.json.decode(record.read_bytes()) | {"pid": launch, "life": life}
    record.write_bytes(msgspec.json.encode(told))
    return msgspec.structs.replace(run, pid=launch, life=life)


def test_a_free_name_is_claimed_and_given_back_and_no_record_is_left(
    ours: RunClaim, tmp_path: Path
) -> None:
    heard: list[AnyMessage] = []
    with fleet(heard=heard) as address:
        take(Share(address, "math"), ours)
        assert Path(ours.record).stat().st_mode & 0o777 == 0o600
        assert Path(ours.record).parent.stat().st_mode & 0o777 == 0o700
        assert give_back(Share(address, "math"), ours) == ""
    assert claimed(heard) == [(ours.run_id, ""), ("", ours.run_id)]
    assert list((tmp_path / ".claims").iterdir()) == []


def test_a_mark_is_in_no_message(ours: RunClaim) -> None:
    mark = msgspec.json.decode(Path(ours.record).read_bytes())["mark"]
    heard: list[AnyMessage] = []
    with fleet(heard=heard) as address:
        take(Share(address, "math"), ours)
        give_back(Share(address, "math"), ours)
    assert mark not in repr(heard)


def test_what_is_left_of_a_dead_run_is_ended_before_its_name_is_taken(
    ours: RunClaim, tmp_path: Path
) -> None:
    mark, heard = new_mark("test"), list[AnyMessage]()
    with process(f"{mark}/engine-0.1") as left, process() as launch:
        dead = dead_run(tmp_path, mark, launch.pid)
        with fleet(heard=heard, run=dead) as address:
            take(Share(address, "math"), ours)
        assert psutil.wait_procs([left], PATIENCE_S)[0] == [left]
        assert launch.is_running(), "its pid is another process's by now"
    assert claimed(heard) == [(ours.run_id, dead.run_id)]
    assert not Path(dead.record).exists()


def test_a_process_that_began_before_the_launch_is_not_the_runs(
    ours: RunClaim, tmp_path: Path
) -> None:
    mark = new_mark("test")
    with process(f"{mark}/engine-0.1") as other:
        later = str(int(start_ticks(other.pid)) + 1)
        dead = dead_run(tmp_path, mark, FREE_PID, later)
        with fleet(run=dead) as address:
            take(Share(address, "math"), ours)
        assert other.is_running()


@pytest.mark.parametrize("fault", ["missing", "readable", "pipe", "garbled", "pipeline", "run"])
def test_a_record_that_cannot_be_trusted_ends_nothing_and_the_remedy_is_named(
    fault: str, ours: RunClaim, tmp_path: Path
) -> None:
    mark = new_mark("test")
    dead = dead_run(tmp_path, mark, FREE_PID)
    record = Path(dead.record)
    told = msgspec.json.decode(record.read_bytes())
    if fault == "readable":
        record.chmod(0o640)
    elif fault == "garbled":
        record.write_bytes(msgspec.json.encode(told | {"pid": 1}))
    elif fault == "pipeline":
        record.write_bytes(msgspec.json.encode(told | {"pipeline_id": "code"}))
    elif fault == "run":
        record.write_bytes(msgspec.json.encode(told | {"run_id": "run-other"}))
    else:
        record.unlink()
    if fault == "pipe":
        os.mkfifo(record, 0o600)
    line = r"--pipeline math: .*not ended in order, and its record .*kill math --dead` frees"
    with process(mark) as left, fleet(run=dead) as address:
        with pytest.raises(ConfigError, match=line):
            take(Share(address, "math"), ours)
        assert left.is_running()


def test_a_launch_that_is_dead_and_not_reaped_lives_no_more() -> None:
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
    mark, heard = new_mark("test"), list[AnyMessage]()
    other = claim_of(SHARE, mark, tmp_path, owns_engines=True)
    with process(mark) as left, fleet(heard=heard, run=other) as address:
        with pytest.raises(ConfigError, match=rf"math \(pid {os.getpid()} on .*goes on; end it"):
            take(Share(address, "math"), ours)
        assert left.is_running()
    assert [type(each) for each in heard] == [ReadScheduler]
    assert not Path(ours.record).exists()
    assert Path(other.record).exists()


def test_a_claim_that_names_another_pid_than_its_record_does_not_hide_a_run_that_is_alive(
    ours: RunClaim, tmp_path: Path
) -> None:
    mark = new_mark("test")
    other = claim_of(SHARE, mark, tmp_path, owns_engines=True)
    forged = msgspec.structs.replace(other, pid=FREE_PID, life="1")
    with process(mark) as left, fleet(run=forged) as address:
        with pytest.raises(ConfigError, match=rf"math \(pid {os.getpid()}\): .*goes on"):
            take(Share(address, "math"), ours)
        assert left.is_running()


def test_a_run_of_another_place_is_not_taken_for_dead(ours: RunClaim) -> None:
    elsewhere = msgspec.structs.replace(ours, host="gpu-07", place="elsewhere", life="")
    line = r"pid \d+ on gpu-07.*cannot be looked at.*`rollmesh scheduler kill math --dead`"
    with fleet(run=elsewhere) as address, pytest.raises(ConfigError, match=line):
        take(Share(address, "math"), ours)


def test_of_two_claims_the_second_is_refused_in_the_schedulers_words(ours: RunClaim) -> None:
    line = "--pipeline math: another run has that name"
    refused = fleet(error="another run has that name")
    with refused as address, pytest.raises(ConfigError, match=line):
        take(Share(address, "math"), ours)


def test_a_scheduler_that_does_not_answer_at_the_end_is_no_fault_and_the_remedy_is_named(
    ours: RunClaim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "LAST_S", 0.1)
    told = give_back(SHARE, ours)
    assert "(it does not answer): its next run from here frees its GPUs, or `rollmesh" in told
    assert Path(ours.record).exists(), "the next run needs it"


def test_a_scheduler_that_has_gone_meanwhile_is_reported(
    ours: RunClaim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "ANSWER_S", 0.1)
    with pytest.raises(AddressError, match="nobody answers there"):
        take(SHARE, ours)
