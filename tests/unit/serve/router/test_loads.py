"""Loads: of an environment that fails, everybody hears, unless another worker may bring it."""

import math

import msgspec
import pytest

from rollmesh.serve.router.blocked_reasons import LATE_S, MAX_LOAD_S
from rollmesh.serve.router.status import status_of
from rollmesh.wire.fleet import FleetChanged
from rollmesh.wire.messages import (
    EnvFailed,
    GroupFailed,
    RouterHello,
    RunGroup,
    WorkerExited,
    WorkerHello,
)
from tests.unit.serve.router.story import Story, ask, hello, only


@pytest.fixture
def story() -> Story:
    return Story()


def loading(worker: str, pid: int = 1) -> WorkerHello:
    return msgspec.structs.replace(hello(worker, pid=pid), loads_for_s=100.0)


def test_a_load_is_answered_and_gets_nothing_to_run(story: Story) -> None:
    story.asks(ask(1))
    sends = story.says("w0", loading("w0"))
    assert only(sends, RouterHello, "w0")
    assert not only(sends, RunGroup)
    assert only(story.worker("w0"), RunGroup, "w0")


def test_a_crash_in_a_load_fails_what_waits_and_what_comes(story: Story) -> None:
    story.asks(ask(1))
    story.says("w0", loading("w0"))
    sends = story.says("launch", WorkerExited("w0", 1, "killed by signal 11"))
    [early] = only(sends, GroupFailed)
    [late] = only(story.asks(ask(2)), GroupFailed)
    told = "env_failed: w0 ended before it served guess: killed by signal 11"
    assert (early.reason, late.reason) == (told, told)


@pytest.mark.parametrize("cause", ["killed by signal 9", "killed by signal 15"])
def test_a_load_that_somebody_ended_says_nothing_of_its_environment(
    story: Story, cause: str
) -> None:
    story.asks(ask(1))
    story.says("w0", loading("w0"))
    assert not only(story.says("launch", WorkerExited("w0", 1, cause)), GroupFailed)
    assert only(story.worker("w0", pid=2), RunGroup, "w0")


def test_the_end_of_an_earlier_process_is_not_that_of_the_load(story: Story) -> None:
    story.asks(ask(1))
    story.says("w0", loading("w0", pid=2))
    assert not only(story.says("launch", WorkerExited("w0", 1, "exit code 1")), GroupFailed)


def test_nobody_gives_up_what_another_worker_still_loads(story: Story) -> None:
    story.asks(ask(1))
    story.says("w0", loading("w0"))
    story.says("w1", loading("w1"))
    assert not only(story.says("w0", EnvFailed("w0", "guess", "no module x")), GroupFailed)
    assert not only(story.asks(ask(2)), GroupFailed)
    sends = story.says("w1", EnvFailed("w1", "guess", "no module y"))
    assert [each.reason for each in only(sends, GroupFailed)] == ["env_failed: no module y"] * 2


def test_a_worker_that_falls_silent_in_its_load_is_not_waited_for_for_ever(story: Story) -> None:
    story.asks(ask(1))
    story.says("w0", loading("w0"))
    story.passes(50, "c")
    story.says("w0", loading("w0"))  # said again, which lengthens nothing
    assert not only(story.passes(49 + LATE_S, "c"), GroupFailed)
    [failed] = only(story.passes(2, "c"), GroupFailed)
    assert failed.reason.startswith("env_failed: w0 has not served guess within 130 s")


def test_a_load_without_end_ends(story: Story) -> None:
    story.says("w0", msgspec.structs.replace(loading("w0"), loads_for_s=math.inf))
    assert story.group_scheduler.env_loads.take_overdue(MAX_LOAD_S) == []
    assert story.group_scheduler.env_loads.take_overdue(MAX_LOAD_S + LATE_S) == ["guess"]
    assert story.group_scheduler.env_loads.now() == []


def test_a_worker_that_loads_is_shown(story: Story) -> None:
    def states() -> list[str]:
        return [
            row.state
            for row in status_of("i", story.group_scheduler, FleetChanged(1, ()), {}).workers
        ]

    story.says("w0", loading("w0"))
    assert states() == ["loading"]
    story.worker("w0")
    assert states() == ["live"]
