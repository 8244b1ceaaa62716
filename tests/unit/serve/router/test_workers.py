"""A worker's load, the choice among workers, incarnations of a worker, and environment loads."""

import math

import msgspec
import pytest

from rollmesh.core.ids import GroupId
from rollmesh.serve.router.blocked_reasons import MAX_LOAD_S
from rollmesh.serve.router.groups import MAX_ENDS, EndedIncarnations, Group, Incarnation
from rollmesh.serve.router.status import status_of
from rollmesh.serve.router.workers import WorkerEntry, WorkerHealth, WorkerTable
from rollmesh.wire.fleet import FleetChanged
from rollmesh.wire.messages import (
    EnvFailed,
    GroupFailed,
    RouterHello,
    RunGroup,
    WorkerExited,
    WorkerHello,
)
from tests.unit.serve.router.scripted_router import SETTINGS, ScriptedRouter, ask, beat, hello, only


def seated(seq: int, num_samples: int) -> Group:
    return Group(GroupId("r1", seq), "guess", num_samples, "tcp://sink", "c")


@pytest.fixture
def worker() -> WorkerEntry:
    return WorkerEntry(hello("w0"), b"w0", 0.0)


def test_before_the_first_heartbeat_the_load_is_the_assigned_slots(worker: WorkerEntry) -> None:
    worker.occupy(seated(1, 5))
    assert worker.load == 5


def test_the_load_is_what_heartbeats_report_as_running(worker: WorkerEntry) -> None:
    worker.occupy(seated(1, 6))
    worker.take_beat(beat("w0", num_running=0), 1.0)
    assert worker.load == 6, "this heartbeat may have been sent before the group arrived"
    worker.take_beat(beat("w0", num_running=2), 2.0)
    assert worker.load == 2


def test_the_load_is_never_more_than_the_assigned_slots(worker: WorkerEntry) -> None:
    worker.occupy(seated(1, 2))
    worker.take_beat(beat("w0", num_running=50), 1.0)
    assert worker.load == 2


def test_a_group_that_left_adds_no_load(worker: WorkerEntry) -> None:
    group = seated(1, 5)
    worker.occupy(group)
    worker.unassign(group)
    worker.unassign(group)
    assert worker.load == 0


@pytest.mark.parametrize(
    ("num_seated", "num_samples", "fits"), [(0, 8, True), (4, 4, True), (4, 5, False), (0, 9, True)]
)
def test_a_group_fits_into_free_slots_or_an_idle_worker(
    worker: WorkerEntry, num_seated: int, num_samples: int, fits: bool
) -> None:
    if num_seated:
        worker.occupy(seated(1, num_seated))
    assert worker.can_take(num_samples) is fits


def test_a_lost_worker_has_no_room(worker: WorkerEntry) -> None:
    worker.state = WorkerHealth.LOST
    assert not worker.can_take(1)


def test_a_worker_is_found_by_its_newest_route(worker: WorkerEntry) -> None:
    workers = WorkerTable(slow_lag_s=1.0)
    workers.add(worker)
    workers.move(worker, b"other")
    assert workers.at(b"other") is worker
    assert workers.at(b"w0") is None
    workers.remove(worker)
    assert (workers.at(b"other"), workers.get("w0"), len(workers)) == (None, None, 0)


def test_an_environment_is_served_by_live_workers_only(worker: WorkerEntry) -> None:
    workers = WorkerTable(slow_lag_s=1.0)
    workers.add(worker)
    assert workers.serve("guess")
    assert not workers.serve("echo")
    worker.state = WorkerHealth.LOST
    assert not workers.serve("guess")


INCARNATION = Incarnation("w0", 7, 5.0, "here")


@pytest.mark.parametrize(
    ("other", "may_be"),
    [
        (Incarnation("w0"), True),
        (Incarnation("w0", 7), True),
        (Incarnation("w0", 0, 5.0), True),
        (Incarnation("w0", 7, 5.0), True),
        (Incarnation("w1", 7, 5.0, "here"), False),
        (Incarnation("w0", 8, 5.0, "here"), False),
        (Incarnation("w0", 7, 6.0), False),
        (Incarnation("w0", 7, 5.0, "there"), False),
    ],
)
def test_two_incarnations_are_the_same_unless_a_known_value_differs(
    other: Incarnation, may_be: bool
) -> None:
    assert INCARNATION.may_be(other) is may_be
    assert other.may_be(INCARNATION) is may_be


def test_an_end_is_found_by_any_known_part_of_its_incarnation() -> None:
    ends = EndedIncarnations(remember_s=10.0)
    ends.add(INCARNATION, (GroupId("r1", 1),), now_s=0.0)
    for incarnation, is_found in (
        (Incarnation("w0", 7), True),
        (Incarnation("w0", 7, 6.0), False),
        (Incarnation("w0"), False),
    ):
        assert (ends.find(incarnation) is not None) is is_found


@pytest.mark.parametrize(
    ("incarnation", "now_s", "is_covered"),
    [
        (INCARNATION, 9.0, True),
        (INCARNATION, 10.0, False),
        (Incarnation("w0", 7, 4.0), 9.0, True),
        (Incarnation("w0", 7, 6.0), 9.0, False),
        (Incarnation("w0", 8, 5.0), 9.0, False),
    ],
)
def test_messages_sent_before_an_end_are_covered_by_it_for_a_while(
    incarnation: Incarnation, now_s: float, is_covered: bool
) -> None:
    ends = EndedIncarnations(remember_s=10.0)
    ends.add(INCARNATION, (), now_s=0.0)
    assert ends.cover(incarnation, now_s) is is_covered


def test_an_end_with_unknown_start_covers_all_processes_of_its_pid() -> None:
    ends = EndedIncarnations(remember_s=10.0)
    ends.add(Incarnation("w0", 7), (), now_s=0.0)
    assert ends.cover(INCARNATION, 1.0)


def test_the_oldest_ends_are_forgotten() -> None:
    ends = EndedIncarnations(remember_s=1e9)
    for pid in range(1, MAX_ENDS + 2):
        ends.add(Incarnation("w0", pid), (), now_s=0.0)
    assert ends.find(Incarnation("w0", 1)) is None
    assert ends.find(Incarnation("w0", 2))


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter()


def loading(worker: str, pid: int = 1) -> WorkerHello:
    return msgspec.structs.replace(hello(worker, pid=pid), loads_for_s=100.0)


def test_a_loading_worker_is_answered_and_assigned_nothing(router: ScriptedRouter) -> None:
    router.asks(ask(1))
    sends = router.receive("w0", loading("w0"))
    assert only(sends, RouterHello, "w0")
    assert not only(sends, RunGroup)
    assert only(router.worker("w0"), RunGroup, "w0")


def test_a_crash_in_a_load_fails_waiting_and_later_requests(router: ScriptedRouter) -> None:
    router.asks(ask(1))
    router.receive("w0", loading("w0"))
    sends = router.receive("launch", WorkerExited("w0", 1, "killed by signal 11"))
    [early] = only(sends, GroupFailed)
    [late] = only(router.asks(ask(2)), GroupFailed)
    cause = "env_failed: w0 ended before it served guess: killed by signal 11"
    assert (early.reason, late.reason) == (cause, cause)


@pytest.mark.parametrize("cause", ["killed by signal 9", "killed by signal 15"])
def test_an_interrupted_load_is_no_failure_of_its_environment(
    router: ScriptedRouter, cause: str
) -> None:
    router.asks(ask(1))
    router.receive("w0", loading("w0"))
    assert not only(router.receive("launch", WorkerExited("w0", 1, cause)), GroupFailed)
    assert only(router.worker("w0", pid=2), RunGroup, "w0")


def test_the_end_of_an_earlier_process_is_not_that_of_the_load(router: ScriptedRouter) -> None:
    router.asks(ask(1))
    router.receive("w0", loading("w0", pid=2))
    assert not only(router.receive("launch", WorkerExited("w0", 1, "exit code 1")), GroupFailed)


def test_groups_wait_while_another_worker_still_loads(router: ScriptedRouter) -> None:
    router.asks(ask(1))
    router.receive("w0", loading("w0"))
    router.receive("w1", loading("w1"))
    assert not only(router.receive("w0", EnvFailed("w0", "guess", "no module x")), GroupFailed)
    assert not only(router.asks(ask(2)), GroupFailed)
    sends = router.receive("w1", EnvFailed("w1", "guess", "no module y"))
    assert [each.reason for each in only(sends, GroupFailed)] == ["env_failed: no module y"] * 2


def test_groups_do_not_wait_forever_for_a_worker_that_falls_silent_while_loading(
    router: ScriptedRouter,
) -> None:
    router.asks(ask(1))
    router.receive("w0", loading("w0"))
    router.advance(50, "c")
    router.receive("w0", loading("w0"))  # sent again, which extends nothing
    assert not only(router.advance(49 + SETTINGS.load_grace_s, "c"), GroupFailed)
    [failed] = only(router.advance(2, "c"), GroupFailed)
    assert failed.reason.startswith("env_failed: w0 has not served guess within 130 s")


def test_an_endless_load_times_out(router: ScriptedRouter) -> None:
    router.receive("w0", msgspec.structs.replace(loading("w0"), loads_for_s=math.inf))
    assert router.group_scheduler.env_loads.take_overdue(MAX_LOAD_S) == []
    assert router.group_scheduler.env_loads.take_overdue(MAX_LOAD_S + SETTINGS.load_grace_s) == [
        "guess"
    ]
    assert router.group_scheduler.env_loads.now() == []


def test_a_loading_worker_is_shown(router: ScriptedRouter) -> None:
    def states() -> list[str]:
        return [
            row.state
            for row in status_of("i", router.group_scheduler, FleetChanged(1, ()), {}).workers
        ]

    router.receive("w0", loading("w0"))
    assert states() == ["loading"]
    router.worker("w0")
    assert states() == ["live"]
