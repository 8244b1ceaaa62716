"""Open requests are repeated if the router forgets them or the network loses them."""

import random

from rollmesh.core.ids import GroupId
from rollmesh.serve.client.asks import (
    Action,
    Arrived,
    Asked,
    AskEnded,
    AskMachine,
    AskSettings,
    Cancelled,
    Closed,
    ResultFailed,
    Waits,
)
from rollmesh.serve.client.journal_entries import GroupTried
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked
from rollmesh.wire.messages import (
    AnyMessage,
    AskGroup,
    AskRefused,
    AttemptFailed,
    CancelGroup,
    ClientBeat,
    ClientHello,
    ClientLeft,
    GroupFailed,
    GroupMoved,
    GroupState,
    RouterHello,
)

ONE, TWO, THREE = GroupId("r1", 1), GroupId("r1", 2), GroupId("r1", 3)


def new_asks(keep: bool = False) -> AskMachine:
    return AskMachine(AskSettings(client_id="c1", sink="tcp://sink", beat_s=1.0, keep=keep))


def met_asks() -> AskMachine:
    asks = new_asks()
    receive(asks, RouterHello(1.0), now_s=0.0)
    receive(
        asks, RouterHello(1.0), now_s=0.0
    )  # the answer to the greeting that the RouterHello caused
    asks.step(Ticked(), 0.0)
    return asks


def ask(asks: AskMachine, group_id: GroupId, now_s: float = 0.0) -> list[Action]:
    return asks.step(Asked(group_id=group_id, env="guess", num_samples=4, body=b"task"), now_s)


def receive(
    asks: AskMachine, message: AnyMessage, now_s: float, router: str = "i1"
) -> list[Action]:
    return asks.step(Received(ROUTER, message, router=router), now_s)


def messages_in(actions: list[Action]) -> list[AnyMessage]:
    return [action.message for action in actions if isinstance(action, Send)]


def test_each_request_has_its_own_ticket_and_repeats_it() -> None:
    asks = met_asks()
    [first], [second] = messages_in(ask(asks, ONE)), messages_in(ask(asks, TWO))
    assert isinstance(first, AskGroup)
    assert isinstance(second, AskGroup)
    assert len(first.ticket) == 16
    assert first.ticket != second.ticket
    again = [each for each in messages_in(asks.step(Ticked(), 100.0)) if isinstance(each, AskGroup)]
    assert {each.group_id: each.ticket for each in again} == {
        ONE: first.ticket,
        TWO: second.ticket,
    }


def test_a_refused_result_of_an_open_request_is_reported_to_the_router() -> None:
    asks = met_asks()
    ask(asks, ONE)
    assert messages_in(asks.step(ResultFailed(ONE, 1, "w1", "malformed"), 0.0)) == [
        AttemptFailed(ONE, 1, "w1", "malformed")
    ]
    assert asks.step(ResultFailed(TWO, 1, "w1", "malformed"), 0.0) == []


def test_nothing_is_requested_before_a_router_answers_the_hello() -> None:
    asks = new_asks()
    assert ask(asks, ONE) == []
    assert messages_in(asks.step(Ticked(), 0.0)) == [ClientHello("c1")]
    hello, message = messages_in(receive(asks, RouterHello(0.5), 0.1))
    assert hello == ClientHello("c1")
    assert isinstance(message, AskGroup)
    assert (message.group_id, message.sink, message.attempts) == (ONE, "tcp://sink", 0)
    assert asks.beat_s == 0.5


def test_attempts_of_kept_requests_are_journaled_from_the_second_on() -> None:
    asks = new_asks(keep=True)
    ask(asks, ONE)
    receive(asks, RouterHello(1.0), now_s=0.0)
    noted = [
        receive(asks, GroupMoved(ONE, GroupState.RUNNING, attempt, "w1", excused), now_s=1.0)
        for attempt, excused in ((1, 0), (1, 0), (2, 0), (2, 0), (2, 1), (3, 1))
    ]
    tried = [action for actions in noted for action in actions if isinstance(action, GroupTried)]
    assert tried == [GroupTried(ONE, 2, 0), GroupTried(ONE, 2, 1), GroupTried(ONE, 3, 1)]
    again = new_asks(keep=True)
    again.step(Asked(group_id=ONE, env="guess", num_samples=4, attempts=3, excused=1), 0.0)
    [message] = [
        m for m in messages_in(receive(again, RouterHello(1.0), 0.0)) if isinstance(m, AskGroup)
    ]
    assert (message.attempts, message.excused) == (3, 1)


def test_attempts_of_requests_that_end_with_their_client_are_not_journaled() -> None:
    asks = met_asks()
    ask(asks, ONE)
    assert receive(asks, GroupMoved(ONE, GroupState.RUNNING, 2, "w1"), now_s=1.0) == []


def test_a_request_carries_its_body_unchanged() -> None:
    [send] = ask(met_asks(), ONE)
    assert isinstance(send, Send)
    assert send.body == b"task"


def test_a_repeated_request_is_one_request() -> None:
    asks = met_asks()
    ask(asks, ONE)
    assert ask(asks, ONE) == []


def test_a_client_sends_one_heartbeat_per_interval() -> None:
    asks = met_asks()
    assert messages_in(asks.step(Ticked(), 0.5)) == []
    assert messages_in(asks.step(Ticked(), 1.0)) == [ClientBeat("c1", 0)]


def test_an_unconfirmed_request_is_repeated() -> None:
    asks = met_asks()
    ask(asks, ONE)
    assert not any(isinstance(m, AskGroup) for m in messages_in(asks.step(Ticked(), 3.9)))
    assert any(isinstance(m, AskGroup) for m in messages_in(asks.step(Ticked(), 4.0)))


def test_a_confirmed_request_is_repeated_only_after_a_long_silence() -> None:
    asks = met_asks()
    ask(asks, ONE)
    receive(asks, GroupMoved(ONE, GroupState.QUEUED, 0, ""), 1.0)
    assert not any(isinstance(m, AskGroup) for m in messages_in(asks.step(Ticked(), 40.0)))
    assert any(isinstance(m, AskGroup) for m in messages_in(asks.step(Ticked(), 41.0)))


def test_a_new_router_receives_every_open_request_with_its_attempts() -> None:
    asks = met_asks()
    ask(asks, ONE)
    ask(asks, TWO)
    receive(asks, GroupMoved(ONE, GroupState.RUNNING, 2, "w1", excused=1), 1.0)
    messages = messages_in(receive(asks, RouterHello(1.0), 2.0, router="i2"))
    attempts = {m.group_id: (m.attempts, m.excused) for m in messages if isinstance(m, AskGroup)}
    assert attempts == {ONE: (2, 1), TWO: (0, 0)}


def test_the_reason_why_a_group_waits_reaches_the_program() -> None:
    asks = met_asks()
    ask(asks, ONE)
    moved = GroupMoved(ONE, GroupState.QUEUED, 0, "", reason="no worker")
    assert receive(asks, moved, 1.0) == [Waits("no worker")]
    assert ONE in asks.open


def test_a_router_that_forgot_the_client_receives_every_open_request() -> None:
    asks = met_asks()
    ask(asks, ONE)
    hello, again = messages_in(receive(asks, RouterHello(1.0), 2.0))
    assert (type(hello), type(again)) == (ClientHello, AskGroup)
    assert messages_in(receive(asks, RouterHello(1.0), 2.1)) == []


def test_a_finished_group_is_forgotten() -> None:
    asks = met_asks()
    ask(asks, ONE)
    asks.step(Arrived(ONE), 1.0)
    assert not asks.open
    assert messages_in(receive(asks, RouterHello(1.0), 2.0, router="i2")) == [ClientHello("c1")]


def test_a_failed_group_ends_once_with_its_reason() -> None:
    asks = met_asks()
    ask(asks, ONE)
    assert receive(asks, GroupFailed(ONE, "env_failed: no"), 1.0) == [
        AskEnded(ONE, "env_failed: no")
    ]
    assert receive(asks, GroupFailed(ONE, "env_failed: no"), 1.0) == []


def test_a_group_that_the_router_cancels_ends() -> None:
    asks = met_asks()
    ask(asks, ONE)
    [ended] = receive(asks, GroupMoved(ONE, GroupState.CANCELLED, 1, ""), 1.0)
    assert isinstance(ended, AskEnded)


def test_a_refused_request_is_repeated_at_the_routers_retry_time() -> None:
    asks = met_asks()
    ask(asks, ONE)
    receive(asks, AskRefused(ONE, "full", 9.0), 0.0)
    assert not any(isinstance(m, AskGroup) for m in messages_in(asks.step(Ticked(), 8.0)))
    assert any(isinstance(m, AskGroup) for m in messages_in(asks.step(Ticked(), 9.0)))


def test_a_refused_request_takes_the_place_of_an_ended_one() -> None:
    asks = met_asks()
    ask(asks, ONE)
    ask(asks, TWO)
    ask(asks, THREE)
    receive(asks, AskRefused(TWO, "full", 9.0), 0.0)
    receive(asks, AskRefused(THREE, "full", 9.0), 0.0)
    asks.step(Cancelled(TWO, "no longer wanted"), 0.5)
    [again] = messages_in(asks.step(Arrived(ONE), 1.0))
    assert isinstance(again, AskGroup)
    assert again.group_id == THREE
    assert messages_in(asks.step(Arrived(THREE), 2.0)) == []


def test_an_open_request_that_the_router_reports_as_done_is_repeated() -> None:
    asks = met_asks()
    ask(asks, ONE)
    receive(asks, GroupMoved(ONE, GroupState.RUNNING, 1, "w1"), 0.0)
    assert receive(asks, GroupMoved(ONE, GroupState.DONE, 1, "w1"), 1.0) == []
    assert any(isinstance(m, AskGroup) for m in messages_in(asks.step(Ticked(), 5.0)))


def test_a_cancellation_is_repeated_until_confirmed_at_most_a_few_times() -> None:
    asks = met_asks()
    [asked] = [m for m in messages_in(ask(asks, ONE)) if isinstance(m, AskGroup)]
    ended, cancel = asks.step(Cancelled(ONE, "stale"), 0.0)
    assert ended == AskEnded(ONE, "stale")
    cancel_sent = CancelGroup(ONE, "stale", asked.ticket)
    assert cancel == Send(ROUTER, cancel_sent)
    again = [m for t in range(1, 30) for m in messages_in(asks.step(Ticked(), t))]
    assert [m for m in again if isinstance(m, CancelGroup)] == [cancel_sent] * 2
    assert asks.num_cancels == 0
    ask(asks, TWO)
    asks.step(Cancelled(TWO, "stale"), 30.0)
    receive(asks, GroupMoved(TWO, GroupState.CANCELLED, 0, ""), 30.0)
    assert asks.num_cancels == 0


def test_cancelled_groups_that_no_router_received_leave_nothing() -> None:
    asks = new_asks()
    for seq in range(1000):
        ask(asks, GroupId("r1", seq))
        asks.step(Cancelled(GroupId("r1", seq), "no longer needed"), 0.0)
    assert (len(asks.open), asks.num_cancels) == (0, 0)
    earlier = Asked(group_id=ONE, env="guess", num_samples=4, attempts=1)
    asks.step(earlier, 0.0)
    asks.step(Cancelled(ONE, "stale"), 0.0)
    assert (
        asks.num_cancels == 1
    )  # An earlier process may have sent its request to a router that is away.


def test_cancelling_a_group_that_is_not_open_sends_nothing() -> None:
    assert met_asks().step(Cancelled(ONE, "stale"), 0.0) == []


def test_a_request_past_its_deadline_ends_and_its_group_is_cancelled() -> None:
    asks = met_asks()
    asked = Asked(group_id=ONE, env="guess", num_samples=4, deadline_s=5.0)
    asks.step(asked, 0.0)
    assert not any(isinstance(a, AskEnded) for a in asks.step(Ticked(), 4.9))
    late = "deadline: no result within 5 s"
    actions = asks.step(Ticked(), 5.0)
    assert AskEnded(ONE, late) in actions
    assert CancelGroup(ONE, late, asked.ticket) in messages_in(actions)
    assert not asks.open


def test_each_repetition_carries_the_rest_of_the_deadline() -> None:
    asks = met_asks()
    [first] = messages_in(
        asks.step(Asked(group_id=ONE, env="guess", num_samples=4, deadline_s=10.0), 0.0)
    )
    again = [m for m in messages_in(asks.step(Ticked(), 4.0)) if isinstance(m, AskGroup)]
    assert isinstance(first, AskGroup)
    assert [m.deadline_s for m in (first, *again)] == [10.0, 6.0]
    [no_limit] = messages_in(ask(asks, TWO, 4.0))
    assert isinstance(no_limit, AskGroup)
    assert no_limit.deadline_s == 0.0


def test_a_deadline_ends_a_request_even_if_no_router_answers() -> None:
    asks = new_asks()
    asks.step(Asked(group_id=ONE, env="guess", num_samples=4, deadline_s=5.0), 0.0)
    assert AskEnded(ONE, "deadline: no result within 5 s") in asks.step(Ticked(), 5.0)


def refused_waits(asks: AskMachine, num_refusals: int) -> list[float]:
    """Return how long a request waits after each refusal by a router that always names one
    second.
    """
    waits: list[float] = []
    now_s = 0.0
    for _ in range(num_refusals):
        receive(asks, AskRefused(ONE, "overloaded: full", 1.0), now_s)
        refused_s = now_s
        while not any(isinstance(m, AskGroup) for m in messages_in(asks.step(Ticked(), now_s))):
            now_s += 0.25
        waits.append(now_s - refused_s)
    return waits


def test_a_refused_request_waits_longer_each_time_up_to_a_limit() -> None:
    asks = met_asks()
    ask(asks, ONE)
    assert refused_waits(asks, 6) == [1.0, 2.0, 4.0, 8.0, 15.0, 15.0]


def test_a_queued_request_resets_its_patience() -> None:
    asks = met_asks()
    ask(asks, ONE)
    refused_waits(asks, 3)
    receive(asks, GroupMoved(ONE, GroupState.QUEUED, 0, ""), 8.0)
    receive(asks, AskRefused(ONE, "overloaded: full", 1.0), 8.0)
    assert any(isinstance(m, AskGroup) for m in messages_in(asks.step(Ticked(), 9.0)))


def test_refusals_past_the_patience_end_the_request_with_the_routers_reason() -> None:
    asks = met_asks()
    asks.step(Asked(group_id=ONE, env="guess", num_samples=4, patience_s=3.0), 0.0)
    assert receive(asks, AskRefused(ONE, "overloaded: full", 2.0), 0.0) == []
    [ended] = receive(asks, AskRefused(ONE, "overloaded: full", 2.0), 2.0)
    assert ended == AskEnded(ONE, "overloaded: full", retry_after_s=2.0)
    assert not asks.open


def test_open_requests_are_repeated_on_time_while_others_come_and_go() -> None:
    rng = random.Random(7)
    asks, due, now_s = met_asks(), dict[GroupId, float](), 0.0
    for turn in range(4000):
        now_s = turn / 16
        if rng.random() < 0.2:
            new = GroupId("r2", turn)
            ask(asks, new, now_s)
            due[new] = now_s + 4.0
        if due and rng.random() < 0.15:
            done = rng.choice(list(due))
            asks.step(Arrived(done), now_s)
            del due[done]
        if due and rng.random() < 0.1:
            moved = rng.choice(list(due))
            receive(asks, GroupMoved(moved, GroupState.QUEUED, 0, ""), now_s)
            due[moved] = now_s + 40.0
        messages = messages_in(asks.step(Ticked(), now_s))
        repeated = {m.group_id for m in messages if isinstance(m, AskGroup)}
        assert repeated == {group_id for group_id, at_s in due.items() if now_s >= at_s}
        due.update(dict.fromkeys(repeated, now_s + 4.0))
    assert len(due) > 50


def test_a_kept_client_leaves_without_a_message() -> None:
    settings = AskSettings(client_id="c1", sink="tcp://sink", beat_s=1.0, keep=True, weight=2)
    asks = AskMachine(settings)
    assert messages_in(asks.step(Ticked(), 0.0)) == [ClientHello("c1", 2, True)]
    assert asks.step(Closed(), 1.0) == []
    assert messages_in(asks.step(Closed(for_good=True), 1.0)) == [ClientLeft("c1")]


def test_a_client_without_keep_leaves_with_a_message() -> None:
    assert messages_in(met_asks().step(Closed(), 0.0)) == [ClientLeft("c1")]
