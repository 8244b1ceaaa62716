"""Results are sent until they are acked, and their bytes are counted until then."""

import pytest

from rollmesh.core.ids import GroupId
from rollmesh.serve.server.outbox import (
    Action,
    Forget,
    Outbox,
    OutboxSettings,
    Packed,
    PendingState,
    Unwanted,
)
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked
from rollmesh.wire.messages import (
    GroupAcked,
    GroupDelivered,
    GroupFinished,
    GroupLost,
    ResultRefused,
    RouterHello,
)

SINK = "tcp://sink"


def group(seq: int) -> GroupId:
    return GroupId("r1", seq)


def finished(seq: int, attempt: int = 1) -> GroupFinished:
    return GroupFinished(group(seq), attempt, "w1", True)


def new_outbox() -> Outbox:
    return Outbox(OutboxSettings(resend_s=1.0, max_resend_s=3.0, absent_s=10.0))


def pack(outbox: Outbox, seq: int, now_s: float = 0.0, sink: str = SINK) -> list[Action]:
    return outbox.step(Packed(finished(seq), sink, 100), now_s)


def ack(outbox: Outbox, seq: int, now_s: float = 0.0, sink: str = SINK) -> list[Action]:
    return outbox.step(Received(sink.encode(), GroupAcked(group(seq), 1, False)), now_s)


def test_a_result_is_sent_to_its_sink_at_once() -> None:
    outbox = new_outbox()
    assert pack(outbox, 1) == [Send(b"tcp://sink", finished(1))]
    assert outbox.results[group(1)].state is PendingState.SENT
    assert outbox.unacked_bytes == 100


def test_an_acked_result_is_reported_and_forgotten() -> None:
    outbox = new_outbox()
    pack(outbox, 1)
    assert ack(outbox, 1) == [Send(ROUTER, GroupDelivered(group(1), 1)), Forget(group(1))]
    assert not outbox.results
    assert outbox.unacked_bytes == 0
    assert ack(outbox, 1) == []


def test_a_silent_sink_is_sent_the_result_again_at_growing_intervals() -> None:
    outbox = new_outbox()
    pack(outbox, 1)
    times = [t / 10 for t in range(1, 120) if outbox.step(Ticked(), t / 10)]
    assert times == [1.0, 3.0, 6.0, 9.0]
    assert outbox.num_resent == 4


def sent_in(outbox: Outbox, from_s: int, to_s: int) -> list[Send]:
    ticks = [outbox.step(Ticked(), float(t)) for t in range(from_s, to_s)]
    return [action for actions in ticks for action in actions if isinstance(action, Send)]


def test_a_silent_sink_is_sent_one_result_at_a_time_again() -> None:
    # Unread messages stay in the socket's queue, where each copy takes memory.
    outbox = new_outbox()
    for seq in range(50):
        pack(outbox, seq)
    pack(outbox, 99, sink="tcp://other")
    sends = sent_in(outbox, 1, 31)
    assert [send.route for send in sends].count(b"tcp://other") == 11  # after 1, 3, 6, 9... s
    again = [send.message for send in sends if send.route == b"tcp://sink"]
    assert again == [finished(seq) for seq in range(11)]


def test_a_new_sink_is_sent_one_more_result_for_each_ack() -> None:
    outbox = new_outbox()
    for seq in range(50):
        pack(outbox, seq)
    [probe] = sent_in(outbox, 1, 2)
    while outbox.results:
        assert isinstance(probe.message, GroupFinished)
        actions = ack(outbox, probe.message.group_id.seq, 2.0)
        for action in actions:
            if isinstance(action, Send) and action.route == SINK.encode():
                probe = action
    assert outbox.num_resent == 50


def test_a_slow_sink_is_sent_no_result_more_than_twice() -> None:
    outbox = new_outbox()
    for seq in range(50):
        pack(outbox, seq)
    [*_] = sent_in(outbox, 1, 3)
    for seq in range(50):
        ack(outbox, seq, 3.0 + seq / 10)
        outbox.step(Ticked(), 3.0 + seq / 10)
    assert not outbox.results
    assert outbox.num_resent <= 50


def test_the_ack_of_a_later_result_repeats_lost_earlier_ones_at_once() -> None:
    outbox = new_outbox()
    for seq in (1, 2, 3):
        pack(outbox, seq)
    pack(outbox, 4, sink="tcp://other")
    actions = ack(outbox, 3)
    assert [a.message for a in actions if isinstance(a, Send) and a.route == b"tcp://sink"] == [
        finished(1),
        finished(2),
    ]
    assert outbox.results[group(4)].sent_as == 4


def test_a_late_ack_ends_a_result_that_was_sent_twice() -> None:
    outbox = new_outbox()
    pack(outbox, 1)
    outbox.step(Ticked(), 1.0)
    assert Forget(group(1)) in ack(outbox, 1, now_s=1.1)
    assert outbox.step(Ticked(), 9.0) == []


def test_a_sink_is_away_when_it_acks_nothing_for_long() -> None:
    outbox = new_outbox()
    pack(outbox, 1)
    pack(outbox, 2)
    assert not outbox.is_stuck(9.9)
    assert outbox.is_stuck(10.0)
    ack(outbox, 1, now_s=10.0)
    assert not outbox.is_stuck(19.9)
    assert outbox.is_stuck(20.0)


def test_a_repetition_does_not_make_a_silent_sink_a_new_one() -> None:
    outbox = new_outbox()
    pack(outbox, 1)
    assert outbox.step(Ticked(), 9.0)
    assert outbox.is_stuck(10.0)
    outbox.readdress(group(1), 1, "tcp://elsewhere", b"")
    assert not outbox.is_stuck(10.0), "the result was not sent to this sink yet"
    outbox.step(Ticked(), 10.0)
    assert not outbox.is_stuck(19.9)
    assert outbox.is_stuck(20.0)


def test_results_do_not_wait_for_another_sink_that_is_away() -> None:
    outbox = new_outbox()
    pack(outbox, 1)
    pack(outbox, 2, now_s=5.0, sink="tcp://another")
    assert not outbox.is_stuck(10.0)
    assert outbox.is_stuck(15.0)
    assert outbox.give_back() == [Forget(group(1)), Forget(group(2))]
    assert (outbox.results, outbox.unacked_bytes) == ({}, 0)


def test_an_unwanted_result_is_forgotten() -> None:
    outbox = new_outbox()
    pack(outbox, 1)
    assert outbox.step(Unwanted(group(1)), 0.0) == [Forget(group(1))]
    assert outbox.step(Unwanted(group(1)), 0.0) == []
    assert outbox.unacked_bytes == 0


def test_a_group_is_packed_once() -> None:
    outbox = new_outbox()
    pack(outbox, 1)
    assert pack(outbox, 1) == []
    assert outbox.unacked_bytes == 100


def test_a_renumbered_result_is_delivered_under_its_new_attempt() -> None:
    outbox = new_outbox()
    pack(outbox, 1)
    outbox.readdress(group(1), 2, "tcp://sink", b"")
    assert outbox.step(Ticked(), 1.0) == [Send(b"tcp://sink", finished(1, attempt=2))]


def test_a_result_is_sent_at_once_to_its_clients_new_address() -> None:
    outbox = new_outbox()
    pack(outbox, 1)
    outbox.readdress(group(1), 1, "tcp://elsewhere", b"")
    assert outbox.step(Ticked(), 0.1) == [Send(b"tcp://elsewhere", finished(1))]


def test_a_refused_result_is_dropped_and_its_attempt_reported_as_lost() -> None:
    outbox = new_outbox()
    pack(outbox, 1)
    refused = ResultRefused(group(1), 1, "malformed")
    assert outbox.step(Received(b"tcp://another", refused), 0.0) == []
    lost = GroupLost(group(1), 1, "tcp://sink refused its result: malformed")
    actions = outbox.step(Received(SINK.encode(), refused), 0.0)
    assert actions == [Send(ROUTER, lost), Forget(group(1))]
    assert outbox.unacked_bytes == 0


def test_a_readdressed_result_carries_its_groups_new_ticket() -> None:
    outbox = new_outbox()
    pack(outbox, 1)
    outbox.readdress(group(1), 1, SINK, b"ticket")
    [send] = outbox.step(Ticked(), 5.0)
    assert isinstance(send, Send)
    assert isinstance(send.message, GroupFinished)
    assert send.message.ticket == b"ticket"


@pytest.mark.parametrize("route", [b"", b"tcp://sink"])
def test_other_messages_are_ignored(route: bytes) -> None:
    assert new_outbox().step(Received(route, RouterHello(1.0)), 0.0) == []
