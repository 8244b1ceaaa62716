"""A gateway's book, made again of its journal before it serves.

    pass 1: which sessions live, which are finished, where contents stand
    pass 2: each live session's entries, in their order --> Regaining --> the book

Owns what is found on the way. Invariants: of a finished session the account alone comes back; one
whose entries are not all there, or cannot be done again, is named, takes no other along, and stays
on disk with all that it may name, as another release may be able to; a journal of another format,
capture or model is refused; contents are read when a session names them, once. Driven by
gateway.py.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from rollmesh.core.errors import DECODE_ERRORS, ConfigError, JournalError
from rollmesh.core.logs import get_logger
from rollmesh.runtime import blobs
from rollmesh.runtime.blobs import Blob
from rollmesh.runtime.history import LONG_BYTES
from rollmesh.serve.interception.capture import DurableCapture, JournaledSession, SessionRestore
from rollmesh.serve.interception.journal.entries import (
    AnyEntry,
    ContentStored,
    JournalHeader,
    SessionClosed,
    SessionEntry,
    SessionFinished,
    SessionGrew,
    SessionOpened,
    SessionRewarded,
    decode,
)
from rollmesh.serve.interception.journal.gateway_journal import (
    RECORD_BYTES,
    GatewayJournal,
    SessionUsage,
    unusable,
)
from rollmesh.serve.interception.journal.session_writer import restored_report
from rollmesh.serve.interception.sessions import RegisteredSession, SessionRegistry

log = get_logger()


class RecoveryReport(msgspec.Struct):
    """What came back, and what did not."""

    num_open: int = 0
    num_finished: int = 0
    num_set_aside: int = 0
    num_calls: int = 0
    num_bytes: int = 0
    """Of the journal."""
    torn_bytes: int = 0
    """At its end, of a record that was being written when the process ended."""
    set_aside: list[str] = []
    """Sessions that are on disk alone, and why."""


class _FoundSession:
    """One session, as pass 1 sees it, and on its way back in pass 2."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.is_finished = False
        self.lasting_bytes = 0
        self.grown_bytes = 0
        self.next_number = 0
        self.waiting: dict[int, tuple[SessionEntry, list[bytes]]] = {}
        """Entries that stand before those that come first."""
        self.opened: SessionOpened | None = None
        self.finished: SessionFinished | None = None
        self.rewards: list[SessionRewarded] = []
        self.regaining: SessionRestore | None = None

    def see(self, entry: SessionEntry, num_bytes: int) -> None:
        """One of its entries, in pass 1."""
        if entry.number in self.numbers:
            return  # a copy
        self.numbers.add(entry.number)
        self.is_finished = self.is_finished or isinstance(entry, SessionFinished)
        if isinstance(entry, SessionGrew):
            self.grown_bytes += num_bytes
        else:
            self.lasting_bytes += num_bytes

    def room(self) -> SessionUsage:
        """What it has in the journal."""
        grown_bytes = 0 if self.is_finished else self.grown_bytes
        next_number = max(self.numbers) + 1
        return SessionUsage(next_number, self.lasting_bytes, grown_bytes, set(), self.is_finished)

    @property
    def is_whole(self) -> bool:
        """Whether all is there that it needs: the deeds of a finished one may be gone."""
        return self.is_finished or self.numbers == set(range(len(self.numbers)))


class JournalRecovery:
    """`run` once, before anything is served."""

    def __init__(
        self, archive: GatewayJournal, capture: DurableCapture, book: SessionRegistry
    ) -> None:
        self._archive = archive
        self._capture = capture
        self._book = book
        self._found: dict[str, _FoundSession] = {}
        self._places: dict[int, int] = {}
        """Of contents."""
        self._contents: dict[int, Blob | bytes] = {}
        """Those that were read, until all sessions are back."""
        self._told = RecoveryReport(set_aside=[])

    def run(self, began: JournalHeader) -> RecoveryReport:
        """Make all again; ConfigError where the journal is of another format, capture or model."""
        start_s = time.monotonic()
        try:
            is_new = not self._find(began)
            self._redo_all()
        except JournalError as error:
            raise unusable(error) from None
        self._archive.drop_unnamed()
        if is_new:
            self._archive.begin(began)
        told, journal = self._told, self._archive.journal
        told.num_bytes, told.torn_bytes = journal.size_bytes, journal.torn_bytes
        log.info(
            "gateway.recovered",
            journal=str(self._archive.folder),
            took_s=round(time.monotonic() - start_s, 3),
            **msgspec.structs.asdict(told),
        )
        return told

    # pass 1

    def _find(self, began: JournalHeader) -> bool:
        """Whether there was a journal."""
        closed: set[str] = set()
        has_begun = False
        for position, frames in self._archive.journal.replay():
            entry = self._read_entry(frames)
            match entry:
                case JournalHeader():
                    _check_same(entry, began, self._archive.folder)
                    has_begun = True
                case SessionClosed(session_id):
                    closed.add(session_id)
                case ContentStored(number):
                    self._places[number] = position
                    self._archive.known(number, size_of(frames))
                case SessionEntry(session_id):
                    self._found.setdefault(session_id, _FoundSession()).see(entry, size_of(frames))
        for session_id in closed:
            self._found.pop(session_id, None)
        return has_begun

    def _read_entry(self, frames: list[bytes]) -> AnyEntry:
        try:
            entry: AnyEntry = decode(frames[0])
        except (*DECODE_ERRORS, IndexError):
            raise ConfigError(
                f"--journal {self._archive.folder}: it has records that no gateway of this release "
                "has written; go on with the release that did, or name another folder"
            ) from None
        return entry

    # pass 2

    def _redo_all(self) -> None:
        for session_id, found in self._found.items():
            room = self._archive.rooms[session_id] = found.room()
            self._archive.count(room.lasting_bytes + room.grown_bytes)
        for session_id, found in list(self._found.items()):
            if not found.is_whole:
                self._set_aside(session_id, "not all of its records are there")
        for _, frames in self._archive.journal.replay():
            entry = decode(frames[0])
            if isinstance(entry, SessionEntry) and entry.session_id in self._found:
                self._meet(entry, frames)
        for session_id in list(self._found):
            self._set_aside(session_id, "its records do not end")
        self._contents.clear()

    def _meet(self, entry: SessionEntry, frames: list[bytes]) -> None:
        """One entry, which may be a copy, or stand before those that come first."""
        session_id = entry.session_id
        found = self._found[session_id]
        if entry.number not in found.numbers:
            return
        if found.is_finished:
            # Its deeds may be gone already: what is left of it needs no order.
            found.numbers.discard(entry.number)
            if not isinstance(entry, SessionGrew) and not self._try(
                session_id, partial(self._take, session_id, found, entry, frames)
            ):
                return
            if not found.numbers:
                self._try(session_id, partial(self._settle, session_id, found))
            return
        found.waiting.setdefault(entry.number, (entry, frames))
        while (due := found.waiting.pop(found.next_number, None)) is not None:
            found.numbers.discard(found.next_number)
            found.next_number += 1
            if not self._try(session_id, partial(self._take, session_id, found, *due)):
                return
        if not found.numbers:
            self._try(session_id, partial(self._settle, session_id, found))

    def _try(self, session_id: str, work: Callable[[], None]) -> bool:
        """Work on a session; one in which that cannot be done is set aside."""
        try:
            work()
        except JournalError:
            raise
        except Exception as error:  # noqa: BLE001 - door: one session takes no other along
            self._set_aside(session_id, f"{type(error).__name__}: {error}")
            return False
        return True

    def _take(
        self, session_id: str, found: _FoundSession, entry: SessionEntry, frames: list[bytes]
    ) -> None:
        match entry:
            case SessionOpened():
                found.opened = entry
                found.regaining = self._capture.regain(
                    JournaledSession(
                        session_id,
                        entry.locks,
                        entry.sampling,
                        entry.seed,
                        lambda number: self._read(session_id, number),
                    )
                )
            case SessionGrew():
                assert found.regaining is not None
                found.regaining.take(frames[1])
            case SessionRewarded():
                found.rewards.append(entry)
            case SessionFinished():
                found.finished = entry

    def _settle(self, session_id: str, found: _FoundSession) -> None:
        """All of it is back: into the book with it."""
        opened, regaining, finished = found.opened, found.regaining, found.finished
        if opened is None or regaining is None:
            raise LookupError("how it was opened is not there")
        # Before its doors lead anywhere: this may fail, too.
        again = restored_report(finished, partial(self._blob, session_id)) if finished else None
        captured = regaining.finished(finished.num_calls) if finished else regaining.end()
        entry = RegisteredSession(captured, opened.metadata, opened.created_s)
        for each in sorted(found.rewards, key=lambda reward: reward.number):
            if each.node is None:
                entry.reward = each.reward
            else:
                entry.node_rewards = {**entry.node_rewards, each.node: each.reward}
        entry.finished, entry.is_filed = again, again is not None
        self._book.enter(entry)
        del self._found[session_id]
        self._told.num_finished += entry.is_filed
        self._told.num_open += not entry.is_filed
        self._told.num_calls += captured.num_calls
        blobs.spill_over()

    def _set_aside(self, session_id: str, why: str) -> None:
        del self._found[session_id]
        for number in self._places:  # any of them it may name
            self._archive.hold(session_id, number)
        self._book.set_aside(session_id, why)
        self._told.set_aside.append(f"{session_id}: {why}")
        self._told.num_set_aside += 1

    def _read(self, session_id: str, number: int) -> bytes:
        """A content that a session names."""
        content = self._contents.get(number)
        if content is None:
            if number not in self._places:
                raise LookupError(f"its text or image {number} is not there")
            _, raw = self._archive.journal.read(self._places[number])
            content = self._contents[number] = raw if len(raw) < LONG_BYTES else blobs.hold(raw)
            self._archive.bind(number, content)
        self._archive.hold(session_id, number)
        return content if isinstance(content, bytes) else content.read()

    def _blob(self, session_id: str, number: int) -> Blob:
        """One that is long."""
        self._read(session_id, number)
        content = self._contents[number]
        assert isinstance(content, Blob)
        return content


def size_of(frames: list[bytes]) -> int:
    """What a record takes, about."""
    return RECORD_BYTES + sum(map(len, frames))


def _check_same(found: JournalHeader, wanted: JournalHeader, folder: Path) -> None:
    if found.format != wanted.format:
        raise ConfigError(
            f"--journal {folder}: its sessions are of format {found.format}, this release writes "
            f"{wanted.format}; go on with the release that wrote them, or name another folder"
        )
    if found != wanted:
        raise ConfigError(
            f"--journal {folder}: its sessions are of capture, model and chats {_words(found)}, "
            f"these are {_words(wanted)}; name another folder"
        )


def _words(began: JournalHeader) -> str:
    return " ".join(filter(None, (began.capture, began.model, began.chats)))
