"""Pending events are written together, and each session is notified of the result."""

import asyncio
from collections.abc import Mapping

import msgspec
import pytest

from rollmesh.core.errors import SessionError
from rollmesh.runtime.session_log import DeliveryChanged, FaultsChanged
from rollmesh.serve.interception.journal.write_buffer import FlushQueue, Record, WriteBuffer

FULL = SessionError(507, "journal_full", "full")


class RecordingBuffer(WriteBuffer):
    """A buffer that records its results."""

    def __init__(self, session_id: str, due: FlushQueue) -> None:
        super().__init__(session_id, due)
        self.results: list[SessionError | None] = []
        self.is_broken = False

    def flushed(self, failure: SessionError | None) -> None:
        super().flushed(failure)
        self.results.append(failure)
        if self.is_broken:
            raise LookupError("no reader")


class Disk:
    """Writes for three sessions, and refuses the records of chosen ones."""

    def __init__(self, *, one_by_one: bool = False) -> None:
        self.batches: list[dict[str, int]] = []
        """Number of events by session, for each write."""
        self.refused: set[str] = set()
        self.broken: Exception | None = None
        due = FlushQueue(self._record_of, self._write, one_by_one=one_by_one)
        self.buffers = [RecordingBuffer(name, due) for name in "abc"]

    def _record_of(self, buffer: WriteBuffer) -> Record:
        return [buffer.encoded_events()]

    def _write(self, records: Mapping[WriteBuffer, Record]) -> None:
        if self.broken is not None:
            raise self.broken
        if self.refused & {buffer.session_id for buffer in records}:
            raise FULL
        self.batches.append(
            {
                buffer.session_id: len(msgspec.msgpack.decode(record[0]))
                for buffer, record in records.items()
            }
        )


async def test_events_due_in_one_loop_iteration_are_one_write() -> None:
    disk = Disk()
    one, other, quiet = disk.buffers
    for buffer in (one, other, one, quiet):
        buffer.put(DeliveryChanged(0, is_undelivered=True))
    for buffer in (one, other, one):
        buffer.schedule_flush()
    assert disk.batches == []
    await asyncio.sleep(0)
    assert disk.batches == [{"a": 2, "b": 1}]
    assert [buffer.results for buffer in disk.buffers] == [[None], [None], []]
    assert [buffer.has_pending for buffer in disk.buffers] == [False, False, True]
    one.schedule_flush()
    await asyncio.sleep(0)
    assert len(disk.batches) == 1, "nothing is written twice"


@pytest.mark.parametrize("one_by_one", [False, True])
async def test_refused_events_stay_pending_until_they_are_due_again(one_by_one: bool) -> None:
    disk = Disk(one_by_one=one_by_one)
    disk.refused = {"b"}
    for buffer in disk.buffers:
        buffer.put(DeliveryChanged(0, is_undelivered=True))
        buffer.schedule_flush()
    await asyncio.sleep(0)
    # Each record that is written alone fails alone.
    assert disk.batches == ([{"a": 1}, {"c": 1}] if one_by_one else [])
    others = None if one_by_one else FULL
    assert [buffer.results for buffer in disk.buffers] == [[others], [FULL], [others]]
    disk.refused, disk.batches = set(), []
    other = disk.buffers[1]
    other.put(DeliveryChanged(0, is_undelivered=False))
    other.schedule_flush()
    await asyncio.sleep(0)
    assert disk.batches == [{"b": 2}]
    assert not other.has_pending


async def test_an_event_that_cannot_be_encoded_does_not_block_other_sessions() -> None:
    disk = Disk()
    one, other, _ = disk.buffers
    one.put(FaultsChanged("half of a pair: \ud800", ""))
    other.put(DeliveryChanged(0, is_undelivered=True))
    for buffer in (one, other):
        buffer.schedule_flush()
    await asyncio.sleep(0)
    assert disk.batches == [{"b": 1}]
    assert other.results == [None]
    [failure] = one.results
    assert failure is not None
    assert (failure.status, failure.code) == (500, "journal_failed")
    assert "surrogates not allowed" in str(failure)
    assert one.has_pending


async def test_each_session_is_notified_of_any_failure() -> None:
    disk = Disk()
    disk.broken = RuntimeError("unexpected")
    disk.buffers[0].is_broken = True
    for buffer in disk.buffers:
        buffer.put(DeliveryChanged(0, is_undelivered=True))
        buffer.schedule_flush()
    await asyncio.sleep(0)
    for buffer in disk.buffers:
        assert [(each.code, str(each)) for each in buffer.results if each is not None] == [
            ("journal_failed", "the journal: RuntimeError: unexpected")
        ]
        assert buffer.has_pending
    disk.broken = None
    for buffer in disk.buffers:
        buffer.schedule_flush()
    await asyncio.sleep(0)
    assert disk.batches == [{"a": 1, "b": 1, "c": 1}]
    assert [buffer.results[1:] for buffer in disk.buffers] == [[None]] * 3
