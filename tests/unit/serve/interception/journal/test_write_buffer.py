"""Pending events are written together, and each session is notified of the result."""

import asyncio
from collections.abc import Mapping

import msgspec
import pytest

from rollmesh.core.errors import SessionError
from rollmesh.runtime.session_log import DeliveryChanged, FaultsChanged
from rollmesh.serve.interception.journal.write_buffer import FlushQueue, Record, WriteBuffer

FULL = SessionError(507, "journal_full", "full")


class Told(WriteBuffer):
    """A buffer that records its results."""

    def __init__(self, session_id: str, due: FlushQueue) -> None:
        super().__init__(session_id, due)
        self.heard: list[SessionError | None] = []
        self.is_deaf = False

    def flushed(self, failure: SessionError | None) -> None:
        super().flushed(failure)
        self.heard.append(failure)
        if self.is_deaf:
            raise LookupError("whom to tell")


class Disk:
    """Writes for three sessions, and refuses the records of chosen ones."""

    def __init__(self, *, one_by_one: bool = False) -> None:
        self.batches: list[dict[str, int]] = []
        """Deeds by session, as they were written together."""
        self.refused: set[str] = set()
        self.broken: Exception | None = None
        due = FlushQueue(self._record_of, self._write, one_by_one=one_by_one)
        self.pages = [Told(name, due) for name in "abc"]

    def _record_of(self, page: WriteBuffer) -> Record:
        return [page.encoded_events()]

    def _write(self, records: Mapping[WriteBuffer, Record]) -> None:
        if self.broken is not None:
            raise self.broken
        if self.refused & {page.session_id for page in records}:
            raise FULL
        self.batches.append(
            {
                page.session_id: len(msgspec.msgpack.decode(record[0]))
                for page, record in records.items()
            }
        )


async def test_what_is_due_in_one_turn_is_one_write() -> None:
    disk = Disk()
    one, other, quiet = disk.pages
    for page in (one, other, one, quiet):
        page.put(DeliveryChanged(0, is_undelivered=True))
    for page in (one, other, one):
        page.schedule_flush()
    assert disk.batches == []
    await asyncio.sleep(0)
    assert disk.batches == [{"a": 2, "b": 1}]
    assert [page.heard for page in disk.pages] == [[None], [None], []]
    assert [page.has_pending for page in disk.pages] == [False, False, True]
    one.schedule_flush()
    await asyncio.sleep(0)
    assert len(disk.batches) == 1, "nothing is owed twice"


@pytest.mark.parametrize("one_by_one", [False, True])
async def test_what_was_refused_is_owed_until_it_is_due_again(one_by_one: bool) -> None:
    disk = Disk(one_by_one=one_by_one)
    disk.refused = {"b"}
    for page in disk.pages:
        page.put(DeliveryChanged(0, is_undelivered=True))
        page.schedule_flush()
    await asyncio.sleep(0)
    # Written alone, each fails alone.
    assert disk.batches == ([{"a": 1}, {"c": 1}] if one_by_one else [])
    others = None if one_by_one else FULL
    assert [page.heard for page in disk.pages] == [[others], [FULL], [others]]
    disk.refused, disk.batches = set(), []
    other = disk.pages[1]
    other.put(DeliveryChanged(0, is_undelivered=False))
    other.schedule_flush()
    await asyncio.sleep(0)
    assert disk.batches == [{"b": 2}]
    assert not other.has_pending


async def test_what_cannot_be_encoded_is_left_out_and_the_others_are_written() -> None:
    disk = Disk()
    one, other, _ = disk.pages
    one.put(FaultsChanged("half of a pair: \ud800", ""))
    other.put(DeliveryChanged(0, is_undelivered=True))
    for page in (one, other):
        page.schedule_flush()
    await asyncio.sleep(0)
    assert disk.batches == [{"b": 1}]
    assert other.heard == [None]
    [failure] = one.heard
    assert failure is not None
    assert (failure.status, failure.code) == (500, "journal_failed")
    assert "surrogates not allowed" in str(failure)
    assert one.has_pending


async def test_each_session_is_notified_whatever_fails() -> None:
    disk = Disk()
    disk.broken = RuntimeError("nobody thought of this")
    disk.pages[0].is_deaf = True
    for page in disk.pages:
        page.put(DeliveryChanged(0, is_undelivered=True))
        page.schedule_flush()
    await asyncio.sleep(0)
    for page in disk.pages:
        assert [(each.code, str(each)) for each in page.heard if each is not None] == [
            ("journal_failed", "the journal: RuntimeError: nobody thought of this")
        ]
        assert page.has_pending
    disk.broken = None
    for page in disk.pages:
        page.schedule_flush()
    await asyncio.sleep(0)
    assert disk.batches == [{"a": 1, "b": 1, "c": 1}]
    assert [page.heard[1:] for page in disk.pages] == [[None]] * 3
