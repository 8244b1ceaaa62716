"""What sessions have done that their gateway's journal does not hold yet.

    put --> owed --due--> written with all that is due in the same turn of the loop
                     \\--the disk does not take it--> owed, until it is due again

Owns the deeds until they are written, and when that is. Invariants: what is due is written before
the loop has turned again, in one write however many sessions it concerns; each hears of it, once,
whatever fails, and fails alone where it is its own record that cannot be made; a session's deeds
stand in one record or in none. Driven by scribes; archive.py makes the records and writes them.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from rollmesh.core.errors import SessionError
from rollmesh.core.logs import get_logger

Record = list[bytes]
"""The frames of one."""
Given = TypeVar("Given")

log = get_logger()
_encode = msgspec.msgpack.Encoder().encode


class WriteBuffer:
    """Of one session; its scribe is one, so that a session costs few objects."""

    __slots__ = ("_due", "_owed", "session_id")

    def __init__(self, session_id: str, due: "FlushQueue") -> None:
        self.session_id = session_id
        self._due = due
        self._owed: list[msgspec.Struct] = []

    @property
    def is_owing(self) -> bool:
        """Something is not written."""
        return bool(self._owed)

    def put(self, deed: msgspec.Struct) -> None:
        """It is done, and written with what is due next."""
        self._owed.append(deed)

    def be_due(self) -> None:
        """What was put is written before the loop has turned again."""
        if self._owed:
            self._due.add(self)

    def deeds(self) -> bytes:
        """All that is owed."""
        return _encode(self._owed)

    def tried(self, failure: SessionError | None) -> None:
        """It was written, or why not."""
        if failure is None:
            self._owed.clear()


class FlushQueue:
    """The pages that are due now; one per archive."""

    def __init__(
        self,
        record_of: Callable[[WriteBuffer], Record | None],
        write: Callable[[Mapping[WriteBuffer, Record]], None],
        *,
        one_by_one: bool,
    ) -> None:
        """`record_of` makes a page's, None where nothing is to be written: SessionError. `write`
        writes all: SessionError, of a disk that takes none. `one_by_one` where each is synced."""
        self._record_of = record_of
        self._write = write
        self._one_by_one = one_by_one
        self._pages: dict[WriteBuffer, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The one that all of it runs in; kept, since to ask for it is a system call."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def add(self, page: WriteBuffer) -> None:
        """See Page.be_due."""
        if not self._pages:
            self.loop.call_soon(self.write)
        self._pages[page] = None

    def write(self) -> None:
        """Now."""
        pages, self._pages = list(self._pages), {}
        for batch in [[page] for page in pages] if self._one_by_one else [pages]:
            self._write_batch(batch)

    def _write_batch(self, pages: Sequence[WriteBuffer]) -> None:
        records: dict[WriteBuffer, Record] = {}

        def make(page: WriteBuffer) -> None:
            record = self._record_of(page)
            if record is not None:
                records[page] = record

        failures = {page: _try(make, page) for page in pages}
        if records:
            failures |= dict.fromkeys(records, _try(self._write, records))
        for page, failure in failures.items():
            _try(page.tried, failure)


def _try(work: Callable[[Given], None], given: Given) -> SessionError | None:
    """Why it could not be done."""
    try:
        work(given)
    except SessionError as error:
        return error
    except Exception as error:  # door: what one session breaks holds up no other
        log.exception("journal.failed")
        why = f"the journal: {type(error).__name__}: {error}"
        return SessionError(500, "journal_failed", why)
    return None
