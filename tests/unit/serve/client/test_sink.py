"""The sink: a group ends once, and only stored results are acked."""

from rollmesh.core.ids import GroupId, IntervalSet
from rollmesh.serve.client.arrivals import (
    NO_TICKET,
    NOT_ASKED,
    Action,
    Keep,
    Malformed,
    RecordDrop,
    ResultKept,
    ResultSink,
)
from rollmesh.serve.client.asks import Asked, AskEnded
from rollmesh.wire.machine import Received, Send
from rollmesh.wire.messages import GroupAcked, GroupFinished, ResultRefused, RouterHello

ONE = GroupId("r1", 1)


ASKED = Asked(group_id=ONE, env="guess", num_samples=1)


def new_sink() -> ResultSink:
    return ResultSink({"r1": IntervalSet()}, {ONE: ASKED}.get)


def nothing_asked(_group_id: GroupId) -> Asked | None:
    return None


def arrive(
    sink: ResultSink,
    attempt: int = 1,
    route: bytes = b"w1",
    group_id: GroupId = ONE,
    ticket: bytes = ASKED.ticket,
) -> list[Action]:
    message = GroupFinished(group_id, attempt, "w1", True, ticket)
    return sink.step(Received(route, message, b"record"), 0.0)


def test_a_result_is_acked_only_after_it_was_stored() -> None:
    sink = new_sink()
    [keep] = arrive(sink)
    assert isinstance(keep, Keep)
    assert keep.body == b"record"
    assert not sink.has_ended(ONE)
    assert sink.step(ResultKept(keep), 0.0) == [Send(b"w1", GroupAcked(ONE, 1, duplicate=False))]
    assert sink.has_ended(ONE)


def test_a_result_that_could_not_be_stored_is_requested_again() -> None:
    sink = new_sink()
    arrive(sink)
    [again] = arrive(sink)
    assert isinstance(again, Keep)


def test_a_later_attempt_is_acked_as_a_duplicate_and_not_stored() -> None:
    sink = new_sink()
    [keep] = arrive(sink)
    assert isinstance(keep, Keep)
    sink.step(ResultKept(keep), 0.0)
    ack = Send(b"w2", GroupAcked(ONE, 2, duplicate=True))
    assert arrive(sink, attempt=2, route=b"w2") == [ack]
    assert sink.num_duplicates == 1


def test_a_result_without_the_ticket_of_its_group_is_refused() -> None:
    sink = new_sink()
    for ticket in (b"", ASKED.ticket[:-1], bytes(16)):
        refused = Send(b"w1", ResultRefused(ONE, 1, NO_TICKET))
        assert arrive(sink, ticket=ticket) == [refused]
    assert sink.num_refused == 3
    assert not sink.has_ended(ONE)


def test_a_result_that_was_never_requested_is_refused() -> None:
    sink = new_sink()
    for group_id in (GroupId("r1", 2**62), GroupId("another-run", 0)):
        refused = Send(b"w1", ResultRefused(group_id, 1, NOT_ASKED))
        assert arrive(sink, group_id=group_id) == [refused]
        assert not sink.has_ended(group_id)


def test_a_malformed_result_is_refused_and_the_next_attempts_is_stored() -> None:
    sink = new_sink()
    [keep] = arrive(sink)
    assert isinstance(keep, Keep)
    refused = Send(b"w1", ResultRefused(ONE, 1, "malformed"))
    assert sink.step(Malformed(keep, "malformed"), 0.0) == [refused]
    assert not sink.has_ended(ONE)
    [again] = arrive(sink, attempt=2)
    assert isinstance(again, Keep)


def test_a_late_copy_of_a_taken_result_is_acked_without_a_ticket() -> None:
    sink = ResultSink({"r1": IntervalSet([(0, 2)])}, nothing_asked)
    assert arrive(sink, ticket=b"") == [Send(b"w1", GroupAcked(ONE, 1, duplicate=True))]


def test_a_drop_is_recorded_once_and_its_late_result_is_a_duplicate() -> None:
    sink = new_sink()
    assert sink.step(AskEnded(ONE, "stale"), 0.0) == [RecordDrop(ONE, "stale")]
    assert sink.step(AskEnded(ONE, "stale"), 0.0) == []
    assert arrive(sink) == [Send(b"w1", GroupAcked(ONE, 1, duplicate=True))]


def test_a_drop_of_a_stored_group_is_not_recorded() -> None:
    sink = new_sink()
    [keep] = arrive(sink)
    assert isinstance(keep, Keep)
    sink.step(ResultKept(keep), 0.0)
    assert sink.step(AskEnded(ONE, "stale"), 0.0) == []


def test_groups_that_ended_in_the_journal_have_ended() -> None:
    assert ResultSink({"r1": IntervalSet([(0, 2)])}, nothing_asked).has_ended(ONE)


def test_other_messages_are_ignored() -> None:
    assert new_sink().step(Received(b"x", RouterHello(1.0)), 0.0) == []
