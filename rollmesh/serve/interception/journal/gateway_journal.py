"""The journal of a gateway's sessions: what they do is written before their clients are told.

    live --the session is deleted, or the account is written in place of its deeds--> dead
    the oldest segment, once half of all is dead: what is live in it is written anew, behind all
    else, a little with each record --> the segment is removed; at once where none of it is live

Owns the folder, and how much in it is live, by session. Invariants: one process has the folder, and
nobody else may read it; what the disk refuses is a SessionError to whoever waits for it, and is
never half there; a record is live exactly as long as its session or its content is, so the folder
is at most twice as large as what is live, and some segments; past `max_bytes` no session and no
call begins, while those under way are still written. Driven by book.py, by scribes, and by
recovery.py before it serves.

The folder of a gateway's journal, which holds what agents and models said to each other.

Invariant: nobody else may look into it; one that others can look into is refused in a line, and one
that is not there is made. Driven by archive.py and recovery.py.

Which segments of a gateway's journal hold something that lives, as far as this process knows.

Owns how many sessions and contents have a record in each segment that was begun here. Invariants: a
tenant is counted once in a segment, from its first record there until it is forgotten, so that a
segment without tenants is dead, every record of it, and need not be read before it is removed; of
segments that an earlier process left nothing is known. Driven by archive.py.
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
MOVED_PER_BYTE = 2
"""For each byte that is written so many are looked at, to be moved or dropped."""
MOVED_AT_ONCE_BYTES = 8 * 2**20
"""When there is no room: some ten milliseconds."""
RECORD_BYTES = 32
"""What a record takes beside its frames, about."""

log = get_logger()


Segments = tuple[int, ...]
"""Where those begin in which a tenant has records; the last is the newest."""


class SessionUsage(msgspec.Struct, gc=False):
    """What one session has in the journal."""

    next_number: int = 0
    lasting_bytes: int = 0
    grown_bytes: int = 0
    """Of its deeds, which its account replaces."""
    contents: set[int] = set()
    """Long texts and images that it names."""
    is_finished: bool = False
    segments: Segments = ()


class _StoredContent(msgspec.Struct, gc=False):
    num_bytes: int = 0
    """0 while it is not written."""
    segments: Segments = ()
    num_rooms: int = 0
    digest: bytes = b""
    """By which it is known, where it is no blob."""


class GatewayJournal:
    """See the module."""

    def __init__(self, folder: Path, config: JournalConfig) -> None:
        """ConfigError where the folder is not ours alone, or its journal is damaged."""
        make_private(folder)
        self.folder = folder
        try:
            self.journal = Journal(folder, config.segment_bytes, fsync=config.fsync)
        except JournalError as error:
            raise unusable(error) from None
        self.rooms: dict[str, SessionUsage] = {}
        self.live_bytes = 0
        self._config = config
        self._contents: dict[int, _StoredContent] = {}
        self._next_content = 0
        self._numbers: WeakKeyDictionary[Blob, int] = WeakKeyDictionary()
        self._texts: dict[bytes, int] = {}
        """Short contents that sessions name again and again, by their digests."""
        self.due = FlushQueue(self._record_of, self._grow, one_by_one=config.fsync)
        """What sessions have done and wait to have written."""
        self._unwritten: dict[int, Blob | bytes] = {}
        """Contents that a record still to be written names."""
        self._unclosed: list[str] = []
        """Sessions whose end the disk has not taken yet."""
        self._tenants = SegmentRefCounts(self.journal)
        self._began = b""
        """The first entry, once it was written or moved, and in which segment it stands."""
        self._began_at = -1
        self._moving: Iterator[list[bytes]] | None = None
        """Through the oldest segment."""
        self._is_known = False
        """What is live: all sessions are here."""
        self._is_failing = False

    def check(self) -> None:
        """SessionError 503 where there is no room for another call, 507 while the disk takes
        nothing, which is tried with each."""
        if self._is_failing:
            self._write([encode(SessionClosed(""))])  # of no session, and so dead at once
        if self.journal.size_bytes <= self._config.max_bytes:
            return
        self._move_on(MOVED_AT_ONCE_BYTES)
        if self.journal.size_bytes > self._config.max_bytes:
            why = (
                f"{self.folder}: {self.live_bytes} bytes of sessions, journal.max_bytes = "
                f"{self._config.max_bytes}; delete those that you have the account of"
            )
            raise SessionError(503, "journal_full", why, RETRY_AFTER_S)

    # what happens to sessions; each a SessionError 507 where the disk does not take it

    def begin(self, began: JournalHeader) -> None:
        """The first entry of a new journal."""
        self._write([encode(began)])
        self._note_began(encode(began))

    def open(self, opened: SessionOpened) -> None:
        """A session is here."""
        self.check()
        self.rooms[opened.session_id] = SessionUsage(contents=set())
        try:
            self._add(opened, frozenset())
        except SessionError:
            self.close(opened.session_id)
            raise

    def reward(self, session_id: str, reward: float, node: int | None) -> None:
        """It, or a turn of it, is worth so much."""
        self.due.write()
        room = self.rooms[session_id]
        self._add(SessionRewarded(session_id, room.next_number, reward, node), room.contents)

    def finish(self, finished: SessionFinished, contents: set[int]) -> None:
        """Its account, which names these contents, stands for it from now on; made after what was
        due is written, which has numbers of its own."""
        self._add(finished, contents)
        room = self.rooms[finished.session_id]
        self.count(-room.grown_bytes)
        room.grown_bytes, room.is_finished = 0, True
        self._release(room, room.contents - contents)

    def close(self, session_id: str) -> None:
        """It is forgotten; where the disk does not take that, it will later."""
        room = self.rooms.pop(session_id, None)
        if room is None:
            return
        self.count(-room.grown_bytes - room.lasting_bytes)
        self._tenants.leave(room.segments)
        self._release(room, room.contents)
        if room.next_number:
            self._unclosed.append(session_id)
            with contextlib.suppress(SessionError):
                self._write()
            self._move_on(MOVED_PER_BYTE * room.lasting_bytes)

    # long texts and images

    def name(self, session_id: str, content: Blob | bytes) -> int:
        """The number of a content that the session's next record names."""
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
        """The session names this content."""
        room = self.rooms.get(session_id)
        if room is not None and number not in room.contents:
            room.contents.add(number)
            self._contents[number].num_rooms += 1

    def known(self, number: int, num_bytes: int) -> None:
        """A content that is written already, perhaps more than once."""
        if number in self._contents:
            return
        self._contents[number] = _StoredContent(num_bytes)
        self._next_content = max(self._next_content, number + 1)
        self.count(num_bytes)

    def bind(self, number: int, content: Blob | bytes) -> None:
        """This is what has the number."""
        if isinstance(content, Blob):
            self._numbers[content] = number
        else:
            digest = self._contents[number].digest = digest_of(content)
            self._texts[digest] = number

    def count(self, num_bytes: int) -> None:
        """So many bytes more are live."""
        self.live_bytes += num_bytes

    def drop_unnamed(self) -> None:
        """Contents that no session names are dead; after all sessions are here again.

        Before, nothing is moved: who replays the journal knows where its records stand.
        """
        self._is_known = True
        for number, content in list(self._contents.items()):
            if not content.num_rooms:
                self._forget(number)

    def close_journal(self) -> None:
        """Give up the folder."""
        self.due.write()
        self._moving = None
        self.journal.close()

    # the disk

    def _add(self, entry: SessionEntry, contents: Set[int]) -> None:
        room = self.rooms[entry.session_id]
        self._write_contents(contents)
        [start] = self._write([encode(entry)])
        room.lasting_bytes += self._note_written(room, self.journal.end - start)
        self._move_on(MOVED_PER_BYTE * (self.journal.end - start))

    def _record_of(self, page: WriteBuffer) -> Record | None:
        """What a session has done, behind the contents that it names; one that is over has done
        nothing."""
        room = self.rooms.get(page.session_id)
        if room is None or room.is_finished:
            return None
        self._write_contents(room.contents)
        return [encode(SessionGrew(page.session_id, room.next_number)), page.deeds()]

    def _grow(self, records: Mapping[WriteBuffer, Record]) -> None:
        """Sessions have done what stands there."""
        starts = self._write(*records.values())
        ends = [*starts[1:], self.journal.end]
        for page, start, end in zip(records, starts, ends, strict=True):
            room = self.rooms[page.session_id]
            room.grown_bytes += self._note_written(room, end - start)
        self._move_on(MOVED_PER_BYTE * (self.journal.end - starts[0]))

    def _note_written(self, room: SessionUsage, num_bytes: int) -> int:
        """A record of the session's, which lives."""
        room.next_number += 1
        room.segments = self._tenants.enter(room.segments)
        self.count(num_bytes)
        return num_bytes

    def _write(self, *records: Record) -> list[int]:
        """Behind the ends that are owed; where they stand. SessionError 507: none of them does.

        Of a process that is killed meanwhile the first may stand, which nobody was told of.
        """
        try:
            while self._unclosed:
                self.journal.append([encode(SessionClosed(self._unclosed[-1]))])
                self._unclosed.pop()
            positions = self.journal.append_all(records) if records else []
        except JournalError as error:
            raise self._refused(error) from None
        self._is_failing = False
        return positions

    def _write_contents(self, numbers: Set[int]) -> None:
        """Those that are not there yet; ContentLost concerns who names it, and nobody else."""
        for number in sorted(self._unwritten.keys() & numbers):
            content = self._unwritten[number]
            raw = content if isinstance(content, bytes) else content.read()
            [start] = self._write([encode(ContentStored(number)), raw])
            kept = self._contents[number]
            kept.num_bytes = self.journal.end - start
            kept.segments = self._tenants.enter(kept.segments)
            self.count(kept.num_bytes)
            del self._unwritten[number]
            self._move_on(MOVED_PER_BYTE * kept.num_bytes)

    def _refused(self, error: JournalError) -> SessionError:
        if not self._is_failing:
            remedy = f"no call begins until the disk takes a record again; {error.remedy}"
            log.error("journal.refused", error=str(error), remedy=remedy)
        self._is_failing = True
        return SessionError(507, "journal_full", f"the journal: {error}", RETRY_AFTER_S)

    def _release(self, room: SessionUsage, numbers: set[int]) -> None:
        for number in list(numbers):
            room.contents.discard(number)
            content = self._contents[number]
            content.num_rooms -= 1
            if not content.num_rooms:
                self._forget(number)

    def _forget(self, number: int) -> None:
        content = self._contents.pop(number)
        self.count(-content.num_bytes)
        self._tenants.leave(content.segments)
        if content.digest and self._texts.get(content.digest) == number:
            del self._texts[content.digest]
        self._unwritten.pop(number, None)

    # what is dead

    def _is_worth_moving(self) -> bool:
        dead, segment = self.journal.size_bytes - self.live_bytes, self._config.segment_bytes
        is_over = self.journal.size_bytes > self._config.max_bytes and dead > segment
        return self._is_known and (is_over or dead > max(self.live_bytes, 2 * segment))

    def _move_on(self, num_bytes: int) -> None:
        """Look at so many bytes of the oldest segment; where the disk is full, another time."""
        try:
            while num_bytes > 0 and (self._moving or self._is_worth_moving()):
                if self._moving is None and self._tenants.is_oldest_dead:
                    num_bytes -= self._drop_oldest()
                    continue
                self._moving = self._moving or self.journal.oldest()
                num_bytes -= self._move_one(self._moving)
        except JournalError as error:
            self._moving = None  # from its begin then: copies are no harm
            self._refused(error)
        except Exception:  # door: who writes has nothing to do with what is moved then
            self._moving, self._is_known = None, False
            remedy = "the journal only grows until the gateway is started again"
            log.exception("journal.not_moved", remedy=remedy)

    def _move_one(self, moving: Iterator[list[bytes]]) -> int:
        """The next record, or the segment behind its last; how large it is."""
        frames = next(moving, None)
        if frames is None:
            self._moving = None
            return self._drop_oldest()
        entry = decode(frames[0])
        if self._is_live(entry):
            self.journal.append(frames)
            self._note_moved(entry)
        return RECORD_BYTES + sum(map(len, frames))

    def _drop_oldest(self) -> int:
        """Nothing in it lives but, perhaps, what this journal is. 0; if it is not closed, much."""
        oldest = self.journal.segments[0]
        if len(self.journal.segments) == 1:
            return sys.maxsize
        if self._began_at == oldest:
            self.journal.append([self._began])
            self._note_began(self._began)
        self.journal.drop_oldest()
        self._tenants.drop(oldest)
        return 0

    def _note_moved(self, entry: JournalEntry) -> None:
        """It stands behind all else now."""
        match entry:
            case JournalHeader():
                self._note_began(encode(entry))
            case ContentStored(number):
                kept = self._contents[number]
                kept.segments = self._tenants.enter(kept.segments)
            case SessionEntry(session_id):
                room = self.rooms[session_id]
                room.segments = self._tenants.enter(room.segments)

    def _note_began(self, began: bytes) -> None:
        self._began, self._began_at = began, self.journal.segments[-1]

    def _is_live(self, entry: JournalEntry) -> bool:
        match entry:
            case JournalHeader():
                return True
            case ContentStored(number):
                return number in self._contents
            case SessionGrew(session_id):
                room = self.rooms.get(session_id)
                return room is not None and not room.is_finished
            case SessionEntry(session_id):
                return session_id in self.rooms
        return False


def digest_of(text: bytes) -> bytes:
    """By which a text is known without being held."""
    return hashlib.sha256(text).digest()


def make_private(folder: Path) -> None:
    """ConfigError where others can look into the folder, or it cannot be made."""
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
        raise ConfigError(f"--journal {folder}: others can look into it; chmod 700 {folder}")


def unusable(error: JournalError) -> ConfigError:
    """What the user is told of a journal that cannot be gone on with."""
    return ConfigError(f"--journal: {error}; name another folder, or --no-journal")


class SegmentRefCounts:
    """One per archive."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._known_from = journal.end
        self._num: dict[int, int] = {}

    @property
    def is_oldest_dead(self) -> bool:
        """Nothing in it lives."""
        segments = self._journal.segments
        is_known = len(segments) > 1 and segments[0] >= self._known_from
        return is_known and not self._num.get(segments[0])

    def enter(self, segments: Segments) -> Segments:
        """Of a tenant whose newest record is the journal's newest."""
        newest = self._journal.segments[-1]
        if segments and segments[-1] == newest:
            return segments
        self._num[newest] = self._num.get(newest, 0) + 1
        oldest = self._journal.segments[0]
        return (*[start for start in segments if start >= oldest], newest)

    def leave(self, segments: Segments) -> None:
        """Of a tenant that is forgotten."""
        for start in segments:
            if start in self._num:
                self._num[start] -= 1

    def drop(self, start: int) -> None:
        """Of a segment that is no more."""
        self._num.pop(start, None)
