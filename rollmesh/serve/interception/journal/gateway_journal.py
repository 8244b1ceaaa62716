"""Journal of a gateway's sessions: events are on disk before clients receive their effects.

    live --the session is closed, or its report has replaced its events--> dead
    Compaction starts when half of the journal is dead: live records of the oldest segment are
    copied to the end, some with each write; then the segment is removed. A segment without live
    records is removed at once.

- One process owns the folder, and no other user can read it.
- If the disk refuses a write, the caller gets a SessionError, and no part of the record is kept.
- A record is live exactly as long as its session or content, so the folder holds at most twice the
  live bytes plus a few segments.
- Beyond `max_bytes` no session or call is accepted; running calls are still written.
"""

import contextlib
import hashlib
import stat
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from weakref import WeakKeyDictionary

import msgspec

from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import ConfigError, JournalError, SessionError
from rollmesh.core.journal import Journal
from rollmesh.core.logs import get_logger
from rollmesh.runtime.blobs import Blob
from rollmesh.serve.interception.journal.entries import (
    ContentStored,
    JournalEntry,
    JournalHeader,
    SessionClosed,
    SessionEntry,
    SessionFinished,
    SessionGrew,
    SessionOpened,
    SessionRewarded,
    decode,
    encode,
)
from rollmesh.serve.interception.journal.write_buffer import FlushQueue, Record, WriteBuffer

RETRY_AFTER_S = 5.0
COMPACTED_PER_BYTE = 2
"""Bytes of the oldest segment that are compacted for each byte written."""
COMPACTED_WHEN_FULL_BYTES = 8 * 2**20
"""Bytes that are compacted at once when the journal is full; takes about 10 ms."""
RECORD_BYTES = 32
"""Approximate overhead of a record beside its frames."""

log = get_logger()


Segments = tuple[int, ...]
"""Start positions of the segments that hold records of one session or content, the newest last."""


class SessionUsage(msgspec.Struct, gc=False):
    """One session's share of the journal."""

    next_number: int = 0
    permanent_bytes: int = 0
    event_bytes: int = 0
    """Bytes of events, which the report will replace."""
    contents: set[int] = set()
    """Numbers of the long texts and images that the session references."""
    is_finished: bool = False
    segments: Segments = ()


class _StoredContent(msgspec.Struct, gc=False):
    num_bytes: int = 0
    """0 until it is written."""
    segments: Segments = ()
    num_references: int = 0
    digest: bytes = b""
    """SHA-256 of a text that is no blob."""


class GatewayJournal:
    def __init__(self, folder: Path, config: JournalConfig) -> None:
        """Open or create the journal; ConfigError if the folder is not private or the journal is
        damaged."""
        make_private(folder)
        self.folder = folder
        try:
            self.journal = Journal(folder, config.segment_bytes, fsync=config.fsync)
        except JournalError as error:
            raise unusable(error) from None
        self.usage: dict[str, SessionUsage] = {}
        self.live_bytes = 0
        self._config = config
        self._contents: dict[int, _StoredContent] = {}
        self._next_content = 0
        self._numbers: WeakKeyDictionary[Blob, int] = WeakKeyDictionary()
        self._texts: dict[bytes, int] = {}
        """Numbers of short, often repeated contents by digest."""
        self.flush_queue = FlushQueue(
            self._events_record, self._write_events, one_by_one=config.fsync
        )
        """Sessions with events to write."""
        self._unwritten: dict[int, Blob | bytes] = {}
        """Contents that will be referenced by a record that is not yet written."""
        self._pending_closes: list[str] = []
        """Closed sessions whose SessionClosed entry the disk has refused so far."""
        self._segment_refs = SegmentRefCounts(self.journal)
        self._header = b""
        """Encoded header, once written, and the segment that holds it."""
        self._header_segment = -1
        self._compacting: Iterator[list[bytes]] | None = None
        """Iterator over the oldest segment during compaction."""
        self._can_compact = False
        """True once all sessions are restored, so that dead records are known."""
        self._is_failing = False

    def check(self) -> None:
        """Raise SessionError 503 if the journal is full, 507 while the disk refuses writes, which
        is probed on each call."""
        if self._is_failing:
            self._write([encode(SessionClosed(""))])  # names no session, so it is dead at once
        if self.journal.size_bytes <= self._config.max_bytes:
            return
        self._compact(COMPACTED_WHEN_FULL_BYTES)
        if self.journal.size_bytes > self._config.max_bytes:
            why = (
                f"{self.folder}: sessions use {self.live_bytes} bytes, journal.max_bytes = "
                f"{self._config.max_bytes}; delete finished sessions whose report you have"
            )
            raise SessionError(503, "journal_full", why, RETRY_AFTER_S)

    # session events; each method raises SessionError 507 if the disk refuses the write

    def begin(self, header: JournalHeader) -> None:
        """Write the header of a new journal."""
        self._write([encode(header)])
        self._note_header(encode(header))

    def open(self, opened: SessionOpened) -> None:
        """Write the first entry of a session."""
        self.check()
        self.usage[opened.session_id] = SessionUsage(contents=set())
        try:
            self._add(opened, frozenset())
        except SessionError:
            self.close(opened.session_id)
            raise

    def reward(self, session_id: str, reward: float, node: int | None) -> None:
        """Write a reward of the session, or of one of its turns."""
        self.flush_queue.flush()
        usage = self.usage[session_id]
        self._add(SessionRewarded(session_id, usage.next_number, reward, node), usage.contents)

    def finish(self, finished: SessionFinished, contents: set[int]) -> None:
        """Replace the session's events by its report, which references `contents`. Flush pending
        events first: they have numbers of their own."""
        self._add(finished, contents)
        usage = self.usage[finished.session_id]
        self.add_live_bytes(-usage.event_bytes)
        usage.event_bytes, usage.is_finished = 0, True
        self._release(usage, usage.contents - contents)

    def close(self, session_id: str) -> None:
        """Forget the session; if the disk refuses the entry, it is written later."""
        usage = self.usage.pop(session_id, None)
        if usage is None:
            return
        self.add_live_bytes(-usage.event_bytes - usage.permanent_bytes)
        self._segment_refs.release(usage.segments)
        self._release(usage, usage.contents)
        if usage.next_number:
            self._pending_closes.append(session_id)
            with contextlib.suppress(SessionError):
                self._write()
            self._compact(COMPACTED_PER_BYTE * usage.permanent_bytes)

    # long texts and images

    def name(self, session_id: str, content: Blob | bytes) -> int:
        """Return the number of a content that the session's next record references."""
        if isinstance(content, Blob):
            number = self._numbers.get(content)
        else:
            number = self._texts.get(digest_of(content))
        if number is None or number not in self._contents:
            number, self._next_content = self._next_content, self._next_content + 1
            self._contents[number] = _StoredContent()
            self.bind(number, content)
            self._unwritten[number] = content
        self.hold(session_id, number)
        return number

    def hold(self, session_id: str, number: int) -> None:
        """Add a reference of the session to a content."""
        usage = self.usage.get(session_id)
        if usage is not None and number not in usage.contents:
            usage.contents.add(number)
            self._contents[number].num_references += 1

    def add_stored(self, number: int, num_bytes: int) -> None:
        """Register a content that recovery found on disk, perhaps more than once."""
        if number in self._contents:
            return
        self._contents[number] = _StoredContent(num_bytes)
        self._next_content = max(self._next_content, number + 1)
        self.add_live_bytes(num_bytes)

    def bind(self, number: int, content: Blob | bytes) -> None:
        """Assign a number to a content."""
        if isinstance(content, Blob):
            self._numbers[content] = number
        else:
            digest = self._contents[number].digest = digest_of(content)
            self._texts[digest] = number

    def add_live_bytes(self, num_bytes: int) -> None:
        self.live_bytes += num_bytes

    def drop_unreferenced(self) -> None:
        """Drop the contents that no session references, and allow compaction.

        Called after recovery: before, records must not move, because recovery knows their
        positions.
        """
        self._can_compact = True
        for number, content in list(self._contents.items()):
            if not content.num_references:
                self._drop_content(number)

    def close_journal(self) -> None:
        """Flush and close the journal."""
        self.flush_queue.flush()
        self._compacting = None
        self.journal.close()

    # writing

    def _add(self, entry: SessionEntry, contents: Set[int]) -> None:
        usage = self.usage[entry.session_id]
        self._write_contents(contents)
        [start] = self._write([encode(entry)])
        usage.permanent_bytes += self._note_written(usage, self.journal.end - start)
        self._compact(COMPACTED_PER_BYTE * (self.journal.end - start))

    def _events_record(self, buffer: WriteBuffer) -> Record | None:
        """Build the record of a session's pending events, after the contents that they reference;
        None if the session is finished or closed."""
        usage = self.usage.get(buffer.session_id)
        if usage is None or usage.is_finished:
            return None
        self._write_contents(usage.contents)
        return [encode(SessionGrew(buffer.session_id, usage.next_number)), buffer.encoded_events()]

    def _write_events(self, records: Mapping[WriteBuffer, Record]) -> None:
        """Write the events of several sessions."""
        starts = self._write(*records.values())
        ends = [*starts[1:], self.journal.end]
        for buffer, start, end in zip(records, starts, ends, strict=True):
            usage = self.usage[buffer.session_id]
            usage.event_bytes += self._note_written(usage, end - start)
        self._compact(COMPACTED_PER_BYTE * (self.journal.end - starts[0]))

    def _note_written(self, usage: SessionUsage, num_bytes: int) -> int:
        """Count a record of the session as live."""
        usage.next_number += 1
        usage.segments = self._segment_refs.acquire(usage.segments)
        self.add_live_bytes(num_bytes)
        return num_bytes

    def _write(self, *records: Record) -> list[int]:
        """Write records, after any pending SessionClosed entries; return their positions.

        SessionError 507: none of them is stored. If the process is killed during the write, a
        prefix of the records may be stored, of which no client was notified.
        """
        try:
            while self._pending_closes:
                self.journal.append([encode(SessionClosed(self._pending_closes[-1]))])
                self._pending_closes.pop()
            positions = self.journal.append_all(records) if records else []
        except JournalError as error:
            raise self._write_failed(error) from None
        self._is_failing = False
        return positions

    def _write_contents(self, numbers: Set[int]) -> None:
        """Write those contents that are not stored yet; ContentLost affects only sessions that
        reference the lost content."""
        for number in sorted(self._unwritten.keys() & numbers):
            content = self._unwritten[number]
            raw = content if isinstance(content, bytes) else content.read()
            [start] = self._write([encode(ContentStored(number)), raw])
            stored = self._contents[number]
            stored.num_bytes = self.journal.end - start
            stored.segments = self._segment_refs.acquire(stored.segments)
            self.add_live_bytes(stored.num_bytes)
            del self._unwritten[number]
            self._compact(COMPACTED_PER_BYTE * stored.num_bytes)

    def _write_failed(self, error: JournalError) -> SessionError:
        if not self._is_failing:
            remedy = f"new calls are refused until the disk accepts a record; {error.remedy}"
            log.error("journal.refused", error=str(error), remedy=remedy)
        self._is_failing = True
        return SessionError(507, "journal_full", f"the journal: {error}", RETRY_AFTER_S)

    def _release(self, usage: SessionUsage, numbers: set[int]) -> None:
        for number in list(numbers):
            usage.contents.discard(number)
            content = self._contents[number]
            content.num_references -= 1
            if not content.num_references:
                self._drop_content(number)

    def _drop_content(self, number: int) -> None:
        content = self._contents.pop(number)
        self.add_live_bytes(-content.num_bytes)
        self._segment_refs.release(content.segments)
        if content.digest and self._texts.get(content.digest) == number:
            del self._texts[content.digest]
        self._unwritten.pop(number, None)

    # compaction

    def _needs_compaction(self) -> bool:
        dead, segment = self.journal.size_bytes - self.live_bytes, self._config.segment_bytes
        is_over = self.journal.size_bytes > self._config.max_bytes and dead > segment
        return self._can_compact and (is_over or dead > max(self.live_bytes, 2 * segment))

    def _compact(self, num_bytes: int) -> None:
        """Compact about `num_bytes` of the oldest segment; if the disk is full, do it later."""
        try:
            while num_bytes > 0 and (self._compacting or self._needs_compaction()):
                if self._compacting is None and self._segment_refs.is_oldest_dead:
                    num_bytes -= self._drop_oldest()
                    continue
                self._compacting = self._compacting or self.journal.oldest()
                num_bytes -= self._compact_record(self._compacting)
        except JournalError as error:
            self._compacting = None  # restarts from the segment's start; copies do no harm
            self._write_failed(error)
        except Exception:  # door: a fault in compaction must not fail the caller's write
            self._compacting, self._can_compact = None, False
            remedy = "the journal only grows until the gateway is restarted"
            log.exception("journal.not_moved", remedy=remedy)

    def _compact_record(self, moving: Iterator[list[bytes]]) -> int:
        """Copy the next live record, or drop the segment after its last; return the bytes
        processed."""
        frames = next(moving, None)
        if frames is None:
            self._compacting = None
            return self._drop_oldest()
        entry = decode(frames[0])
        if self._is_live(entry):
            self.journal.append(frames)
            self._note_copied(entry)
        return RECORD_BYTES + sum(map(len, frames))

    def _drop_oldest(self) -> int:
        """Remove the oldest segment, which holds no live record but perhaps the header. Return 0,
        or a huge number if it is the only segment."""
        oldest = self.journal.segments[0]
        if len(self.journal.segments) == 1:
            return sys.maxsize
        if self._header_segment == oldest:
            self.journal.append([self._header])
            self._note_header(self._header)
        self.journal.drop_oldest()
        self._segment_refs.drop(oldest)
        return 0

    def _note_copied(self, entry: JournalEntry) -> None:
        """Record the new position of a copied entry."""
        match entry:
            case JournalHeader():
                self._note_header(encode(entry))
            case ContentStored(number):
                stored = self._contents[number]
                stored.segments = self._segment_refs.acquire(stored.segments)
            case SessionEntry(session_id):
                usage = self.usage[session_id]
                usage.segments = self._segment_refs.acquire(usage.segments)

    def _note_header(self, header: bytes) -> None:
        self._header, self._header_segment = header, self.journal.segments[-1]

    def _is_live(self, entry: JournalEntry) -> bool:
        match entry:
            case JournalHeader():
                return True
            case ContentStored(number):
                return number in self._contents
            case SessionGrew(session_id):
                usage = self.usage.get(session_id)
                return usage is not None and not usage.is_finished
            case SessionEntry(session_id):
                return session_id in self.usage
        return False


def digest_of(text: bytes) -> bytes:
    """Return the SHA-256 digest of a text."""
    return hashlib.sha256(text).digest()


def make_private(folder: Path) -> None:
    """Create the folder if needed; ConfigError if other users can read it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = folder.stat().st_mode
    except FileExistsError:
        raise ConfigError(
            f"--journal {folder}: is a file; name a folder, or --no-journal"
        ) from None
    except OSError as error:
        why = str(error.strerror).lower()
        raise ConfigError(
            f"--journal {folder}: {why}; name another folder, or --no-journal"
        ) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"--journal {folder}: other users can read it; chmod 700 {folder}")


def unusable(error: JournalError) -> ConfigError:
    """Return the user-facing error for a journal that cannot be used."""
    return ConfigError(f"--journal: {error}; name another folder, or --no-journal")


class SegmentRefCounts:
    """Number of sessions and contents with a record in each segment written by this process.

    - A session or content counts once in a segment, from its first record there until it is
      dropped.
    - A segment with count 0 is dead and need not be read before it is removed.
    - Segments of earlier processes have no counts.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._known_from = journal.end
        self._num: dict[int, int] = {}

    @property
    def is_oldest_dead(self) -> bool:
        segments = self._journal.segments
        is_known = len(segments) > 1 and segments[0] >= self._known_from
        return is_known and not self._num.get(segments[0])

    def acquire(self, segments: Segments) -> Segments:
        """Count a session or content that has just written a record; return its segments."""
        newest = self._journal.segments[-1]
        if segments and segments[-1] == newest:
            return segments
        self._num[newest] = self._num.get(newest, 0) + 1
        oldest = self._journal.segments[0]
        return (*[start for start in segments if start >= oldest], newest)

    def release(self, segments: Segments) -> None:
        """Subtract a dropped session or content."""
        for start in segments:
            if start in self._num:
                self._num[start] -= 1

    def drop(self, start: int) -> None:
        """Forget a removed segment."""
        self._num.pop(start, None)
