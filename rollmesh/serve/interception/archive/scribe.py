"""Writes what one session does into its gateway's journal.

Owns who waits for it. Invariant: a long text is named by a number and stands in the journal once
for all sessions that show it. Made by tokens.py, driven by its session's diary.
"""

import asyncio
from collections import OrderedDict

from rollmesh.core.errors import SessionError
from rollmesh.runtime.blobs import Blob, hold
from rollmesh.runtime.history import LONG_BYTES
from rollmesh.runtime.images import ImageRef
from rollmesh.runtime.session_log import ImageShown, Text
from rollmesh.serve.interception.archive.archive import Archive, digest_of
from rollmesh.serve.interception.archive.page import Page

MIN_SAME_BYTES = 64
"""A shorter text is no longer than its name."""
MAX_SAME = 8
"""Long texts of a session that are held so as to be known again: its tools, those of a sub-agent or
two; one that falls out is written anew when it comes again and nobody else holds it."""


class SessionTexts:
    """How one session's deeds name its texts."""

    __slots__ = ("_archive", "_same", "_session_id")

    def __init__(self, archive: Archive, session_id: str) -> None:
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


class SessionScribe(Page):
    """Satisfies Scribe."""

    __slots__ = ("_archive", "_waiters", "shown", "texts")

    def __init__(self, archive: Archive, session_id: str) -> None:
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
