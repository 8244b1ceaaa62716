"""Restores a gateway's sessions from its journal before the gateway serves.

    pass 1: find the live sessions, the finished ones, and the positions of contents
    pass 2: replay each live session's entries in order, then add it to the registry

- Of a finished session only the report is restored.
- A session with missing or unreadable entries is set aside: it is logged by name, does not affect
  other sessions, and stays on disk with all contents, because another release may read it.
- A journal of another format, capture or model is refused.
- Contents are read lazily, once.
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
from rollmesh.runtime.conversation.history import LONG_BYTES
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
    """Result of a recovery."""

    num_open: int = 0
    num_finished: int = 0
    num_set_aside: int = 0
    num_calls: int = 0
    num_bytes: int = 0
    """Size of the journal."""
    torn_bytes: int = 0
    """Length of an incomplete record at the journal's end, which the previous process was
    writing."""
    set_aside: list[str] = []
    """Sessions that were not restored, with reasons."""


class _FoundSession:
    """State of one session during recovery."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.is_finished = False
        self.permanent_bytes = 0
        self.event_bytes = 0
        self.next_number = 0
        self.waiting: dict[int, tuple[SessionEntry, list[bytes]]] = {}
        """Entries that were read before their predecessors."""
        self.opened: SessionOpened | None = None
        self.finished: SessionFinished | None = None
        self.rewards: list[SessionRewarded] = []
        self.restore: SessionRestore | None = None

    def note(self, entry: SessionEntry, num_bytes: int) -> None:
        """Count an entry, in pass 1."""
        if entry.number in self.numbers:
            return  # a copy
        self.numbers.add(entry.number)
        self.is_finished = self.is_finished or isinstance(entry, SessionFinished)
        if isinstance(entry, SessionGrew):
            self.event_bytes += num_bytes
        else:
            self.permanent_bytes += num_bytes

    def usage(self) -> SessionUsage:
        """Return the session's share of the journal."""
        event_bytes = 0 if self.is_finished else self.event_bytes
        next_number = max(self.numbers) + 1
        return SessionUsage(next_number, self.permanent_bytes, event_bytes, set(), self.is_finished)

    @property
    def is_whole(self) -> bool:
        """Whether all required entries exist; events of a finished session may be gone."""
        return self.is_finished or self.numbers == set(range(len(self.numbers)))


class JournalRecovery:
    """One recovery; call `run` once, before the gateway serves."""

    def __init__(
        self, journal: GatewayJournal, capture: DurableCapture, registry: SessionRegistry
    ) -> None:
        self._journal = journal
        self._capture = capture
        self._registry = registry
        self._sessions: dict[str, _FoundSession] = {}
        self._places: dict[int, int] = {}
        """Journal positions of contents, by number."""
        self._contents: dict[int, Blob | bytes] = {}
        """Contents that were read; cleared when all sessions are restored."""
        self._report = RecoveryReport(set_aside=[])

    def run(self, header: JournalHeader) -> RecoveryReport:
        """Restore all sessions; ConfigError if the journal has another format, capture or model."""
        start_s = time.monotonic()
        try:
            is_new = not self._find(header)
            self._replay_all()
        except JournalError as error:
            raise unusable(error) from None
        self._journal.drop_unreferenced()
        if is_new:
            self._journal.begin(header)
        report, journal = self._report, self._journal.journal
        report.num_bytes, report.torn_bytes = journal.size_bytes, journal.torn_bytes
        log.info(
            "gateway.recovered",
            journal=str(self._journal.folder),
            took_s=round(time.monotonic() - start_s, 3),
            **msgspec.structs.asdict(report),
        )
        return report

    # pass 1

    def _find(self, header: JournalHeader) -> bool:
        """Index the journal; return whether it has a header."""
        closed: set[str] = set()
        has_header = False
        for position, frames in self._journal.journal.replay():
            entry = self._read_entry(frames)
            match entry:
                case JournalHeader():
                    _check_same(entry, header, self._journal.folder)
                    has_header = True
                case SessionClosed(session_id):
                    closed.add(session_id)
                case ContentStored(number):
                    self._places[number] = position
                    self._journal.add_stored(number, size_of(frames))
                case SessionEntry(session_id):
                    self._sessions.setdefault(session_id, _FoundSession()).note(
                        entry, size_of(frames)
                    )
        for session_id in closed:
            self._sessions.pop(session_id, None)
        return has_header

    def _read_entry(self, frames: list[bytes]) -> AnyEntry:
        try:
            entry: AnyEntry = decode(frames[0])
        except (*DECODE_ERRORS, IndexError):
            raise ConfigError(
                f"--journal {self._journal.folder}: contains records that no gateway of this "
                "release wrote; use the release that did, or name another folder"
            ) from None
        return entry

    # pass 2

    def _replay_all(self) -> None:
        for session_id, found in self._sessions.items():
            usage = self._journal.usage[session_id] = found.usage()
            self._journal.add_live_bytes(usage.permanent_bytes + usage.event_bytes)
        for session_id, found in list(self._sessions.items()):
            if not found.is_whole:
                self._set_aside(session_id, "some of its records are missing")
        for _, frames in self._journal.journal.replay():
            entry = decode(frames[0])
            if isinstance(entry, SessionEntry) and entry.session_id in self._sessions:
                self._replay_entry(entry, frames)
        for session_id in list(self._sessions):
            self._set_aside(session_id, "its records are incomplete")
        self._contents.clear()

    def _replay_entry(self, entry: SessionEntry, frames: list[bytes]) -> None:
        """Process one entry, which may be a copy, or precede its predecessors."""
        session_id = entry.session_id
        found = self._sessions[session_id]
        if entry.number not in found.numbers:
            return
        if found.is_finished:
            # Its events may be gone already; the other entries need no order.
            found.numbers.discard(entry.number)
            if not isinstance(entry, SessionGrew) and not self._try(
                session_id, partial(self._take, session_id, found, entry, frames)
            ):
                return
            if not found.numbers:
                self._try(session_id, partial(self._finish_restore, session_id, found))
            return
        found.waiting.setdefault(entry.number, (entry, frames))
        while (due := found.waiting.pop(found.next_number, None)) is not None:
            found.numbers.discard(found.next_number)
            found.next_number += 1
            if not self._try(session_id, partial(self._take, session_id, found, *due)):
                return
        if not found.numbers:
            self._try(session_id, partial(self._finish_restore, session_id, found))

    def _try(self, session_id: str, work: Callable[[], None]) -> bool:
        """Run `work` for a session; set the session aside if that fails."""
        try:
            work()
        except JournalError:
            raise
        except Exception as error:  # noqa: BLE001 - door: a fault in one session must not affect the others
            self._set_aside(session_id, f"{type(error).__name__}: {error}")
            return False
        return True

    def _take(
        self, session_id: str, found: _FoundSession, entry: SessionEntry, frames: list[bytes]
    ) -> None:
        match entry:
            case SessionOpened():
                found.opened = entry
                found.restore = self._capture.restore(
                    JournaledSession(
                        session_id,
                        entry.locks,
                        entry.sampling,
                        entry.seed,
                        lambda number: self._read(session_id, number),
                    )
                )
            case SessionGrew():
                assert found.restore is not None
                found.restore.take(frames[1])
            case SessionRewarded():
                found.rewards.append(entry)
            case SessionFinished():
                found.finished = entry

    def _finish_restore(self, session_id: str, found: _FoundSession) -> None:
        """Add a completely replayed session to the registry."""
        opened, restore, finished = found.opened, found.restore, found.finished
        if opened is None or restore is None:
            raise LookupError("its opening record is missing")
        # Before the session becomes reachable, because this may fail too.
        again = restored_report(finished, partial(self._blob, session_id)) if finished else None
        captured = restore.finished(finished.num_calls) if finished else restore.end()
        entry = RegisteredSession(captured, opened.metadata, opened.created_s)
        for each in sorted(found.rewards, key=lambda reward: reward.number):
            if each.node is None:
                entry.reward = each.reward
            else:
                entry.node_rewards = {**entry.node_rewards, each.node: each.reward}
        entry.finished, entry.is_report_stored = again, again is not None
        self._registry.add(entry)
        del self._sessions[session_id]
        self._report.num_finished += entry.is_report_stored
        self._report.num_open += not entry.is_report_stored
        self._report.num_calls += captured.num_calls
        blobs.spill_over()

    def _set_aside(self, session_id: str, why: str) -> None:
        del self._sessions[session_id]
        for number in self._places:  # it may reference any of them
            self._journal.hold(session_id, number)
        self._registry.set_aside(session_id, why)
        self._report.set_aside.append(f"{session_id}: {why}")
        self._report.num_set_aside += 1

    def _read(self, session_id: str, number: int) -> bytes:
        """Return a content that the session references."""
        content = self._contents.get(number)
        if content is None:
            if number not in self._places:
                raise LookupError(f"its text or image {number} is missing")
            _, raw = self._journal.journal.read(self._places[number])
            content = self._contents[number] = raw if len(raw) < LONG_BYTES else blobs.hold(raw)
            self._journal.bind(number, content)
        self._journal.hold(session_id, number)
        return content if isinstance(content, bytes) else content.read()

    def _blob(self, session_id: str, number: int) -> Blob:
        """Return a long content as a blob."""
        self._read(session_id, number)
        content = self._contents[number]
        assert isinstance(content, Blob)
        return content


def size_of(frames: list[bytes]) -> int:
    """Return the approximate size of a record."""
    return RECORD_BYTES + sum(map(len, frames))


def _check_same(found: JournalHeader, wanted: JournalHeader, folder: Path) -> None:
    if found.format != wanted.format:
        raise ConfigError(
            f"--journal {folder}: its sessions have format {found.format}, this release writes "
            f"{wanted.format}; use the release that wrote them, or name another folder"
        )
    if found != wanted:
        raise ConfigError(
            f"--journal {folder}: its sessions have capture, model and chats {_describe(found)}, "
            f"this gateway has {_describe(wanted)}; name another folder"
        )


def _describe(header: JournalHeader) -> str:
    return " ".join(filter(None, (header.capture, header.model, header.chats)))
