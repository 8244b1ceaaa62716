"""The ledger's promises, each told as a short story of messages on a clock that we move."""

from typing import TypeVar

import pytest

from rollmesh.core.config import RouterConfig
from rollmesh.core.ids import GroupId
from rollmesh.serve.router.ledger import Ledger
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.messages import (
    AskGroup,
    AskRefused,
    CancelGroup,
    CancelRun,
    ClientBeat,
    ClientHello,
    ClientLeft,
    EnvFailed,
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
    WorkerBeat,
    WorkerHello,
    WorkerLeft,
)

M = TypeVar("M", bound=Message)
SETTINGS = RouterConfig(
    beat_s=1.0, missed_beats=3, max_attempts=3, client_grace_s=10.0, max_queued_groups=8
)
SETTLED_S = 3.0
CLIENT = b"client"


def group(seq: int) -> GroupId:
    return GroupId("r1", seq)


def hello(worker: str, *holds: HeldGroup, env: str = "guess", pid: int = 1) -> WorkerHello:
    return WorkerHello(worker, env, max_rollouts=8, pid=pid, host="here", holds=holds)


def beat(worker: str, num_running: int = 0, accepting: bool = True, lag_s: float = 0) -> WorkerBeat:
    return WorkerBeat(worker, num_running, accepting, 0, lag_s, 0, 0, 0, 0)


def ask(
    seq: int, *, n: int = 4, attempts: int = 0, client: str = "c", env: str = "guess", prio: int = 0
) -> AskGroup:
    return AskGroup(group(seq), client, env, n, "tcp://sink", attempts, prio)


class Story:
    """A ledger that listens to whatever the test lets its peers say."""

    def __init__(self, settings: RouterConfig = SETTINGS, started_s: float = 0.0) -> None:
        self.now_s = started_s
        self.ledger = Ledger(settings, started_s)

    def says(self, route: bytes | str, message: Message, body: bytes = b"") -> list[Send]:
        route = route.encode() if isinstance(route, str) else route
        return self.ledger.step(Received(route, message, body), self.now_s)  # type: ignore[arg-type]

    def worker(self, name: str, *holds: HeldGroup, pid: int = 1) -> list[Send]:
        return self.says(name, hello(name, *holds, pid=pid))

    def asks(self, message: AskGroup, body: bytes = b"ask") -> list[Send]:
        return self.says(message.client_id, message, body)

    def passes(self, seconds: float, *beating: str) -> list[Send]:
        """Half a beat at a time; the workers named beat each time, so does the client `c`."""
        sends: list[Send] = []
        for _ in range(round(seconds / 0.5)):
            self.now_s += 0.5
            for name in beating:
                sends += self.says(name, ClientBeat(name, 0) if name == "c" else beat(name))
            sends += self.ledger.step(Ticked(), self.now_s)
        return sends

    def state(self, seq: int) -> GroupState | None:
        found = self.ledger.book.groups.get(group(seq))
        return found.state if found else None

    def holder(self, seq: int) -> str:
        return self.ledger.book.groups[group(seq)].worker_id

    def is_empty(self) -> bool:
        book = self.ledger.book
        return not book.groups and not len(book.queue) and not book.held


def only(sends: list[Send], kind: type[M], route: bytes | str | None = None) -> list[M]:
    wanted = route.encode() if isinstance(route, str) else route
    return [s.message for s in sends if isinstance(s.message, kind) and wanted in (None, s.route)]


@pytest.fixture
def story() -> Story:
    return Story()


def running(story: Story, seq: int = 1, worker: str = "w0") -> None:
    """One worker, one group that it runs."""
    story.worker(worker)
    story.asks(ask(seq))
    story.says(worker, GroupStarted(group(seq), 1))
    assert story.state(seq) is GroupState.RUNNING


# the straight way


def test_a_group_goes_whole_to_one_worker_with_its_body_unopened(story: Story) -> None:
    story.worker("w0")
    sends = story.asks(ask(1), body=b"\x00opaque")
    [run] = [s for s in sends if isinstance(s.message, RunGroup)]
    assert run == Send(b"w0", RunGroup(group(1), 1, 4, "tcp://sink"), b"\x00opaque")
    assert only(sends, GroupMoved) == [GroupMoved(group(1), GroupState.ASSIGNED, 1, "w0")]


def test_an_ask_waits_for_the_first_worker(story: Story) -> None:
    [moved] = only(story.asks(ask(1)), GroupMoved)
    assert moved == GroupMoved(group(1), GroupState.QUEUED, 0, "")
    assert only(story.worker("w0"), RunGroup)


def test_a_delivered_group_is_forgotten_and_its_slots_are_free(story: Story) -> None:
    running(story)
    [moved] = only(story.says("w0", GroupDelivered(group(1), 1)), GroupMoved)
    assert moved == GroupMoved(group(1), GroupState.DONE, 1, "w0")
    assert story.is_empty()
    [worker] = story.ledger.crew.workers
    assert (worker.num_seated, worker.groups) == (0, {})


def test_notes_of_the_past_are_torn_after_the_patience(story: Story) -> None:
    running(story)
    story.says("w0", GroupDelivered(group(1), 1))
    assert story.ledger.book.has_ended(group(1))
    story.passes(4, "w0", "c")
    assert not story.ledger.book.has_ended(group(1))


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


# refusals


def test_a_full_queue_refuses_and_says_when_to_come_back(story: Story) -> None:
    for seq in range(8):
        story.asks(ask(seq))
    [refused] = only(story.asks(ask(8)), AskRefused)
    assert refused.group_id == group(8)
    assert refused.retry_after_s > 0
    assert story.state(8) is None


def test_an_ask_for_no_samples_fails_at_once(story: Story) -> None:
    [failed] = only(story.asks(ask(1, n=0)), GroupFailed)
    assert "num_samples" in failed.reason


def test_an_env_that_cannot_load_fails_what_waits_and_what_comes(story: Story) -> None:
    story.asks(ask(1))
    told = story.says("w0", EnvFailed("w0", "guess", "no module named x"))
    assert only(told, GroupFailed) == [GroupFailed(group(1), "env_failed: no module named x")]
    [failed] = only(story.asks(ask(2)), GroupFailed)
    assert failed.reason == "env_failed: no module named x"
    assert story.is_empty()


def test_a_worker_that_loads_the_env_clears_its_failure(story: Story) -> None:
    story.says("w0", EnvFailed("w0", "guess", "flaky"))
    story.worker("w1")
    assert only(story.asks(ask(1)), RunGroup)


def test_one_failed_worker_fails_nothing_while_another_serves_the_env(story: Story) -> None:
    story.worker("w1")
    assert not only(story.says("w0", EnvFailed("w0", "guess", "flaky")), GroupFailed)
    assert only(story.asks(ask(1)), RunGroup)


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


# clients


def test_cancel_stops_a_running_group(story: Story) -> None:
    running(story)
    sends = story.says("c", CancelGroup(group(1), "stale"))
    assert only(sends, CancelRun, "w0") == [CancelRun(group(1), "stale")]
    assert only(sends, GroupMoved)[0].state is GroupState.CANCELLED
    assert story.is_empty()


def test_a_client_that_leaves_takes_its_groups_along(story: Story) -> None:
    running(story)
    story.asks(ask(2, client="other"))
    assert only(story.says("c", ClientLeft("c")), CancelRun, "w0")
    assert story.state(1) is None
    assert story.holder(2) == "w0"


def test_a_vanished_client_has_a_grace_and_then_its_groups_end(story: Story) -> None:
    running(story)
    story.passes(12, "w0")
    assert story.state(1) is GroupState.RUNNING
    [failed] = only(story.passes(2, "w0"), GroupFailed)
    assert failed.reason.startswith("client_vanished")
    assert story.is_empty()
    assert story.ledger.book.clients == {}


def test_a_client_that_comes_back_in_time_loses_nothing(story: Story) -> None:
    running(story)
    story.passes(12, "w0")
    story.says(b"new-route", ClientHello("c"))
    story.passes(12, "w0")
    [moved] = only(story.says("w0", GroupDelivered(group(1), 1)), GroupMoved, b"new-route")
    assert moved.state is GroupState.DONE


@pytest.mark.parametrize("message", [ClientBeat("c", 3), beat("w0"), ClientHello("c")])
def test_who_is_not_known_is_greeted_so_that_it_says_all_again(
    story: Story, message: Message
) -> None:
    assert only(story.says("peer", message), RouterHello, "peer") == [RouterHello(1.0)]


# after a restart of the router


def test_a_claimed_group_is_not_run_twice_after_a_restart(story: Story) -> None:
    story.asks(ask(1, attempts=1))
    assert not only(story.says("w1", hello("w1")), RunGroup)
    sends = story.worker("w0", HeldGroup(group(1), 1, False))
    assert only(sends, GroupMoved) == [GroupMoved(group(1), GroupState.RUNNING, 1, "w0")]
    assert not only(story.passes(10, "w0", "w1", "c"), RunGroup, "w1")
    assert story.holder(1) == "w0"


def test_the_claim_may_come_before_the_ask(story: Story) -> None:
    story.worker("w0", HeldGroup(group(1), 2, False))
    sends = story.asks(ask(1, attempts=1))
    assert only(sends, GroupMoved) == [GroupMoved(group(1), GroupState.RUNNING, 2, "w0")]
    assert not only(story.passes(10, "w0", "c"), RunGroup)
    [worker] = story.ledger.crew.workers
    assert worker.num_seated == 4
    story.says("w0", GroupDelivered(group(1), 2))
    assert worker.num_seated == 0


def test_what_nobody_claims_is_queued_after_three_beats(story: Story) -> None:
    story.worker("w0")
    assert not only(story.asks(ask(1, attempts=1)), RunGroup)
    [run] = only(story.passes(SETTLED_S, "w0", "c"), RunGroup)
    assert run.attempt == 2


def test_a_fresh_ask_does_not_wait_for_claims(story: Story) -> None:
    story.worker("w0")
    assert only(story.asks(ask(1, attempts=0)), RunGroup)


def test_what_no_client_claims_is_cancelled(story: Story) -> None:
    story.worker("w0", HeldGroup(group(1), 1, False))
    [cancel] = only(story.passes(SETTLED_S, "w0"), CancelRun, "w0")
    assert cancel.group_id == group(1)
    assert story.is_empty()


def test_a_finished_result_is_left_to_its_sink(story: Story) -> None:
    story.worker("w0", HeldGroup(group(1), 1, True))
    assert not only(story.passes(SETTLED_S, "w0"), CancelRun)
    assert story.is_empty()


def test_an_ask_claimed_after_the_settling_is_still_recognised(story: Story) -> None:
    story.passes(5)
    story.asks(ask(1, attempts=1))
    assert story.state(1) is GroupState.QUEUED
    story.worker("w0", HeldGroup(group(1), 1, False))
    assert story.state(1) is GroupState.RUNNING


def test_a_start_from_a_worker_not_greeted_yet_asks_for_its_hello(story: Story) -> None:
    assert only(story.says("w0", GroupStarted(group(1), 1)), RouterHello, "w0")
