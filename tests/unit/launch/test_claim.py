"""A name is taken from a run that is dead, and from no other; nothing of it is left by then."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def process(mark: str = "") -> Iterator[psutil.Process]:
    """One that waits to be ended, with that mark."""
    argv = [sys.executable, "-I", "-S", "-c", "input()"]
    environment = os.environ | {MARK_VARIABLE: mark} if mark else None
    with subprocess.Popen(argv, stdin=subprocess.PIPE, env=environment) as started:
        yield psutil.Process(started.pid)
        started.kill()


def claimed(heard: list[AnyMessage]) -> list[tuple[str, str]]:
    """(whose, after whom) of each claim."""
    asked = [each for each in heard if isinstance(each, ClaimPipeline)]
    return [(each.run.mark if each.run else "", each.after) for each in asked]


def ours(mark: str = "ours") -> RunClaim:
    return claim_of(mark, owns_engines=True)


def test_a_name_that_is_nobodys_is_taken_and_given_back() -> None:
    heard: list[AnyMessage] = []
    with fleet(heard=heard) as address:
        take(Share(address, "math"), ours())
        assert give_back(Share(address, "math"), ours()) == ""
    assert claimed(heard) == [("ours", ""), ("", "ours")]


def test_what_is_left_of_a_dead_run_is_ended_before_its_name_is_taken() -> None:
    mark, heard = new_mark("test"), list[AnyMessage]()
    with process(f"{mark}/engine-0.1") as left, process() as launch:
        dead = msgspec.structs.replace(ours(mark), pid=launch.pid, life="before")
        with fleet(heard=heard, run=dead) as address:
            take(Share(address, "math"), ours())
        assert psutil.wait_procs([left], PATIENCE_S)[0] == [left]
        assert launch.is_running(), "its pid is another's by now"
    assert claimed(heard) == [("ours", mark)]


def test_a_launch_that_is_dead_and_not_reaped_lives_no_more() -> None:
    with process() as launch:
        assert start_ticks(launch.pid)
        launch.kill()
        while launch.status() != psutil.STATUS_ZOMBIE:
            pass
        assert start_ticks(launch.pid) == ""
    assert start_ticks(launch.pid) == ""


def test_the_name_of_a_run_that_lives_is_refused_in_one_line_and_nothing_is_ended() -> None:
    mark, heard = new_mark("test"), list[AnyMessage]()
    with process(mark) as left, fleet(heard=heard, run=ours(mark)) as address:
        with pytest.raises(ConfigError, match=rf"math \(pid {os.getpid()} on .*goes on; end it"):
            take(Share(address, "math"), ours())
        assert left.is_running()
    assert [type(each) for each in heard] == [ReadScheduler]


def test_a_run_of_another_place_is_not_taken_for_dead() -> None:
    elsewhere = msgspec.structs.replace(ours("x"), host="gpu-07", place="elsewhere", life="")
    line = r"pid \d+ on gpu-07.*cannot be looked at.*`rollmesh scheduler kill math --dead`"
    with fleet(run=elsewhere) as address, pytest.raises(ConfigError, match=line):
        take(Share(address, "math"), ours())


def test_who_comes_second_is_told_so() -> None:
    line = "--pipeline math: another run has that name"
    refused = fleet(error="another run has that name")
    with refused as address, pytest.raises(ConfigError, match=line):
        take(Share(address, "math"), ours())


def test_a_scheduler_that_cannot_be_told_of_an_end_is_no_fault_and_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claims, "LAST_S", 0.1)
    told = give_back(Share("tcp://127.0.0.1:1", "math"), ours())
    assert "(it does not answer): its next run from here frees its GPUs, or `rollmesh" in told


def test_a_scheduler_that_has_gone_meanwhile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "ANSWER_S", 0.1)
    with pytest.raises(AddressError, match="nobody answers there"):
        take(Share("tcp://127.0.0.1:1", "math"), ours())
