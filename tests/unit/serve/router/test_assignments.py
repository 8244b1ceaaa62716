"""Groups are assigned to workers and stay there when messages are lost, duplicated or late."""

import msgspec
import pytest

from rollmesh.serve.router.assignments import GIVE_UP_BEATS, REPORT_UNBEGUN
from rollmesh.serve.router.groups import MAX_CUTS, MAX_UNBEGUN
from rollmesh.serve.router.workers import SPARE_RANKS
from rollmesh.wire.header import Message
from rollmesh.wire.machine import Send, Ticked
from rollmesh.wire.messages import (
    CancelGroup,
    CancelRun,
    ClientLeft,
    GroupDelivered,
    GroupFailed,
    GroupMoved,
    GroupReturned,
    GroupStarted,
    GroupState,
    RouterHello,
    RunGroup,
    WorkerLeft,
)
from tests.unit.serve.router.scripted_router import (
    SETTINGS,
    SETTLED_S,
    ScriptedRouter,
    ask,
    beat,
    group,
    hello,
    only,
    running,
)

# balance


def test_groups_go_to_the_worker_with_the_most_free_slots(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.worker("w1")
    for seq in range(4):
        router.asks(ask(seq))
    holders = [router.holder(seq) for seq in range(4)]
    assert holders == ["w0", "w1", "w0", "w1"]


def test_no_worker_gets_more_than_its_slots(router: ScriptedRouter) -> None:
    router.worker("w0")
    for seq in range(3):
        router.asks(ask(seq))
    assert [router.state(seq) for seq in range(3)] == [
        GroupState.ASSIGNED,
        GroupState.ASSIGNED,
        GroupState.QUEUED,
    ]


def test_a_group_larger_than_any_worker_goes_to_an_idle_one(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.asks(ask(1, n=100))
    assert router.holder(1) == "w0"
    router.asks(ask(2, n=1))
    assert router.state(2) is GroupState.QUEUED


def test_slots_of_finished_siblings_are_free_before_their_group_ends(
    router: ScriptedRouter,
) -> None:
    router.worker("w0")
    router.asks(ask(1, n=8))
    router.asks(ask(2, n=4))
    router.receive("w0", GroupStarted(group(1), 1))
    router.receive("w0", beat("w0", num_running=8))
    assert router.state(2) is GroupState.QUEUED
    sends = router.receive("w0", beat("w0", num_running=4))
    assert [r.group_id for r in only(sends, RunGroup)] == [group(2)]


def test_a_beat_older_than_an_assignment_does_not_free_its_slots(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.asks(ask(1, n=8))
    router.receive("w0", beat("w0", num_running=0))
    router.asks(ask(2, n=4))
    assert router.state(2) is GroupState.QUEUED


def test_a_worker_that_accepts_nothing_gets_nothing(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.receive("w0", beat("w0", accepting=False))
    router.asks(ask(1))
    assert router.state(1) is GroupState.QUEUED
    assert only(router.receive("w0", beat("w0")), RunGroup)


def test_a_stalled_worker_comes_last(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.worker("w1")
    router.receive("w0", beat("w0", lag_s=5.0))
    router.receive("w1", beat("w1"))
    router.asks(ask(1))
    router.asks(ask(2))
    router.asks(ask(3))
    assert [router.holder(seq) for seq in (1, 2, 3)] == ["w1", "w1", "w0"]


def test_a_group_waits_for_a_worker_of_its_environment(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.asks(ask(1, env="echo"))
    assert router.state(1) is GroupState.QUEUED
    router.receive("w1", hello("w1", env="echo"))
    assert router.holder(1) == "w1"


def test_clients_alternate(router: ScriptedRouter) -> None:
    for seq in range(3):
        router.asks(ask(seq, n=8, client="greedy"))
    router.asks(ask(7, n=8, client="modest"))
    order = [run.group_id.seq for run in only(router.worker("w0"), RunGroup)]
    while not router.is_empty():
        sends = router.receive("w0", GroupDelivered(group(order[-1]), 1))
        order += [run.group_id.seq for run in only(sends, RunGroup)]
    assert order == [0, 7, 1, 2]


def test_higher_priority_runs_first(router: ScriptedRouter) -> None:
    router.asks(ask(1))
    router.asks(ask(2, prio=5))
    runs = only(router.worker("w0"), RunGroup)
    assert [run.group_id.seq for run in runs] == [2, 1]


def test_a_stalled_worker_is_sent_no_repetitions(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.asks(ask(1))
    for _ in range(6):
        router.now_s += 0.5
        router.receive("w0", beat("w0", lag_s=3.0))
        assert not only(router.group_scheduler.step(Ticked(), router.now_s), RunGroup)
    assert only(router.advance(2, "w0", "c"), RunGroup)


def test_many_workers_share_evenly_and_their_order_retains_no_old_ranks(
    router: ScriptedRouter,
) -> None:
    names = [f"w{number}" for number in range(20)]
    for name in names:
        router.worker(name)
    settings = msgspec.structs.replace(SETTINGS, max_queued_groups=1000)
    router.group_scheduler.settings = settings
    for seq in range(400):
        router.asks(ask(seq, n=1))
        router.receive(router.holder(seq), GroupDelivered(group(seq), 1))
    workers = [router.group_scheduler.membership.workers.get(name) for name in names]
    assert {worker.num_assigned for worker in workers if worker} == {20}
    orders = router.group_scheduler.membership.workers._orders  # noqa: SLF001 - the promise is about memory
    assert sum(map(len, orders["guess"])) <= SPARE_RANKS + 3 * len(names)


# lost, duplicated and late messages


def test_run_group_is_repeated_until_it_started(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.asks(ask(1))
    [again] = only(router.advance(2, "w0"), RunGroup)
    assert again.attempt == 1
    router.receive("w0", GroupStarted(group(1), 1))
    assert not only(router.advance(5, "w0"), RunGroup)


def test_a_live_worker_that_never_starts_a_group_loses_it(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.asks(ask(1))
    router.advance(19, "w0", "c")
    router.worker("w1")
    router.receive("w0", beat("w0", lag_s=20))
    sends = router.advance(2, "w1", "c")
    [run] = only(sends, RunGroup, "w1")
    assert run.attempt == 2


def test_a_lost_delivery_is_asked_for_again(router: ScriptedRouter) -> None:
    running(router)
    [again] = only(router.advance(21, "w0", "c"), RunGroup)
    assert again.attempt == 1
    router.receive("w0", GroupDelivered(group(1), 1))
    assert router.is_empty()


def test_a_duplicated_request_runs_once(router: ScriptedRouter) -> None:
    router.worker("w0")
    assert only(router.asks(ask(1)), RunGroup)
    sends = router.asks(ask(1))
    assert not only(sends, RunGroup)
    assert only(sends, GroupMoved) == [GroupMoved(group(1), GroupState.ASSIGNED, 1, "w0")]


def test_a_late_duplicate_of_an_ended_request_does_not_run_again(router: ScriptedRouter) -> None:
    running(router)
    router.receive("w0", GroupDelivered(group(1), 1))
    sends = router.asks(ask(1, attempts=0))
    assert only(sends, GroupMoved) == [GroupMoved(group(1), GroupState.DONE, 1, "w0")]
    assert router.is_empty()


def test_a_client_that_knows_the_attempt_may_request_another(router: ScriptedRouter) -> None:
    running(router)
    router.advance(SETTLED_S, "w0", "c")
    router.receive("w0", GroupDelivered(group(1), 1))
    [run] = only(router.asks(ask(1, attempts=1)), RunGroup)
    assert run.attempt == 2


def test_a_cancellation_that_overtakes_its_request_wins(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.receive("c", CancelGroup(group(1), "changed my mind"))
    [moved] = only(router.asks(ask(1)), GroupMoved)
    assert moved.state is GroupState.CANCELLED
    assert router.is_empty()


def test_a_late_start_of_a_cancelled_group_is_cancelled_again(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.asks(ask(1))
    assert only(router.receive("c", CancelGroup(group(1), "enough")), CancelRun, "w0")
    assert only(router.receive("w0", GroupStarted(group(1), 1)), CancelRun, "w0")
    assert router.is_empty()


def test_a_returned_group_runs_elsewhere_and_the_attempt_does_not_count(
    router: ScriptedRouter,
) -> None:
    router.worker("w0")
    router.worker("w1")
    router.asks(ask(1))
    [run] = only(router.receive("w0", GroupReturned(group(1), 1, "draining")), RunGroup, "w1")
    assert run.attempt == 2
    assert router.group_scheduler.table.groups[group(1)].tries == 1


def test_a_returned_group_is_not_sent_back_at_once(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.asks(ask(1))
    assert not only(router.receive("w0", GroupReturned(group(1), 1, "full")), RunGroup)
    assert only(router.receive("w0", beat("w0")), RunGroup)


STALL_S = 61.0


def stall(router: ScriptedRouter) -> list[Send]:
    """Another task blocks the loop of w0 for longer than the router tolerates; then it runs
    again."""
    sends = router.receive("w0", beat("w0", lag_s=STALL_S))
    router.now_s += STALL_S
    return [*sends, *router.receive("w0", beat("w0"))]


def test_attempts_that_never_began_do_not_count_when_another_task_blocks_the_loop(
    router: ScriptedRouter,
) -> None:
    """Heartbeats have a thread of their own, so the worker is not considered lost."""
    router.worker("w0")
    router.asks(ask(1))
    sends = router.advance(3 * SETTINGS.max_attempts * GIVE_UP_BEATS, "w0", "c")
    assert not only(sends, GroupFailed)
    assert len(only(sends, GroupMoved)) > 2 * SETTINGS.max_attempts
    attempt = router.group_scheduler.table.groups[group(1)].attempt
    router.receive("w0", GroupStarted(group(1), attempt))
    assert router.state(1) is GroupState.RUNNING
    assert router.group_scheduler.table.groups[group(1)].tries == 1


def test_a_worker_that_recovers_from_a_stall_is_assigned_its_unstarted_group_again(
    router: ScriptedRouter,
) -> None:
    router.worker("w0")
    router.asks(ask(1))
    for _ in range(3 * SETTINGS.max_attempts):
        lost, again = only(stall(router), GroupMoved)
        assert (lost.state, lost.attempt, lost.excused) == (GroupState.QUEUED, 1, 1)
        assert (again.state, again.attempt, again.excused) == (GroupState.ASSIGNED, 1, 0)


def test_attempts_that_workers_lose_before_they_begin_do_not_count(router: ScriptedRouter) -> None:
    router.asks(ask(1))
    for number in range(1, 3 * SETTINGS.max_attempts):
        [run] = only(router.worker(f"w{number}"), RunGroup)
        assert run.attempt == number
        router.receive(f"w{number}", beat(f"w{number}", lag_s=STALL_S))
        assert router.group_scheduler.table.groups[group(1)].tries == 0
        router.now_s += (
            SETTINGS.suspect_wait_beats
        )  # the time for which the group waits for a worker without other groups


def test_an_attempt_that_turns_out_to_have_begun_counts_again(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.asks(ask(1))
    router.receive("w0", beat("w0", lag_s=STALL_S))
    assert router.group_scheduler.table.groups[group(1)].tries == 0
    router.receive("w0", GroupStarted(group(1), 1))
    assert router.state(1) is GroupState.RUNNING
    assert router.group_scheduler.table.groups[group(1)].tries == 1


def test_a_group_that_never_begins_is_reported_to_its_client_and_fails_after_a_limit(
    router: ScriptedRouter,
) -> None:
    router.worker("w0")
    router.asks(ask(1))
    sends = [stall(router) for _ in range(MAX_UNBEGUN)]
    reasons = [moved.reason for each in sends for moved in only(each, GroupMoved) if moved.reason]
    why = f"w0 its loop was held for {STALL_S:.0f} s"
    assert reasons[0] == f"{group(1)} was given to workers 3 times and never began; {why}"
    assert len(reasons) == MAX_UNBEGUN - REPORT_UNBEGUN + 1
    [failed] = only(stall(router), GroupFailed)
    times = MAX_UNBEGUN + 1
    given = f"given to workers {times} times without beginning"
    assert failed.reason == f"attempts_exhausted: {given}; {why}"
    assert router.group_scheduler.table.num["unbegun"] == times


def test_attempts_interrupted_by_a_normal_worker_exit_do_not_count(router: ScriptedRouter) -> None:
    router.asks(ask(1))
    for incarnation in range(1, 6):
        router.worker("w0", pid=incarnation)
        router.receive("w0", GroupStarted(group(1), incarnation))
        [moved] = only(router.receive("w0", WorkerLeft("w0", "stopped: an update")), GroupMoved)
        assert (moved.state, moved.attempt, moved.excused) == (
            GroupState.QUEUED,
            incarnation,
            incarnation,
        )
    [run] = only(router.worker("w0", pid=6), RunGroup)
    assert run.attempt == 6, "attempt numbers only increase"


def test_a_task_that_makes_its_workers_exit_normally_fails_after_a_limit(
    router: ScriptedRouter,
) -> None:
    router.asks(ask(1))
    failed: list[GroupFailed] = []
    for incarnation in range(1, MAX_CUTS + SETTINGS.max_attempts + 1):
        assert not failed
        router.worker("w0", pid=incarnation)
        router.receive("w0", GroupStarted(group(1), incarnation))
        failed = only(router.receive("w0", WorkerLeft("w0", "stopped: by its task")), GroupFailed)
    [last] = failed
    assert last.reason == "attempts_exhausted: 3 have begun; w0 left: stopped: by its task"


def test_a_failed_group_stays_failed_whatever_its_attempt_number(router: ScriptedRouter) -> None:
    router.asks(ask(1))
    for incarnation in range(1, 6):
        router.worker("w0", pid=incarnation)
        router.receive("w0", WorkerLeft("w0", "stopped: an update"))
    router.worker("w0", pid=6)
    router.receive("c", CancelGroup(group(1), "enough"))
    sends = router.asks(msgspec.structs.replace(ask(1, attempts=6), excused=5))
    assert not only(sends, RunGroup)
    assert only(sends, GroupMoved)[0].state is GroupState.CANCELLED


@pytest.mark.parametrize(
    "message",
    [
        GroupStarted(group(9), 1),
        GroupDelivered(group(9), 1),
        GroupReturned(group(9), 1, ""),
        CancelGroup(group(9), ""),
        WorkerLeft("unknown", ""),
        ClientLeft("unknown"),
        RouterHello(1.0),
        RunGroup(group(9), 1, 1, ""),
    ],
)
def test_a_message_about_an_unknown_peer_or_group_changes_nothing(
    router: ScriptedRouter, message: Message
) -> None:
    router.receive("stranger", message)
    assert router.is_empty()
    assert len(router.group_scheduler.membership.workers) == 0
