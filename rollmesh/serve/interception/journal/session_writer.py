"""Writes what one session does into its gateway's journal.

Owns who waits for it. Invariant: a long text is named by a number and stands in the journal once
for all sessions that show it. Made by tokens.py, driven by its session's diary.

A session's opening and its account as they are filed, and as they come back.

What is long of an account lies in blobs, which the journal has once. Invariant: an account that
comes back is told in the same bytes. Driven by book.py, which files, and by recovery.py.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from rollmesh.core.errors import SessionError
from rollmesh.runtime.blobs import Blob, hold
from rollmesh.runtime.history import LONG_BYTES
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
"""A shorter text is no longer than its name."""
MAX_SAME = 8
"""Long texts of a session that are held so as to be known again: its tools, those of a sub-agent or
two; one that falls out is written anew when it comes again and nobody else holds it."""


class SessionTexts:
    """How one session's deeds name its texts."""

    __slots__ = ("_archive", "_same", "_session_id")

    def __init__(self, archive: GatewayJournal, session_id: str) -> None:
        self._archive = archive
        self._session_id = session_id
        self._same: OrderedDict[bytes, Blob] | None = None
        """Long ones that come again and again, by their digests, the newest last: they have their
        number as long as their blob."""

    def text(self, text: bytes | Blob) -> Text:
        """One that may be long."""
        if isinstance(text, Blob):
            return self._archive.name(self._session_id, text)
        return text if len(text) < LONG_BYTES else self._archive.name(self._session_id, hold(text))

    def same(self, text: bytes) -> Text:
        """One that comes again and again."""
        if len(text) < MIN_SAME_BYTES:
            return text
        if len(text) < LONG_BYTES:
            return self._archive.name(self._session_id, text)
        digest = digest_of(text)
        same = self._same = OrderedDict() if self._same is None else self._same
        blob = same.get(digest)
        if blob is None:
            blob = same[digest] = hold(text)
        same.move_to_end(digest)
        if len(same) > MAX_SAME:
            same.popitem(last=False)
        return self._archive.name(self._session_id, blob)


class SessionEventWriter(WriteBuffer):
    """Satisfies Scribe."""

    __slots__ = ("_archive", "_waiters", "shown", "texts")

    def __init__(self, archive: GatewayJournal, session_id: str) -> None:
        super().__init__(session_id, archive.due)
        self.shown: frozenset[str] = frozenset()
        """Images that deeds have told."""
        self.texts = SessionTexts(archive, session_id)
        self._archive = archive
        self._waiters: tuple[asyncio.Future[SessionError | None], ...] = ()

    def check(self) -> None:
        self._archive.check()

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
        return ImageShown(image.digest, self._archive.name(self.session_id, image.data))

    async def written(self) -> None:
        if not self.is_owing:
            return
        self.be_due()
        waiter: asyncio.Future[SessionError | None] = self._due.loop.create_future()
        self._waiters += (waiter,)
        failure = await waiter
        if failure is not None:
            raise failure.again()

    def tried(self, failure: SessionError | None) -> None:
        super().tried(failure)
        waiters, self._waiters = self._waiters, ()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(failure)


def opened_entry(
    new: capture.OpenedSession, metadata: bytes, created_s: float
) -> entries.SessionOpened:
    """The first entry of a session."""
    locks = locks_of(new.api_key, new.path_secret)
    session_id = new.captured.session_id
    return entries.SessionOpened(session_id, 0, created_s, locks, metadata, new.seed, new.sampling)


def write_report(
    archive: GatewayJournal, captured: capture.CapturedSession, finished: FinishedSession
) -> None:
    """File an account; SessionError 507 where the disk does not take it."""
    session_id, account = captured.session_id, finished.account
    contents: set[int] = set()
    archive.due.write()  # before the account has its number, which it would else share

    def text_of(piece: Piece) -> Text:
        if isinstance(piece, bytes):
            return piece
        contents.add(number := archive.name(session_id, piece))
        return number

    inlets = [
        (at, inlet if isinstance(inlet, RewardSlot) else text_of(inlet))
        for at, inlet in account.inlets
    ]
    entry = entries.SessionFinished(
        session_id,
        archive.rooms[session_id].next_number,
        finished.outcome,
        text_of(account.text),
        tuple(inlets),
        text_of(account.names),
        account.nodes,
        dict(finished.forks),
        dict(finished.healed),
        finished.fault,
        finished.spent_because,
        captured.num_calls,
    )
    archive.finish(entry, contents)


def restored_report(
    entry: entries.SessionFinished, blob_of: Callable[[int], Blob]
) -> FinishedSession:
    """The account as it was filed."""

    def piece_of(text: Text) -> Piece:
        return text if isinstance(text, bytes) else blob_of(text)

    inlets: list[tuple[int, RewardSlot | Piece]] = [
        (at, inlet if isinstance(inlet, RewardSlot) else piece_of(inlet))
        for at, inlet in entry.inlets
    ]
    account = SessionReport(
        entry.session_id, piece_of(entry.text), inlets, piece_of(entry.names), entry.nodes
    )
    return FinishedSession(
        entry.outcome, account, entry.forks, entry.healed, entry.fault, entry.spent_because
    )
