"""What a step leaves: rows first, each once, as the machine knows it when the step is done."""

import msgspec
import pytest

from rollmesh.scheduler.planning.state import Owner
from rollmesh.scheduler.service.actions import Drop, Happened, Note, Put, Write
from rollmesh.scheduler.service.book import FREE, HELD, MAX_TROUBLES, Book
from rollmesh.scheduler.service.records import Answer, Numbers
from rollmesh.scheduler.service.settings import SchedulerSettings
from rollmesh.wire.machine import Send
from rollmesh.wire.scheduling import SchedulerHello

A, B = Owner("a", "actor_train", -1), Owner("b", "actor_train", -1)


@pytest.fixture
def book() -> Book:
    return Book(SchedulerSettings(), "s1")


def test_a_step_that_changes_nothing_leaves_nothing(book: Book) -> None:
    assert book.take() == []


def test_rows_come_first_and_once_as_they_are_at_the_end(book: Book) -> None:
    book.send(b"r", SchedulerHello("s1"))
    book.mark("answers", "k")
    book.answers["k"] = Answer(key="k", ok=False, at_s=1.0)
    book.mark("answers", "k")
    book.answers["k"].ok = True
    book.note("a.b", "", "why")
    write, send, note = book.take()
    assert isinstance(write, Write)
    assert [type(row) for row in write.rows] == [Put, Put]
    first, last = write.rows
    assert isinstance(first, Put)
    assert msgspec.msgpack.decode(first.raw, type=Answer).ok
    assert isinstance(last, Put)
    assert last.table == "numbers"
    assert isinstance(send, Send)
    assert isinstance(note, Note)
    assert book.take() == []


def test_what_is_gone_is_dropped(book: Book) -> None:
    book.mark("tickets", "k")
    (write,) = book.take()
    assert isinstance(write, Write)
    assert write.rows[0] == Drop("tickets", "k")


def test_a_row_does_not_change_with_what_it_was_taken_from(book: Book) -> None:
    book.now_s = 5.0
    book.mark("numbers", "1")
    (write,) = book.take()
    book.numbers.seq = 99
    assert isinstance(write, Write)
    row = write.rows[-1]
    assert isinstance(row, Put)
    assert msgspec.msgpack.decode(row.raw, type=Numbers) == Numbers(now_s=5.0)


def test_two_never_stand_on_one_gpu(book: Book) -> None:
    book.stand(A, (0, 1), HELD)
    with pytest.raises(AssertionError, match="GPU 1 is "):
        book.stand(B, (1, 2), HELD)
    book.clear(B, (0, 1))
    assert not book.is_clear((0,))
    book.clear(A, (0, 1))
    assert book.is_clear((0, 1))
    (write,) = book.take()
    assert isinstance(write, Write)
    told = [row.phase for row in write.rows if isinstance(row, Happened) and row.gpu == 0]
    assert told == [HELD, FREE]


def test_what_has_no_route_is_told_nobody(book: Book) -> None:
    book.send(b"", SchedulerHello("s1"))
    assert book.take() == []


def test_troubles_are_bounded_and_the_newest_is_last(book: Book) -> None:
    for number in range(MAX_TROUBLES + 5):
        book.trouble(f"no {number}")
    assert len(book.troubles) == MAX_TROUBLES
    assert book.troubles[-1] == f"no {MAX_TROUBLES + 4}"
