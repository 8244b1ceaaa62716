"""A task that kills its workers is stopped at the second one, and tasks beside it are spared."""

import pytest

from rollmesh.core.ids import GroupId
from rollmesh.serve.router.assignments import (
    confirm_death,
    quarantine_reason,
    record_death,
    withdraw_death,
)
from rollmesh.serve.router.groups import Group, Incarnation
from rollmesh.serve.router.workers import WorkerEntry
from rollmesh.wire.machine import Send
from rollmesh.wire.messages import (
    GroupDelivered,
    GroupFailed,
    GroupMoved,
    GroupStarted,
    GroupState,
    HeldGroup,
    RunGroup,
    WorkerExited,
    WorkerLeft,
)
from tests.unit.serve.router.scripted_router import (
    SETTINGS,
    ScriptedRouter,
    ask,
    beat,
    group,
    hello,
    only,
)

KILLED = "killed by signal 9"


@pytest.fixture
def suspect() -> Group:
    return Group(GroupId("r1", 1), "guess", 4, "tcp://sink", "c", worker_id="w0")


def starts(router: ScriptedRouter, sends: list[Send]) -> list[RunGroup]:
    """The workers start their assigned groups."""
    runs = [(send.route, send.message) for send in sends if isinstance(send.message, RunGroup)]
    for route, run in runs:
        router.receive(route, GroupStarted(run.group_id, run.attempt))
    return [run for _, run in runs]


def exits(router: ScriptedRouter, name: str, pid: int, cause: str = KILLED) -> list[Send]:
    return router.receive("launch", WorkerExited(name, pid, cause))


def test_a_task_is_suspected_after_one_death_and_quarantined_after_two(suspect: Group) -> None:
    for name, pid in (("w0", 1), ("w1", 5)):
        assert quarantine_reason(suspect) == ""
        record_death(
            suspect, WorkerEntry(hello(name, pid=pid), b"", 0.0), KILLED, 9.0, is_certain=True
        )
    assert quarantine_reason(suspect) == (
        "quarantined: 2 workers ended under it (w0: killed by signal 9; w1: killed by signal 9)"
    )


def test_a_worker_exit_counts_once_however_often_it_is_reported(suspect: Group) -> None:
    worker = WorkerEntry(hello("w0"), b"", 0.0)
    record_death(suspect, worker, "was silent for 3.0 s", 3.0, is_certain=False)
    record_death(suspect, worker, "its process was replaced", 4.0, is_certain=True)
    confirm_death(suspect, Incarnation("w0", 1), "out of memory")
    [death] = suspect.deaths
    assert (death.cause, death.is_certain) == ("out of memory", True)


def test_a_worker_that_returns_was_not_killed(suspect: Group) -> None:
    worker = WorkerEntry(hello("w0"), b"", 0.0)
    record_death(suspect, worker, "was silent for 3.0 s", 3.0, is_certain=False)
    assert withdraw_death(suspect, worker.incarnation)
    assert suspect.deaths == ()
    assert not withdraw_death(suspect, worker.incarnation)


def test_a_suspect_is_not_assigned_to_the_worker_that_just_left(router: ScriptedRouter) -> None:
    router.worker("w0")
    starts(router, router.asks(ask(1, n=8)))
    exits(router, "w0", 1)
    # The worker has no capacity beside this claim until it exits.
    router.worker("w1", HeldGroup(group(9), 1, False))
    router.receive("w1", WorkerLeft("w1", "stopped"))
    assert router.state(1) is GroupState.QUEUED


def test_a_task_that_kills_two_workers_is_quarantined_with_their_causes(
    router: ScriptedRouter,
) -> None:
    router.worker("w0")
    router.worker("w1")
    assert starts(router, router.asks(ask(1)))
    assert starts(router, exits(router, "w0", 1, "killed by signal 11"))
    [failed] = only(exits(router, "w1", 1, "out of memory"), GroupFailed)
    assert failed.reason.startswith("quarantined: ")
    assert "w0: killed by signal 11" in failed.reason
    assert "w1: out of memory" in failed.reason
    assert router.is_empty()


def test_a_quarantined_task_that_is_requested_again_stays_quarantined(
    router: ScriptedRouter,
) -> None:
    for pid in (1, 2):
        router.worker("w0", pid=pid)
        starts(router, router.asks(ask(1)))
        sends = exits(router, "w0", pid)
    assert only(sends, GroupFailed)
    router.advance(20, "c")
    router.worker("w0", pid=3)
    again = router.asks(ask(1, attempts=2))
    assert not only(again, RunGroup)
    assert only(again, GroupFailed) == only(sends, GroupFailed)


def test_silence_alone_quarantines_nothing(router: ScriptedRouter) -> None:
    silence_of_two(router)
    waits = SETTINGS.suspect_wait_beats * SETTINGS.beat_s
    assert starts(router, router.advance(waits + 1, "c", "w2"))
    [failed] = only(router.advance(4, "c"), GroupFailed)
    assert failed.reason.startswith("attempts_exhausted: 3 have begun; w2 was silent")


def silence_of_two(router: ScriptedRouter) -> None:
    """A third worker exists, and both workers that had the group have fallen silent."""
    router.asks(ask(1))
    for name in ("w0", "w1"):
        assert starts(router, router.worker(name))
        router.advance(4, "c")
    assert not only(router.worker("w2"), RunGroup)


def test_after_two_silences_the_task_waits_for_the_state_of_the_workers(
    router: ScriptedRouter,
) -> None:
    silence_of_two(router)
    assert not only(router.advance(10, "c", "w2"), RunGroup)
    exits(router, "w0", 1)
    [failed] = only(exits(router, "w1", 1), GroupFailed)
    assert failed.reason.startswith("quarantined: ")


def test_after_two_silences_a_heartbeat_lets_the_group_continue(router: ScriptedRouter) -> None:
    silence_of_two(router)
    [moved] = only(router.receive("w1", beat("w1", 4)), GroupMoved)
    assert (moved.state, moved.worker_id) == (GroupState.RUNNING, "w1")


def test_a_late_exit_report_stops_the_task_where_it_runs(router: ScriptedRouter) -> None:
    silence_of_two(router)
    assert starts(
        router, router.advance(SETTINGS.suspect_wait_beats * SETTINGS.beat_s + 1, "c", "w2")
    )
    assert router.holder(1) == "w2"
    exits(router, "w0", 1)
    assert router.state(1) is GroupState.RUNNING
    assert only(exits(router, "w1", 1), GroupFailed)
    assert router.is_empty()


def test_suspects_run_apart_and_other_groups_are_spared(router: ScriptedRouter) -> None:
    # Four groups on one worker; the third kills any worker that runs it.
    poison = group(2)
    router.worker("w0")
    for seq in range(4):
        starts(router, router.asks(ask(seq, n=2)))
    router.advance(2, "w0", "c")
    exits(router, "w0", 1)
    pids = {"w0": 2, "w1": 2}
    ended: dict[GroupId, str] = {}
    sends = [*router.worker("w0", pid=2), *router.worker("w1", pid=2)]
    for _ in range(4):
        for run in starts(router, sends):
            holder = router.holder(run.group_id.seq)
            worker = router.group_scheduler.membership.workers.get(holder)
            assert worker is not None
            assert len(worker.groups) == 1, "each suspect runs alone on a worker"
        sends = []
        for name in list(pids):
            worker = router.group_scheduler.membership.workers.get(name)
            assert worker is not None
            for group_id in list(worker.groups):
                if group_id == poison:
                    sends += exits(router, name, pids[name])
                    pids[name] += 1
                    sends += router.worker(name, pid=pids[name])
                    ended[group_id] = only(sends, GroupFailed)[0].reason
                else:
                    sends += router.receive(name, GroupDelivered(group_id, 2))
                    ended[group_id] = ""
    assert len(ended) == 4
    assert {group_id for group_id, reason in ended.items() if reason} == {poison}
    assert ended[poison].startswith("quarantined: ")


def test_a_suspect_that_runs_past_its_time_lets_the_next_join(router: ScriptedRouter) -> None:
    router.worker("w0")
    for seq in (1, 2):
        starts(router, router.asks(ask(seq)))
    router.advance(5, "w0", "c")
    exits(router, "w0", 1)
    assert len(starts(router, router.worker("w0", pid=2))) == 1
    assert not only(router.advance(4.5, "w0", "c"), RunGroup)
    [joined] = starts(router, router.advance(1, "w0", "c"))
    assert joined.attempt == 2


def test_other_requests_do_not_wait_for_suspects(router: ScriptedRouter) -> None:
    router.worker("w0")
    for seq in (1, 2):
        starts(router, router.asks(ask(seq, n=2)))
    router.advance(5, "w0", "c")
    exits(router, "w0", 1)
    starts(router, router.worker("w0", pid=2))
    assert only(router.asks(ask(3, n=2)), RunGroup)
    assert [router.state(seq) for seq in (1, 2)] == [GroupState.RUNNING, GroupState.QUEUED]


def test_a_suspect_that_waited_long_runs_beside_another(router: ScriptedRouter) -> None:
    router.worker("w0")
    for seq in (1, 2):
        starts(router, router.asks(ask(seq)))
    router.advance(400, "w0", "c")
    exits(router, "w0", 1)
    starts(router, router.worker("w0", pid=2))
    waits = SETTINGS.suspect_wait_beats * SETTINGS.beat_s
    router.advance(waits - 1, "w0", "c")
    assert router.state(2) is GroupState.QUEUED
    router.advance(2, "w0", "c")
    assert router.state(2) is not GroupState.QUEUED


def test_a_suspect_gets_the_first_slot_that_is_free_before_any_other_group(
    router: ScriptedRouter,
) -> None:
    router.worker("w0")
    for seq in (1, 2):
        starts(router, router.asks(ask(seq)))
    router.worker("w1")
    for seq in (3, 4, 5):
        starts(router, router.asks(ask(seq)))
    router.now_s += 2.0
    exits(router, "w0", 1)
    assert {router.state(seq) for seq in (1, 2, 5)} == {GroupState.QUEUED}
    [run] = only(router.receive("w1", GroupDelivered(group(3), 1)), RunGroup)
    assert run.group_id == group(1)
    # The running suspect is observed, so the next slot is not for the other suspect.
    router.now_s += 0.5
    [run] = only(router.receive("w1", GroupDelivered(group(4), 1)), RunGroup)
    assert run.group_id == group(5)
