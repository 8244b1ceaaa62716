"""The sink: a group ends once, and nothing is acked that was not kept."""

from rollmesh.core.ids import GroupId, IntervalSet
from rollmesh.serve.client.asks import AskEnded
from rollmesh.serve.client.sink import Action, Book, Keep, Kept, Sink
from rollmesh.wire.machine import Received, Send
from rollmesh.wire.messages import GroupAcked, GroupFinished, RouterHello

ONE = GroupId("r1", 1)


def new_sink() -> Sink:
    return Sink({"r1": IntervalSet()})


def arrive(sink: Sink, attempt: int = 1, route: bytes = b"w1") -> list[Action]:
    return sink.step(Received(route, GroupFinished(ONE, attempt, "w1", True), b"record"), 0.0)


def test_result_is_acked_only_after_it_was_kept() -> None:
    sink = new_sink()
    [keep] = arrive(sink)
    assert isinstance(keep, Keep)
    assert keep.body == b"record"
    assert not sink.has_ended(ONE)
    assert sink.step(Kept(keep), 0.0) == [Send(b"w1", GroupAcked(ONE, 1, duplicate=False))]
    assert sink.has_ended(ONE)


def test_result_that_could_not_be_kept_is_asked_for_again() -> None:
    sink = new_sink()
    arrive(sink)
    [again] = arrive(sink)
    assert isinstance(again, Keep)


def test_later_attempt_is_acked_as_a_duplicate_and_not_kept() -> None:
    sink = new_sink()
    [keep] = arrive(sink)
    assert isinstance(keep, Keep)
    sink.step(Kept(keep), 0.0)
    ack = Send(b"w2", GroupAcked(ONE, 2, duplicate=True))
    assert arrive(sink, attempt=2, route=b"w2") == [ack]
    assert sink.num_duplicates == 1


def test_result_of_an_unknown_run_is_acked_so_that_nobody_holds_it() -> None:
    sink = Sink({})
    assert arrive(sink) == [Send(b"w1", GroupAcked(ONE, 1, duplicate=True))]
    assert sink.num_foreign == 1


def test_drop_is_booked_once_and_its_late_result_is_a_duplicate() -> None:
    sink = new_sink()
    assert sink.step(AskEnded(ONE, "stale"), 0.0) == [Book(ONE, "stale")]
    assert sink.step(AskEnded(ONE, "stale"), 0.0) == []
    assert arrive(sink) == [Send(b"w1", GroupAcked(ONE, 1, duplicate=True))]


def test_drop_of_a_kept_group_is_not_booked() -> None:
    sink = new_sink()
    [keep] = arrive(sink)
    assert isinstance(keep, Keep)
    sink.step(Kept(keep), 0.0)
    assert sink.step(AskEnded(ONE, "stale"), 0.0) == []


def test_what_a_journal_remembers_has_ended() -> None:
    assert Sink({"r1": IntervalSet([(0, 2)])}).has_ended(ONE)


def test_messages_of_others_are_ignored() -> None:
    assert new_sink().step(Received(b"x", RouterHello(1.0)), 0.0) == []
