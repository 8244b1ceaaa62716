"""How groups get to workers, stay there and come back, whatever dies or is lost."""

import pytest

from rollmesh.wire.machine import Ticked
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
    HeldGroup,
    Message,
    RouterHello,
    RunGroup,
    WorkerLeft,
)
from tests.unit.serve.router.story import SETTLED_S, Story, ask, beat, group, hello, only, running


@pytest.fixture
def story() -> Story:
    return Story()


# balance


def test_groups_go_to_the_worker_with_the_most_free_slots(story: Story) -> None:
    story.worker("w0")
    story.worker("w1")
    for seq in range(4):
        story.asks(ask(seq))
    holders = [story.holder(seq) for seq in range(4)]
    assert holders == ["w0", "w1", "w0", "w1"]


def test_no_worker_gets_more_than_its_slots(story: Story) -> None:
    story.worker("w0")
    for seq in range(3):
        story.asks(ask(seq))
    assert [story.state(seq) for seq in range(3)] == [
        GroupState.ASSIGNED,
        GroupState.ASSIGNED,
        GroupState.QUEUED,
    ]


def test_a_group_larger_than_any_worker_goes_to_an_idle_one(story: Story) -> None:
    story.worker("w0")
    story.asks(ask(1, n=100))
    assert story.holder(1) == "w0"
    story.asks(ask(2, n=1))
    assert story.state(2) is GroupState.QUEUED


def test_slots_of_finished_siblings_are_free_before_their_group_ends(story: Story) -> None:
    story.worker("w0")
    story.asks(ask(1, n=8))
    story.asks(ask(2, n=4))
    story.says("w0", GroupStarted(group(1), 1))
    story.says("w0", beat("w0", num_running=8))
    assert story.state(2) is GroupState.QUEUED
    sends = story.says("w0", beat("w0", num_running=4))
    assert [r.group_id for r in only(sends, RunGroup)] == [group(2)]


def test_a_beat_older_than_an_assignment_does_not_free_its_slots(story: Story) -> None:
    story.worker("w0")
    story.asks(ask(1, n=8))
    story.says("w0", beat("w0", num_running=0))
    story.asks(ask(2, n=4))
    assert story.state(2) is GroupState.QUEUED


def test_a_worker_that_accepts_nothing_gets_nothing(story: Story) -> None:
    story.worker("w0")
    story.says("w0", beat("w0", accepting=False))
    story.asks(ask(1))
    assert story.state(1) is GroupState.QUEUED
    assert only(story.says("w0", beat("w0")), RunGroup)


def test_a_stalled_worker_comes_last(story: Story) -> None:
    story.worker("w0")
    story.worker("w1")
    story.says("w0", beat("w0", lag_s=5.0))
    story.says("w1", beat("w1"))
    story.asks(ask(1))
    story.asks(ask(2))
    story.asks(ask(3))
    assert [story.holder(seq) for seq in (1, 2, 3)] == ["w1", "w1", "w0"]


def test_a_group_waits_for_a_worker_of_its_environment(story: Story) -> None:
    story.worker("w0")
    story.asks(ask(1, env="echo"))
    assert story.state(1) is GroupState.QUEUED
    story.says("w1", hello("w1", env="echo"))
    assert story.holder(1) == "w1"


def test_clients_take_turns(story: Story) -> None:
    for seq in range(3):
        story.asks(ask(seq, n=8, client="greedy"))
    story.asks(ask(7, n=8, client="modest"))
    order = [run.group_id.seq for run in only(story.worker("w0"), RunGroup)]
    while not story.is_empty():
        sends = story.says("w0", GroupDelivered(group(order[-1]), 1))
        order += [run.group_id.seq for run in only(sends, RunGroup)]
    assert order == [0, 7, 1, 2]


def test_higher_priority_runs_first(story: Story) -> None:
    story.asks(ask(1))
    story.asks(ask(2, prio=5))
    runs = only(story.worker("w0"), RunGroup)
    assert [run.group_id.seq for run in runs] == [2, 1]


# death of workers


def test_group_runs_again_when_its_worker_dies(story: Story) -> None:
    running(story)
    story.worker("w1")
    sends = story.passes(4, "w1", "c")
    [run] = only(sends, RunGroup, "w1")
    assert run.attempt == 2
    assert story.holder(1) == "w1"
    assert story.ledger.book.num["workers_lost"] == 1


def test_nothing_is_given_to_a_silent_worker(story: Story) -> None:
    story.worker("w0")
    story.passes(4, "c")
    assert not only(story.asks(ask(1)), RunGroup)


def test_a_worker_that_beats_is_never_given_up(story: Story) -> None:
    running(story)
    story.passes(60, "w0", "c")
    assert story.holder(1) == "w0"
    assert story.ledger.book.groups[group(1)].attempt == 1


def test_a_group_whose_workers_die_again_and_again_fails_at_its_bound(story: Story) -> None:
    story.asks(ask(1))
    failed: list[GroupFailed] = []
    for number in range(3):
        story.worker(f"w{number}")
        assert story.holder(1) == f"w{number}"
        failed = only(story.says(f"w{number}", WorkerLeft(f"w{number}", "gone")), GroupFailed)
    [last] = failed
    assert last.reason.startswith("attempts_exhausted: 3 have begun")
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
    [again] = only(story.says("w0", GroupStarted(group(1), 1)), CancelRun, "w0")
    assert again.group_id == group(1)


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
    story.ledger.step(Ticked(), story.now_s)
    assert story.state(1) is GroupState.RUNNING
    story.passes(4, "c")
    assert story.state(1) is GroupState.QUEUED


def test_a_lost_worker_is_forgotten_in_the_end(story: Story) -> None:
    story.worker("w0")
    story.passes(5)
    assert len(story.ledger.crew.workers) == 1
    story.passes(600)
    assert len(story.ledger.crew.workers) == 0


# lost, doubled and late messages


def test_run_group_is_said_again_until_it_started(story: Story) -> None:
    story.worker("w0")
    story.asks(ask(1))
    [again] = only(story.passes(2, "w0"), RunGroup)
    assert again.attempt == 1
    story.says("w0", GroupStarted(group(1), 1))
    assert not only(story.passes(5, "w0"), RunGroup)


def test_a_live_worker_that_never_starts_a_group_loses_it(story: Story) -> None:
    story.worker("w0")
    story.asks(ask(1))
    story.passes(19, "w0", "c")
    story.worker("w1")
    story.says("w0", beat("w0", lag_s=20))
    sends = story.passes(2, "w1", "c")
    [run] = only(sends, RunGroup, "w1")
    assert run.attempt == 2


def test_a_lost_delivery_is_asked_for_again(story: Story) -> None:
    running(story)
    [again] = only(story.passes(21, "w0", "c"), RunGroup)
    assert again.attempt == 1
    story.says("w0", GroupDelivered(group(1), 1))
    assert story.is_empty()


def test_a_doubled_ask_runs_once(story: Story) -> None:
    story.worker("w0")
    assert only(story.asks(ask(1)), RunGroup)
    sends = story.asks(ask(1))
    assert not only(sends, RunGroup)
    assert only(sends, GroupMoved) == [GroupMoved(group(1), GroupState.ASSIGNED, 1, "w0")]


def test_a_late_double_of_an_ask_that_ended_does_not_run_again(story: Story) -> None:
    running(story)
    story.says("w0", GroupDelivered(group(1), 1))
    sends = story.asks(ask(1, attempts=0))
    assert only(sends, GroupMoved) == [GroupMoved(group(1), GroupState.DONE, 1, "w0")]
    assert story.is_empty()


def test_a_client_that_knows_of_the_attempt_may_ask_for_another(story: Story) -> None:
    running(story)
    story.passes(SETTLED_S, "w0", "c")
    story.says("w0", GroupDelivered(group(1), 1))
    [run] = only(story.asks(ask(1, attempts=1)), RunGroup)
    assert run.attempt == 2


def test_a_cancel_that_overtakes_its_ask_wins(story: Story) -> None:
    story.worker("w0")
    story.says("c", CancelGroup(group(1), "changed my mind"))
    [moved] = only(story.asks(ask(1)), GroupMoved)
    assert moved.state is GroupState.CANCELLED
    assert story.is_empty()


def test_a_late_start_of_a_cancelled_group_is_cancelled_again(story: Story) -> None:
    story.worker("w0")
    story.asks(ask(1))
    assert only(story.says("c", CancelGroup(group(1), "enough")), CancelRun, "w0")
    assert only(story.says("w0", GroupStarted(group(1), 1)), CancelRun, "w0")
    assert story.is_empty()


def test_a_returned_group_runs_elsewhere_and_the_attempt_does_not_count(story: Story) -> None:
    story.worker("w0")
    story.worker("w1")
    story.asks(ask(1))
    [run] = only(story.says("w0", GroupReturned(group(1), 1, "draining")), RunGroup, "w1")
    assert run.attempt == 1


def test_a_returned_group_is_not_thrown_back_at_once(story: Story) -> None:
    story.worker("w0")
    story.asks(ask(1))
    assert not only(story.says("w0", GroupReturned(group(1), 1, "full")), RunGroup)
    assert only(story.says("w0", beat("w0")), RunGroup)


@pytest.mark.parametrize(
    "message",
    [
        GroupStarted(group(9), 1),
        GroupDelivered(group(9), 1),
        GroupReturned(group(9), 1, ""),
        CancelGroup(group(9), ""),
        WorkerLeft("nobody", ""),
        ClientLeft("nobody"),
        RouterHello(1.0),
        RunGroup(group(9), 1, 1, ""),
    ],
)
def test_a_message_about_nothing_known_changes_nothing(story: Story, message: Message) -> None:
    story.says("stranger", message)
    assert story.is_empty()
    assert len(story.ledger.crew.workers) == 0
