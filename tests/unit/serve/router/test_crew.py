"""Workers die, fall silent, stall, drain and come back, and their groups with them."""

import msgspec
import pytest

from rollmesh.serve.router.workers import WorkerHealth
from rollmesh.wire.machine import Send, Ticked
from rollmesh.wire.messages import (
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
from tests.unit.serve.router.story import Story, ask, beat, group, hello, only, running


def test_group_runs_again_when_its_worker_dies(story: Story) -> None:
    running(story)
    story.worker("w1")
    sends = story.passes(4, "w1", "c")
    [run] = only(sends, RunGroup, "w1")
    assert run.attempt == 2
    assert story.holder(1) == "w1"
    assert story.group_scheduler.table.num["workers_lost"] == 1


def test_nothing_is_given_to_a_silent_worker(story: Story) -> None:
    story.worker("w0")
    story.passes(4, "c")
    assert not only(story.asks(ask(1)), RunGroup)


def test_a_worker_that_beats_is_never_given_up(story: Story) -> None:
    running(story)
    story.passes(60, "w0", "c")
    assert story.holder(1) == "w0"
    assert story.group_scheduler.table.groups[group(1)].attempt == 1


def test_a_group_that_fails_again_and_again_ends_at_its_bound(story: Story) -> None:
    story.worker("w0")
    story.asks(ask(1))
    failed: list[GroupFailed] = []
    for attempt in (1, 2, 3):
        assert story.holder(1) == "w0"
        failed = only(story.says("w0", GroupLost(group(1), attempt, "no ack")), GroupFailed)
    [last] = failed
    assert last.reason == "attempts_exhausted: 3 have begun; w0: no ack"
    assert story.is_empty()


def test_a_restarted_worker_process_lost_what_it_ran(story: Story) -> None:
    running(story)
    [run] = only(story.worker("w0", pid=2), RunGroup)
    assert run.attempt == 2


def test_a_worker_that_dials_again_keeps_what_it_runs(story: Story) -> None:
    running(story)
    sends = story.says(b"another-route", hello("w0", HeldGroup(group(1), 1, False)))
    assert not only(sends, RunGroup)
    assert only(story.says(b"another-route", GroupDelivered(group(1), 1)), GroupMoved)
    assert story.is_empty()


def test_a_thawed_worker_keeps_a_group_that_nobody_else_began(story: Story) -> None:
    running(story)
    story.passes(4, "c")
    assert story.state(1) is GroupState.QUEUED
    [moved] = only(story.says("w0", beat("w0", num_running=4)), GroupMoved)
    assert moved == GroupMoved(group(1), GroupState.RUNNING, 1, "w0")
    [run] = only(story.passes(0.5, "w0"), RunGroup)
    assert run.attempt == 1


def test_a_thawed_worker_is_told_what_runs_elsewhere(story: Story) -> None:
    running(story)
    story.worker("w1")
    cancels = only(story.passes(4, "w1", "c"), CancelRun, "w0")
    assert [c.group_id for c in cancels] == [group(1)]
    again = only(story.says("w0", GroupStarted(group(1), 1)), CancelRun, "w0")
    assert {cancel.group_id for cancel in again} == {group(1)}


def test_a_thawed_worker_is_told_what_has_ended_meanwhile(story: Story) -> None:
    running(story)
    story.passes(4, "c")
    story.says("c", CancelGroup(group(1), "enough"))
    assert only(story.says("w0", beat("w0", 4)), CancelRun) == [CancelRun(group(1), "it has ended")]


def test_a_thawed_worker_that_says_what_it_holds_keeps_a_finished_result(story: Story) -> None:
    running(story)
    story.worker("w1")
    story.passes(4, "w1", "c")
    assert story.holder(1) == "w1"
    sends = story.says("w0", hello("w0", HeldGroup(group(1), 1, True)))
    assert not only(sends, CancelRun), "its sink takes the first that comes"


def test_a_claim_stops_the_run_of_who_had_the_group_last(story: Story) -> None:
    running(story)
    story.passes(4, "c")
    story.worker("w1")
    assert story.holder(1) == "w1"
    story.passes(4, "c")
    sends = story.says("w0", hello("w0", HeldGroup(group(1), 1, False)))
    assert story.holder(1) == "w0"
    assert only(sends, CancelRun, "w1") == [CancelRun(group(1), "w0 runs attempt 2")]


def test_a_result_of_a_worker_given_up_ends_the_group_and_the_next_attempt(story: Story) -> None:
    running(story)
    story.worker("w1")
    story.passes(4, "w1", "c")
    sends = story.says("w0", GroupDelivered(group(1), 1))
    assert only(sends, CancelRun, "w1")
    assert only(sends, GroupMoved)[0].state is GroupState.DONE
    assert story.is_empty()


def test_a_router_that_slept_blames_nobody(story: Story) -> None:
    running(story)
    story.now_s += 100.0
    story.group_scheduler.step(Ticked(), story.now_s)
    assert story.state(1) is GroupState.RUNNING
    story.passes(4, "c")
    assert story.state(1) is GroupState.QUEUED


def test_a_router_that_slept_notices_silence_as_soon_as_before(story: Story) -> None:
    running(story)
    story.now_s += 100.0
    story.says("w0", beat("w0"))
    story.group_scheduler.step(Ticked(), story.now_s)
    story.passes(4, "c")
    assert story.state(1) is GroupState.QUEUED


def test_a_lost_worker_is_forgotten_in_the_end(story: Story) -> None:
    story.worker("w0")
    story.passes(5)
    assert len(story.group_scheduler.membership.workers) == 1
    story.passes(600)
    assert len(story.group_scheduler.membership.workers) == 0


# exits, stalls, drains


def test_a_worker_whose_process_ended_is_gone_at_once(story: Story) -> None:
    running(story)
    story.worker("w1")
    [run] = only(story.says("launch", WorkerExited("w0", 1, "killed by signal 9")), RunGroup, "w1")
    assert run.attempt == 2
    assert story.group_scheduler.membership.workers.get("w0") is None
    assert story.group_scheduler.table.num["workers_lost"] == 1


def test_what_an_ended_process_had_said_before_does_not_raise_it(story: Story) -> None:
    running(story)
    story.says("launch", WorkerExited("w0", 1, "killed by signal 9"))
    story.says("w0", hello("w0"))
    story.says("w0", beat("w0"))
    assert story.group_scheduler.membership.workers.get("w0") is None
    story.worker("w0", pid=2)
    assert story.holder(1) == "w0"


def test_a_hello_that_is_heard_late_does_not_end_the_next_process(story: Story) -> None:
    running(story)
    story.worker("w0", pid=2)
    story.says("w0", hello("w0", HeldGroup(group(1), 1, False)))
    worker = story.group_scheduler.membership.workers.get("w0")
    assert worker is not None
    assert worker.hello.pid == 2


def test_a_clock_that_was_set_back_keeps_no_process_out(story: Story) -> None:
    story.worker("w0", pid=5)
    story.passes(4)
    sends = story.says("w0", msgspec.structs.replace(beat("w0"), started_s=2.0))
    assert only(sends, RouterHello, "w0")
    again = msgspec.structs.replace(hello("w0", pid=6), started_s=2.0)
    story.says("w0", again)
    worker = story.group_scheduler.membership.workers.get("w0")
    assert worker is not None
    assert (worker.hello.pid, worker.state) == (6, WorkerHealth.LIVE)


def test_a_beat_of_a_new_process_does_not_raise_the_old_one(story: Story) -> None:
    running(story)
    story.passes(4, "c")
    sends = story.says("w0", msgspec.structs.replace(beat("w0"), started_s=2.0))
    assert only(sends, RouterHello, "w0"), "its hello is asked for"
    assert story.state(1) is GroupState.QUEUED
    story.says("w0", msgspec.structs.replace(beat("w0"), started_s=0.5))
    assert story.state(1) is GroupState.QUEUED
    story.says("w0", msgspec.structs.replace(beat("w0"), started_s=1.0))
    assert story.state(1) is GroupState.RUNNING


def test_a_new_process_of_the_same_pid_is_another_one(story: Story) -> None:
    # As a container's, which is process 1 of its host in every incarnation.
    running(story)
    again = msgspec.structs.replace(hello("w0"), started_s=9.0)
    [run] = only(story.says("w0", again), RunGroup)
    assert run.attempt == 2


def test_a_container_that_is_killed_again_at_once_is_another_process_each_time(
    story: Story,
) -> None:
    running(story)
    incarnations = [msgspec.structs.replace(hello("w0"), started_s=each) for each in (2.0, 3.0)]
    story.says("w0", incarnations[0])
    [failed] = only(story.says("w0", incarnations[1]), GroupFailed)
    assert failed.reason.startswith("quarantined: 2 workers")
    assert [each.hello.started_s for each in story.group_scheduler.membership.workers] == [3.0]


def test_an_exit_that_is_heard_late_does_not_end_the_next_process(story: Story) -> None:
    running(story)
    story.worker("w0", pid=2)
    story.says("launch", WorkerExited("w0", 1, "out of memory"))
    assert story.holder(1) == "w0"
    [death] = story.group_scheduler.table.groups[group(1)].deaths
    assert death.cause == "out of memory"


def test_a_goodbye_that_is_heard_late_does_not_end_the_next_process(story: Story) -> None:
    running(story)
    story.worker("w0", pid=2)
    assert story.holder(1) == "w0"
    story.says("w0", WorkerLeft("w0", "stopped", 1, 1.0))
    assert story.holder(1) == "w0"
    assert story.group_scheduler.membership.workers.get("w0") is not None


def test_a_process_that_has_left_is_not_raised_by_what_it_had_said(story: Story) -> None:
    story.says("w0", WorkerLeft("w0", "stopped", 1, 1.0))
    story.worker("w0")
    assert story.group_scheduler.membership.workers.get("w0") is None
    story.worker("w0", pid=2)
    assert story.group_scheduler.membership.workers.get("w0") is not None


def test_who_left_in_peace_has_killed_nothing_though_its_end_is_heard_first(story: Story) -> None:
    running(story)
    story.says("launch", WorkerExited("w0", 1, "exit code 0"))
    assert story.group_scheduler.table.groups[group(1)].deaths
    for _ in range(2):
        story.says("w0", WorkerLeft("w0", "stopped", 1, 1.0))
    found = story.group_scheduler.table.groups[group(1)]
    assert (found.deaths, found.attempt, found.tries) == ((), 1, 0)
    [run] = only(story.worker("w0", pid=2), RunGroup)
    assert run.attempt == 2


def test_an_env_failure_that_is_heard_late_does_not_end_the_next_process(story: Story) -> None:
    story.worker("w0", pid=2)
    story.asks(ask(1))
    story.says("w0", EnvFailed("w0", "guess", "no module named x", 1, 1.0))
    assert story.holder(1) == "w0"


@pytest.mark.parametrize(
    "message",
    [
        EnvFailed("w0", "guess", "no module named x", 2, 2.0),
        msgspec.structs.replace(hello("w0", pid=2), loads_for_s=120.0),
    ],
)
def test_a_process_that_does_not_serve_yet_tells_that_the_earlier_one_has_ended(
    story: Story, message: EnvFailed | WorkerHello
) -> None:
    running(story)
    story.worker("w1")
    [run] = only(story.says("w0", message), RunGroup, "w1")
    assert run.attempt == 2
    [death] = story.group_scheduler.table.groups[group(1)].deaths
    assert (death.incarnation.pid, death.cause) == (1, "its process was replaced")


def test_a_name_that_another_host_takes_accuses_no_group(story: Story) -> None:
    # As a pod's that came back elsewhere: the one before may only be cut off.
    story.asks(ask(1))
    for pid in (1, 2, 3):
        at = msgspec.structs.replace(hello("w0", pid=pid), host=f"node-{pid}")
        assert not only(story.says("w0", at), GroupFailed)
    assert [death.is_certain for death in story.group_scheduler.table.groups[group(1)].deaths] == [
        False
    ] * 2
    story.says("launch", WorkerExited("w0", 1, "killed by signal 9"))
    [failed] = only(story.says("launch", WorkerExited("w0", 2, "out of memory")), GroupFailed)
    assert failed.reason.endswith("(w0: killed by signal 9; w0: out of memory)")


def test_a_stalled_worker_is_given_up_only_past_its_own_longer_limit(story: Story) -> None:
    running(story)
    story.worker("w1")
    for lag_s in (1.0, 30.0, 59.0):
        assert not only(story.says("w0", beat("w0", 4, lag_s=lag_s)), RunGroup)
    [run] = only(story.says("w0", beat("w0", 4, lag_s=61.0)), RunGroup, "w1")
    assert run.attempt == 2
    worker = story.group_scheduler.membership.workers.get("w0")
    assert worker is not None
    assert worker.state is WorkerHealth.STALLED


def test_a_stalled_worker_gets_nothing_until_its_loop_is_free(story: Story) -> None:
    story.worker("w0")
    story.says("w0", beat("w0", lag_s=61.0))
    assert not only(story.asks(ask(1)), RunGroup)
    assert not only(story.says("w0", beat("w0", lag_s=70.0)), RunGroup)
    assert only(story.says("w0", beat("w0", lag_s=0.0)), RunGroup)


def test_a_freed_loop_keeps_what_nobody_else_began(story: Story) -> None:
    running(story)
    story.says("w0", beat("w0", 4, lag_s=61.0))
    assert story.state(1) is GroupState.QUEUED
    story.says("w0", beat("w0", 4))
    assert (story.state(1), story.holder(1)) == (GroupState.RUNNING, "w0")
    assert story.group_scheduler.table.groups[group(1)].attempt == 1
    assert story.group_scheduler.table.groups[group(1)].deaths == ()


def test_a_stalled_worker_that_speaks_of_a_group_lives(story: Story) -> None:
    running(story)
    story.says("w0", beat("w0", 4, lag_s=61.0))
    story.says("w0", GroupStarted(group(1), 1))
    assert story.holder(1) == "w0"
    worker = story.group_scheduler.membership.workers.get("w0")
    assert worker is not None
    assert worker.state is WorkerHealth.LIVE


def test_a_drained_worker_finishes_and_gets_nothing_new(story: Story) -> None:
    running(story)
    sends = story.says("cli", AskDrain(7, "w0", "to be moved"))
    assert only(sends, DrainWorker, "w0") == [DrainWorker("to be moved")]
    assert only(sends, DrainAnswered, "cli") == [DrainAnswered(7, True, "")]
    assert not only(story.asks(ask(2)), RunGroup)
    assert not only(story.passes(4, "w0", "c"), RunGroup)
    assert story.holder(1) == "w0"


def test_a_drain_is_said_again_until_a_beat_shows_it(story: Story) -> None:
    story.worker("w0")
    story.says("cli", AskDrain(7, "w0", ""))
    assert only(story.passes(5, "w0"), DrainWorker)
    worker = story.group_scheduler.membership.workers.get("w0")
    assert worker is not None
    story.says("w0", msgspec.structs.replace(beat("w0"), state="draining"))
    assert not only([s for _ in range(10) for s in silent(story)], DrainWorker)


def silent(story: Story) -> list[Send]:
    """Half a second in which the draining worker beats."""
    story.now_s += 0.5
    sends = story.says("w0", msgspec.structs.replace(beat("w0"), state="draining"))
    return sends + story.group_scheduler.step(Ticked(), story.now_s)


def test_a_drain_of_nobody_names_who_is_there(story: Story) -> None:
    story.worker("w0")
    [answer] = only(story.says("cli", AskDrain(7, "w9", "")), DrainAnswered)
    assert (answer.ask_id, answer.ok) == (7, False)
    assert answer.error == "no worker 'w9'; there are: w0"


def test_a_drain_of_a_lost_worker_says_so(story: Story) -> None:
    story.worker("w0")
    story.passes(4)
    [answer] = only(story.says("cli", AskDrain(7, "w0", "")), DrainAnswered)
    assert answer.error == "w0 has not been heard for 4 s"
