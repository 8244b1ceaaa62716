"""Writes one session's events and its report into the gateway's journal.

- A long text is stored once under a number, for all sessions that contain it.
- A report that was restored from the journal renders to the same bytes.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from rollmesh.core.errors import SessionError
from rollmesh.runtime.blobs import Blob, hold
from rollmesh.runtime.conversation.history import LONG_BYTES
from rollmesh.runtime.images import ImageRef
from rollmesh.runtime.session_deps import locks_of
from rollmesh.runtime.session_log import ImageShown, Text
from rollmesh.serve.interception import capture
from rollmesh.serve.interception.journal import entries
from rollmesh.serve.interception.journal.gateway_journal import GatewayJournal, digest_of
from rollmesh.serve.interception.journal.write_buffer import WriteBuffer
from rollmesh.serve.interception.pieces import Piece
from rollmesh.serve.interception.report import FinishedSession, RewardSlot, SessionReport

MIN_SAME_BYTES = 64
"""A shorter text is no longer than a reference to it."""
MAX_SAME = 8
"""Long texts that a session keeps for deduplication, e.g. its tools and those of a sub-agent. A
text that is evicted is stored again when it is repeated, unless another session holds it."""


class SessionTexts:
    """References of one session's events to its texts."""

    __slots__ = ("_journal", "_same", "_session_id")

    def __init__(self, journal: GatewayJournal, session_id: str) -> None:
        self._journal = journal
        self._session_id = session_id
        self._same: OrderedDict[bytes, Blob] | None = None
        """Long repeated texts by digest, the newest last; a text keeps its number while its blob
        exists."""

    def text(self, text: bytes | Blob) -> Text:
        """Return a text that may be long, or its number."""
        if isinstance(text, Blob):
            return self._journal.name(self._session_id, text)
        return text if len(text) < LONG_BYTES else self._journal.name(self._session_id, hold(text))

    def same(self, text: bytes) -> Text:
        """Return a text that is often repeated, or its number."""
        if len(text) < MIN_SAME_BYTES:
            return text
        if len(text) < LONG_BYTES:
            return self._journal.name(self._session_id, text)
        digest = digest_of(text)
        same = self._same = OrderedDict() if self._same is None else self._same
        blob = same.get(digest)
        if blob is None:
            blob = same[digest] = hold(text)
        same.move_to_end(digest)
        if len(same) > MAX_SAME:
            same.popitem(last=False)
        return self._journal.name(self._session_id, blob)


class SessionEventWriter(WriteBuffer):
    """Event writer of one session, as the runtime's `Scribe` protocol requires."""

    __slots__ = ("_journal", "_waiters", "shown", "texts")

    def __init__(self, journal: GatewayJournal, session_id: str) -> None:
        super().__init__(session_id, journal.flush_queue)
        self.shown: frozenset[str] = frozenset()
        """Digests of the images in earlier events."""
        self.texts = SessionTexts(journal, session_id)
        self._journal = journal
        self._waiters: tuple[asyncio.Future[SessionError | None], ...] = ()

    def check(self) -> None:
        self._journal.check()

    def text(self, text: bytes | Blob) -> Text:
        return self.texts.text(text)

    def same(self, text: bytes) -> Text:
        return self.texts.same(text)

    def image(self, image: ImageRef) -> ImageShown | None:
        if image.digest in self.shown:
            return None
        self.shown |= {image.digest}
        if image.data is None:
            return ImageShown(image.digest, image.url)
        return ImageShown(image.digest, self._journal.name(self.session_id, image.data))

    async def written(self) -> None:
        if not self.has_pending:
            return
        self.schedule_flush()
        waiter: asyncio.Future[SessionError | None] = self._flush_queue.loop.create_future()
        self._waiters += (waiter,)
        failure = await waiter
        if failure is not None:
            raise failure.again()

    def flushed(self, failure: SessionError | None) -> None:
        super().flushed(failure)
        waiters, self._waiters = self._waiters, ()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(failure)


def opened_entry(
    new: capture.OpenedSession, metadata: bytes, created_s: float
) -> entries.SessionOpened:
    """Return the first entry of a session."""
    locks = locks_of(new.api_key, new.path_secret)
    session_id = new.captured.session_id
    return entries.SessionOpened(session_id, 0, created_s, locks, metadata, new.seed, new.sampling)


def write_report(
    journal: GatewayJournal, captured: capture.CapturedSession, finished: FinishedSession
) -> None:
    """Store the report of a finished session; SessionError 507 if the disk refuses it."""
    session_id, report = captured.session_id, finished.report
    contents: set[int] = set()
    journal.flush_queue.flush()  # pending events take their numbers before the report does

    def text_of(piece: Piece) -> Text:
        if isinstance(piece, bytes):
            return piece
        contents.add(number := journal.name(session_id, piece))
        return number

    slots = [
        (at, slot if isinstance(slot, RewardSlot) else text_of(slot)) for at, slot in report.slots
    ]
    entry = entries.SessionFinished(
        session_id,
        journal.usage[session_id].next_number,
        finished.outcome,
        text_of(report.text),
        tuple(slots),
        text_of(report.names),
        report.nodes,
        dict(finished.forks),
        dict(finished.healed),
        finished.fault,
        finished.spent_because,
        captured.num_calls,
    )
    journal.finish(entry, contents)


def restored_report(
    entry: entries.SessionFinished, blob_of: Callable[[int], Blob]
) -> FinishedSession:
    """Rebuild a report from its journal entry."""

    def piece_of(text: Text) -> Piece:
        return text if isinstance(text, bytes) else blob_of(text)

    slots: list[tuple[int, RewardSlot | Piece]] = [
        (at, slot if isinstance(slot, RewardSlot) else piece_of(slot)) for at, slot in entry.slots
    ]
    report = SessionReport(
        entry.session_id, piece_of(entry.text), slots, piece_of(entry.names), entry.nodes
    )
    return FinishedSession(
        entry.outcome, report, entry.forks, entry.healed, entry.fault, entry.spent_because
    )
