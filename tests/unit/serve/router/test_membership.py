"""Workers and their groups when workers die, fall silent, stall, drain, return or are recycled."""

import msgspec
import pytest

from rollmesh.serve.router.workers import WorkerHealth
from rollmesh.wire.machine import Send, Ticked
from rollmesh.wire.messages import (
    RELIEVED,
    AskDrain,
    CancelGroup,
    CancelRun,
    DrainAnswered,
    DrainWorker,
    EnvFailed,
    GroupDelivered,
    GroupFailed,
    GroupLost,
    GroupMoved,
    GroupStarted,
    GroupState,
    HeldGroup,
    RouterHello,
    RunGroup,
    WorkerExited,
    WorkerHello,
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
    running,
)


def test_group_runs_again_when_its_worker_dies(router: ScriptedRouter) -> None:
    running(router)
    router.worker("w1")
    sends = router.advance(4, "w1", "c")
    [run] = only(sends, RunGroup, "w1")
    assert run.attempt == 2
    assert router.holder(1) == "w1"
    assert router.group_scheduler.table.num["workers_lost"] == 1


def test_a_silent_worker_is_assigned_nothing(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.advance(4, "c")
    assert not only(router.asks(ask(1)), RunGroup)


def test_a_worker_that_sends_heartbeats_is_never_lost(router: ScriptedRouter) -> None:
    running(router)
    router.advance(60, "w0", "c")
    assert router.holder(1) == "w0"
    assert router.group_scheduler.table.groups[group(1)].attempt == 1


def test_a_group_that_fails_repeatedly_ends_at_its_attempt_limit(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.asks(ask(1))
    failed: list[GroupFailed] = []
    for attempt in (1, 2, 3):
        assert router.holder(1) == "w0"
        failed = only(router.receive("w0", GroupLost(group(1), attempt, "no ack")), GroupFailed)
    [last] = failed
    assert last.reason == "attempts_exhausted: 3 have begun; w0: no ack"
    assert router.is_empty()


def test_a_restarted_worker_process_has_lost_its_groups(router: ScriptedRouter) -> None:
    running(router)
    [run] = only(router.worker("w0", pid=2), RunGroup)
    assert run.attempt == 2


def test_a_worker_that_reconnects_keeps_its_groups(router: ScriptedRouter) -> None:
    running(router)
    sends = router.receive(b"another-route", hello("w0", HeldGroup(group(1), 1, False)))
    assert not only(sends, RunGroup)
    assert only(router.receive(b"another-route", GroupDelivered(group(1), 1)), GroupMoved)
    assert router.is_empty()


def test_a_resumed_worker_keeps_a_group_that_no_other_began(router: ScriptedRouter) -> None:
    running(router)
    router.advance(4, "c")
    assert router.state(1) is GroupState.QUEUED
    [moved] = only(router.receive("w0", beat("w0", num_running=4)), GroupMoved)
    assert moved == GroupMoved(group(1), GroupState.RUNNING, 1, "w0")
    [run] = only(router.advance(0.5, "w0"), RunGroup)
    assert run.attempt == 1


def test_a_resumed_worker_cancels_groups_that_run_elsewhere(router: ScriptedRouter) -> None:
    running(router)
    router.worker("w1")
    cancels = only(router.advance(4, "w1", "c"), CancelRun, "w0")
    assert [c.group_id for c in cancels] == [group(1)]
    again = only(router.receive("w0", GroupStarted(group(1), 1)), CancelRun, "w0")
    assert {cancel.group_id for cancel in again} == {group(1)}


def test_a_resumed_worker_cancels_groups_that_ended_meanwhile(router: ScriptedRouter) -> None:
    running(router)
    router.advance(4, "c")
    router.receive("c", CancelGroup(group(1), "enough"))
    assert only(router.receive("w0", beat("w0", 4)), CancelRun) == [
        CancelRun(group(1), "it has ended")
    ]


def test_a_resumed_worker_that_reports_its_groups_keeps_a_finished_result(
    router: ScriptedRouter,
) -> None:
    running(router)
    router.worker("w1")
    router.advance(4, "w1", "c")
    assert router.holder(1) == "w1"
    sends = router.receive("w0", hello("w0", HeldGroup(group(1), 1, True)))
    assert not only(sends, CancelRun), "its sink accepts the first result"


def test_a_claim_cancels_the_run_on_the_groups_last_worker(router: ScriptedRouter) -> None:
    running(router)
    router.advance(4, "c")
    router.worker("w1")
    assert router.holder(1) == "w1"
    router.advance(4, "c")
    sends = router.receive("w0", hello("w0", HeldGroup(group(1), 1, False)))
    assert router.holder(1) == "w0"
    assert only(sends, CancelRun, "w1") == [CancelRun(group(1), "w0 runs attempt 2")]


def test_a_result_of_a_lost_worker_ends_the_group_and_its_next_attempt(
    router: ScriptedRouter,
) -> None:
    running(router)
    router.worker("w1")
    router.advance(4, "w1", "c")
    sends = router.receive("w0", GroupDelivered(group(1), 1))
    assert only(sends, CancelRun, "w1")
    assert only(sends, GroupMoved)[0].state is GroupState.DONE
    assert router.is_empty()


def test_a_router_that_was_suspended_considers_no_worker_lost(router: ScriptedRouter) -> None:
    running(router)
    router.now_s += 100.0
    router.group_scheduler.step(Ticked(), router.now_s)
    assert router.state(1) is GroupState.RUNNING
    router.advance(4, "c")
    assert router.state(1) is GroupState.QUEUED


def test_a_router_that_was_suspended_detects_silence_as_soon_as_before(
    router: ScriptedRouter,
) -> None:
    running(router)
    router.now_s += 100.0
    router.receive("w0", beat("w0"))
    router.group_scheduler.step(Ticked(), router.now_s)
    router.advance(4, "c")
    assert router.state(1) is GroupState.QUEUED


def test_a_lost_worker_is_eventually_forgotten(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.advance(5)
    assert len(router.group_scheduler.membership.workers) == 1
    router.advance(600)
    assert len(router.group_scheduler.membership.workers) == 0


# exits, stalls, drains


def test_a_worker_whose_process_ended_is_lost_at_once(router: ScriptedRouter) -> None:
    running(router)
    router.worker("w1")
    [run] = only(
        router.receive("launch", WorkerExited("w0", 1, "killed by signal 9")), RunGroup, "w1"
    )
    assert run.attempt == 2
    assert router.group_scheduler.membership.workers.get("w0") is None
    assert router.group_scheduler.table.num["workers_lost"] == 1


def test_late_messages_of_an_ended_process_do_not_revive_it(router: ScriptedRouter) -> None:
    running(router)
    router.receive("launch", WorkerExited("w0", 1, "killed by signal 9"))
    router.receive("w0", hello("w0"))
    router.receive("w0", beat("w0"))
    assert router.group_scheduler.membership.workers.get("w0") is None
    router.worker("w0", pid=2)
    assert router.holder(1) == "w0"


def test_a_late_hello_does_not_end_the_next_process(router: ScriptedRouter) -> None:
    running(router)
    router.worker("w0", pid=2)
    router.receive("w0", hello("w0", HeldGroup(group(1), 1, False)))
    worker = router.group_scheduler.membership.workers.get("w0")
    assert worker is not None
    assert worker.hello.pid == 2


def test_a_clock_that_was_set_back_does_not_block_a_new_process(router: ScriptedRouter) -> None:
    router.worker("w0", pid=5)
    router.advance(4)
    sends = router.receive("w0", msgspec.structs.replace(beat("w0"), started_s=2.0))
    assert only(sends, RouterHello, "w0")
    again = msgspec.structs.replace(hello("w0", pid=6), started_s=2.0)
    router.receive("w0", again)
    worker = router.group_scheduler.membership.workers.get("w0")
    assert worker is not None
    assert (worker.hello.pid, worker.state) == (6, WorkerHealth.LIVE)


def test_a_heartbeat_of_a_new_process_does_not_revive_the_old_one(router: ScriptedRouter) -> None:
    running(router)
    router.advance(4, "c")
    sends = router.receive("w0", msgspec.structs.replace(beat("w0"), started_s=2.0))
    assert only(sends, RouterHello, "w0"), "the router requests its hello"
    assert router.state(1) is GroupState.QUEUED
    router.receive("w0", msgspec.structs.replace(beat("w0"), started_s=0.5))
    assert router.state(1) is GroupState.QUEUED
    router.receive("w0", msgspec.structs.replace(beat("w0"), started_s=1.0))
    assert router.state(1) is GroupState.RUNNING


def test_a_new_process_of_the_same_pid_is_another_one(router: ScriptedRouter) -> None:
    # In a container, for example, each incarnation is process 1.
    running(router)
    again = msgspec.structs.replace(hello("w0"), started_s=9.0)
    [run] = only(router.receive("w0", again), RunGroup)
    assert run.attempt == 2


def test_a_container_that_is_killed_again_at_once_is_another_process_each_time(
    router: ScriptedRouter,
) -> None:
    running(router)
    incarnations = [msgspec.structs.replace(hello("w0"), started_s=each) for each in (2.0, 3.0)]
    router.receive("w0", incarnations[0])
    [failed] = only(router.receive("w0", incarnations[1]), GroupFailed)
    assert failed.reason.startswith("quarantined: 2 workers")
    assert [each.hello.started_s for each in router.group_scheduler.membership.workers] == [3.0]


def test_a_late_exit_does_not_end_the_next_process(router: ScriptedRouter) -> None:
    running(router)
    router.worker("w0", pid=2)
    router.receive("launch", WorkerExited("w0", 1, "out of memory"))
    assert router.holder(1) == "w0"
    [death] = router.group_scheduler.table.groups[group(1)].deaths
    assert death.cause == "out of memory"


def test_a_late_goodbye_does_not_end_the_next_process(router: ScriptedRouter) -> None:
    running(router)
    router.worker("w0", pid=2)
    assert router.holder(1) == "w0"
    router.receive("w0", WorkerLeft("w0", "stopped", 1, 1.0))
    assert router.holder(1) == "w0"
    assert router.group_scheduler.membership.workers.get("w0") is not None


def test_late_messages_do_not_revive_a_process_that_has_left(router: ScriptedRouter) -> None:
    router.receive("w0", WorkerLeft("w0", "stopped", 1, 1.0))
    router.worker("w0")
    assert router.group_scheduler.membership.workers.get("w0") is None
    router.worker("w0", pid=2)
    assert router.group_scheduler.membership.workers.get("w0") is not None


def test_a_worker_that_left_normally_blames_no_task_though_its_end_arrives_first(
    router: ScriptedRouter,
) -> None:
    running(router)
    router.receive("launch", WorkerExited("w0", 1, "exit code 0"))
    assert router.group_scheduler.table.groups[group(1)].deaths
    for _ in range(2):
        router.receive("w0", WorkerLeft("w0", "stopped", 1, 1.0))
    found = router.group_scheduler.table.groups[group(1)]
    assert (found.deaths, found.attempt, found.tries) == ((), 1, 0)
    [run] = only(router.worker("w0", pid=2), RunGroup)
    assert run.attempt == 2


def test_a_late_env_failure_does_not_end_the_next_process(
    router: ScriptedRouter,
) -> None:
    router.worker("w0", pid=2)
    router.asks(ask(1))
    router.receive("w0", EnvFailed("w0", "guess", "no module named x", 1, 1.0))
    assert router.holder(1) == "w0"


@pytest.mark.parametrize(
    "message",
    [
        EnvFailed("w0", "guess", "no module named x", 2, 2.0),
        msgspec.structs.replace(hello("w0", pid=2), loads_for_s=120.0),
    ],
)
def test_a_loading_process_shows_that_the_earlier_one_has_ended(
    router: ScriptedRouter, message: EnvFailed | WorkerHello
) -> None:
    running(router)
    router.worker("w1")
    [run] = only(router.receive("w0", message), RunGroup, "w1")
    assert run.attempt == 2
    [death] = router.group_scheduler.table.groups[group(1)].deaths
    assert (death.incarnation.pid, death.cause) == (1, "its process was replaced")


def test_a_worker_id_reused_on_another_host_blames_no_group(router: ScriptedRouter) -> None:
    # For example a pod that was rescheduled: the earlier one may only be unreachable.
    router.asks(ask(1))
    for pid in (1, 2, 3):
        at = msgspec.structs.replace(hello("w0", pid=pid), host=f"node-{pid}")
        assert not only(router.receive("w0", at), GroupFailed)
    assert [death.is_certain for death in router.group_scheduler.table.groups[group(1)].deaths] == [
        False
    ] * 2
    router.receive("launch", WorkerExited("w0", 1, "killed by signal 9"))
    [failed] = only(router.receive("launch", WorkerExited("w0", 2, "out of memory")), GroupFailed)
    assert failed.reason.endswith("(w0: killed by signal 9; w0: out of memory)")


def test_a_stalled_worker_is_lost_only_after_a_longer_limit(
    router: ScriptedRouter,
) -> None:
    running(router)
    router.worker("w1")
    for lag_s in (1.0, 30.0, 59.0):
        assert not only(router.receive("w0", beat("w0", 4, lag_s=lag_s)), RunGroup)
    [run] = only(router.receive("w0", beat("w0", 4, lag_s=61.0)), RunGroup, "w1")
    assert run.attempt == 2
    worker = router.group_scheduler.membership.workers.get("w0")
    assert worker is not None
    assert worker.state is WorkerHealth.STALLED


def test_a_stalled_worker_is_assigned_nothing_until_its_loop_runs_again(
    router: ScriptedRouter,
) -> None:
    router.worker("w0")
    router.receive("w0", beat("w0", lag_s=61.0))
    assert not only(router.asks(ask(1)), RunGroup)
    assert not only(router.receive("w0", beat("w0", lag_s=70.0)), RunGroup)
    assert only(router.receive("w0", beat("w0", lag_s=0.0)), RunGroup)


def test_a_worker_that_recovers_from_a_stall_keeps_groups_that_no_other_began(
    router: ScriptedRouter,
) -> None:
    running(router)
    router.receive("w0", beat("w0", 4, lag_s=61.0))
    assert router.state(1) is GroupState.QUEUED
    router.receive("w0", beat("w0", 4))
    assert (router.state(1), router.holder(1)) == (GroupState.RUNNING, "w0")
    assert router.group_scheduler.table.groups[group(1)].attempt == 1
    assert router.group_scheduler.table.groups[group(1)].deaths == ()


def test_a_stalled_worker_that_reports_a_group_is_live_again(router: ScriptedRouter) -> None:
    running(router)
    router.receive("w0", beat("w0", 4, lag_s=61.0))
    router.receive("w0", GroupStarted(group(1), 1))
    assert router.holder(1) == "w0"
    worker = router.group_scheduler.membership.workers.get("w0")
    assert worker is not None
    assert worker.state is WorkerHealth.LIVE


def test_a_draining_worker_finishes_its_groups_and_gets_no_new_ones(router: ScriptedRouter) -> None:
    running(router)
    sends = router.receive("cli", AskDrain(7, "w0", "to be moved"))
    assert only(sends, DrainWorker, "w0") == [DrainWorker("to be moved")]
    assert only(sends, DrainAnswered, "cli") == [DrainAnswered(7, True, "")]
    assert not only(router.asks(ask(2)), RunGroup)
    assert not only(router.advance(4, "w0", "c"), RunGroup)
    assert router.holder(1) == "w0"


def test_a_drain_is_repeated_until_a_heartbeat_shows_it(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.receive("cli", AskDrain(7, "w0", ""))
    assert only(router.advance(5, "w0"), DrainWorker)
    worker = router.group_scheduler.membership.workers.get("w0")
    assert worker is not None
    router.receive("w0", msgspec.structs.replace(beat("w0"), state="draining"))
    assert not only([s for _ in range(10) for s in silent(router)], DrainWorker)


def silent(router: ScriptedRouter) -> list[Send]:
    """Advance half a second, with a heartbeat that shows the drain; return the messages."""
    router.now_s += 0.5
    sends = router.receive("w0", msgspec.structs.replace(beat("w0"), state="draining"))
    return sends + router.group_scheduler.step(Ticked(), router.now_s)


def test_a_drain_of_an_unknown_worker_names_the_known_ones(router: ScriptedRouter) -> None:
    router.worker("w0")
    [answer] = only(router.receive("cli", AskDrain(7, "w9", "")), DrainAnswered)
    assert (answer.ask_id, answer.ok) == (7, False)
    assert answer.error == "no worker 'w9'; there are: w0"


def test_a_drain_of_a_lost_worker_is_refused_as_lost(router: ScriptedRouter) -> None:
    router.worker("w0")
    router.advance(4)
    [answer] = only(router.receive("cli", AskDrain(7, "w0", "")), DrainAnswered)
    assert answer.error == "w0 has sent nothing for 4 s"


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter()


class Fleet:
    """Worn workers, which start to drain when the router requests it and stay until the test
    removes them.
    """

    def __init__(self, router: ScriptedRouter, number: int) -> None:
        self.router = router
        self.states = {f"w{each}": "worn" for each in range(number)}
        for name in self.states:
            router.worker(name)

    def advance(self, seconds: float) -> list[str]:
        """Advance the clock; return the workers that the router drained meanwhile."""
        all_drained: list[str] = []
        for _ in range(round(seconds / 0.5)):
            sends: list[Send] = []
            for name, state in self.states.items():
                self.router.receive(name, msgspec.structs.replace(beat(name), state=state))
            sends = self.router.advance(0.5)
            drained = [name for name in self.states if only(sends, DrainWorker, name)]
            assert {each.reason for each in only(sends, DrainWorker)} <= {RELIEVED}
            self.states.update(dict.fromkeys(drained, "draining"))
            all_drained += drained
        return all_drained

    def leaves(self, name: str) -> None:
        del self.states[name]
        self.router.receive(name, WorkerLeft(name, "recycled: 60 rollouts"))


def test_a_single_worker_leaves_at_once(router: ScriptedRouter) -> None:
    assert Fleet(router, 1).advance(1) == ["w0"]


def test_the_second_worker_waits_for_the_successor_of_the_first(router: ScriptedRouter) -> None:
    fleet = Fleet(router, 2)
    assert fleet.advance(10) == ["w0"]
    fleet.leaves("w0")
    assert fleet.advance(SETTINGS.successor_wait_s / 2) == []
    router.worker("w0", pid=2)
    fleet.states["w0"] = "serving"
    assert fleet.advance(1) == ["w1"]


def test_the_second_worker_leaves_even_if_no_successor_starts(router: ScriptedRouter) -> None:
    fleet = Fleet(router, 2)
    fleet.advance(1)
    fleet.leaves("w0")
    assert fleet.advance(SETTINGS.successor_wait_s - 2) == []
    assert fleet.advance(4) == ["w1"]


def test_a_quarter_of_many_workers_leaves_at_a_time(router: ScriptedRouter) -> None:
    assert len(Fleet(router, 12).advance(10)) == 3


def test_a_worker_of_another_environment_is_no_substitute(router: ScriptedRouter) -> None:
    fleet = Fleet(router, 2)
    worker = fleet.router.group_scheduler.membership.workers.get("w1")
    assert worker
    other = msgspec.structs.replace(worker.hello, env="other")
    router.receive("w1", msgspec.structs.replace(other, pid=7, started_s=7.0))
    assert fleet.advance(1) == ["w0", "w1"]
