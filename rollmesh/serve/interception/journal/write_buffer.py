"""Session events that are not yet in the gateway's journal, and the queue that flushes them.

    put --> pending --schedule_flush--> written with all that is due in the same turn of the loop
                     +--the disk refuses it--> pending, until it is scheduled again

- Due events are written before the event loop has turned again, in one write for all sessions.
- Each session is notified of the result exactly once. A session fails alone if only its own record
  cannot be built.
- The events of one flush of a session are in one record or in none.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from rollmesh.core.errors import SessionError
from rollmesh.core.logs import get_logger

Record = list[bytes]
"""Frames of one record."""
Given = TypeVar("Given")

log = get_logger()
_encode = msgspec.msgpack.Encoder().encode


class WriteBuffer:
    """Pending events of one session; the session's event writer derives from it, to save an
    object."""

    __slots__ = ("_flush_queue", "_pending", "session_id")

    def __init__(self, session_id: str, flush_queue: "FlushQueue") -> None:
        self.session_id = session_id
        self._flush_queue = flush_queue
        self._pending: list[msgspec.Struct] = []

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def put(self, event: msgspec.Struct) -> None:
        """Add an event to the pending ones."""
        self._pending.append(event)

    def schedule_flush(self) -> None:
        """Schedule a flush before the event loop has turned again."""
        if self._pending:
            self._flush_queue.add(self)

    def encoded_events(self) -> bytes:
        """Return all pending events as msgpack."""
        return _encode(self._pending)

    def flushed(self, failure: SessionError | None) -> None:
        """Handle the result of a flush: None, or the error that prevented it."""
        if failure is None:
            self._pending.clear()


class FlushQueue:
    """Buffers that are due; one queue per journal."""

    def __init__(
        self,
        record_for: Callable[[WriteBuffer], Record | None],
        write: Callable[[Mapping[WriteBuffer, Record]], None],
        *,
        one_by_one: bool,
    ) -> None:
        """Create the queue.

        `record_for` builds the record of a buffer, or returns None if there is nothing to write.
        `write` writes all records. Both raise SessionError. With `one_by_one`, each record has a
        write of its own, because each is synced.
        """
        self._record_for = record_for
        self._write = write
        self._one_by_one = one_by_one
        self._buffers: dict[WriteBuffer, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running event loop, cached because asking for it is a system call."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def add(self, buffer: WriteBuffer) -> None:
        """Schedule a flush of this buffer."""
        if not self._buffers:
            self.loop.call_soon(self.flush)
        self._buffers[buffer] = None

    def flush(self) -> None:
        """Write all due buffers now."""
        buffers, self._buffers = list(self._buffers), {}
        for batch in [[buffer] for buffer in buffers] if self._one_by_one else [buffers]:
            self._write_batch(batch)

    def _write_batch(self, buffers: Sequence[WriteBuffer]) -> None:
        records: dict[WriteBuffer, Record] = {}

        def make(buffer: WriteBuffer) -> None:
            record = self._record_for(buffer)
            if record is not None:
                records[buffer] = record

        failures = {buffer: _try(make, buffer) for buffer in buffers}
        if records:
            failures |= dict.fromkeys(records, _try(self._write, records))
        for buffer, failure in failures.items():
            _try(buffer.flushed, failure)


def _try(work: Callable[[Given], None], given: Given) -> SessionError | None:
    """Run `work`; return the error that ended it, or None."""
    try:
        work(given)
    except SessionError as error:
        return error
    except Exception as error:  # door: a fault in one session must not block the others
        log.exception("journal.failed")
        why = f"the journal: {type(error).__name__}: {error}"
        return SessionError(500, "journal_failed", why)
    return None
