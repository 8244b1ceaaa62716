"""Long contents (images, texts), each stored once per process, some of them on disk.

    in memory --the coldest, beyond the budget--> spilled;   either --last reference gone--> freed

- Equal contents are one blob. A blob whose bytes the disk has lost is stored again when its content
  is received again.
- The spill file is unnamed, so no other process sees it. A full disk loses nothing: blobs stay in
  memory. The lock is never held during I/O.
- Reading 0.5 MB back takes 8 us from the page cache and 0.7 ms from a cold disk; a reply from a
  thread takes 77 us. So the event loop reads by itself, a part at a time.
"""

import atexit
import hashlib
import itertools
import os
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from weakref import WeakValueDictionary, ref

import msgspec

from rollmesh.core.errors import ConfigError, ContentLost, remedy_of
from rollmesh.core.free_space import FreeSpace
from rollmesh.core.logs import get_logger

PAGE_BYTES = 4096
"""Extents begin at page boundaries, since disks write whole pages."""


class Extent(msgspec.Struct, frozen=True, gc=False):
    """A range of the file."""

    start: int
    num_bytes: int

    @property
    def stop(self) -> int:
        """End of the extent, rounded up to a page."""
        return self.start + -(-self.num_bytes // PAGE_BYTES) * PAGE_BYTES


class SpillFile:
    """An unnamed file and its free extents."""

    def __init__(self, folder: Path | None) -> None:
        """Create the file in `folder`, by default the system's temporary folder; OSError if that
        fails."""
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed by `close`
        self._space = FreeSpace(sys.maxsize)

    def write(self, content: bytes) -> Extent:
        """Write a content and return its extent; OSError if the disk does not take all of it."""
        extent = self._allocate(len(content))
        try:
            rest, at = memoryview(content), extent.start
            while rest:
                num_written = os.pwrite(self.fileno(), rest, at)
                rest, at = rest[num_written:], at + num_written
        except OSError:
            self.free(extent)
            raise
        return extent

    def read(self, extent: Extent, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of an extent's content; OSError if the disk lost them."""
        pieces: list[bytes] = []
        at, end = extent.start + start, extent.start + min(stop, extent.num_bytes)
        while at < end:
            piece = os.pread(self.fileno(), end - at, at)
            if not piece:
                raise OSError("the spill file is shorter than what was written to it")
            pieces.append(piece)
            at += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def free(self, extent: Extent) -> None:
        """Free an extent that is no longer read."""
        end = self._space.end
        self._space.give(extent.start, extent.stop)
        if self._space.end < end:
            os.ftruncate(self.fileno(), self._space.end)

    @property
    def num_bytes(self) -> int:
        """Length of the file, including free ranges."""
        return self._space.end

    def fileno(self) -> int:
        return self._file.fileno()

    def _allocate(self, num_bytes: int) -> Extent:
        pieces = self._space.take([Extent(0, num_bytes).stop])
        assert pieces, "a file has no bound here"
        return Extent(pieces[0][0], num_bytes)

    def close(self) -> None:
        """Close the file, which discards its contents."""
        self._file.close()


log = get_logger()

Place = tuple[SpillFile, Extent]
_ticks = itertools.count()
"""Clock of uses: a higher tick is a more recent use."""


class Blob:
    """A long content, created by BlobStore.hold."""

    __slots__ = (
        "__weakref__", "_content", "_digest", "_place", "_store", "is_lost", "last_use",
        "num_bytes",
    )  # fmt: skip

    def __init__(self, content: bytes, store: "BlobStore") -> None:
        self.num_bytes = len(content)
        self.last_use = next(_ticks)
        self.is_lost = False
        """Reading it back failed."""
        self._content: bytes | None = content
        self._place: Place | None = None
        self._digest = ""
        self._store = store

    def read(self) -> bytes:
        """The content; ContentLost if it is spilled and cannot be read back."""
        self.last_use = next(_ticks)
        content = self._content
        return self._from_disk(0, self.num_bytes) if content is None else content

    def part(self, start: int, stop: int) -> bytes | memoryview:
        """A part of the content, not copied if it is in memory; ContentLost as `read`."""
        self.last_use = next(_ticks)
        content = self._content
        return self._from_disk(start, stop) if content is None else memoryview(content)[start:stop]

    def is_of(self, content: bytes) -> bool:
        """Whether it has this content and can be read."""
        self.last_use = next(_ticks)
        own = self._content
        if own is not None:
            return own == content
        may_be = self.num_bytes == len(content) and not self.is_lost
        return may_be and self._digest == hashlib.sha256(content).hexdigest()

    @property
    def is_spilled(self) -> bool:
        """Whether its bytes are only on disk."""
        return self._content is None

    def spill(self, file: SpillFile) -> None:
        """Move the content to `file`; OSError if that is full. Called by the store."""
        content = self._content
        assert content is not None
        self._digest = hashlib.sha256(content).hexdigest()
        self._place = file, file.write(content)
        # This order keeps readers in other threads safe.
        self._content = None

    def _from_disk(self, start: int, stop: int) -> bytes:
        assert self._place is not None
        file, extent = self._place
        try:
            return file.read(extent, start, stop)
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            self.is_lost = True
            raise ContentLost(self.num_bytes, str(error)) from None

    def __del__(self) -> None:
        # May run in any thread, even one that holds the lock: only record the end.
        self._store.ended.append((self.num_bytes, self._place))


class BlobStore:
    """All blobs of the process."""

    def __init__(self) -> None:
        self.ended: deque[tuple[int, Place | None]] = deque()
        """Blobs that were freed but are still counted."""
        self._blobs: WeakValueDictionary[int, Blob] = WeakValueDictionary()
        """By the hash of their content."""
        self._lock = threading.Lock()
        self._held_bytes = 0
        self._spilled_bytes = 0
        self._freed_bytes = 0
        self._max_memory_bytes = sys.maxsize
        self._folder: Path | None = None
        self._file: SpillFile | None = None
        self._free: list[Extent] = []
        """Extents of freed blobs; `spill_over` frees them."""
        self._has_warned = False

    def settle(self, max_memory_bytes: int, folder: Path | None) -> None:
        """Set the memory budget and the folder of the spill file; ConfigError if the folder is not
        writable."""
        self._max_memory_bytes, self._folder = max_memory_bytes, folder
        if folder is not None:
            try:
                SpillFile(folder).close()
            except OSError as error:
                why = f"interception.spill_folder = {folder}: {error.strerror}"
                raise ConfigError(f"{why}; name a folder in which files can be created") from None

    def hold(self, content: bytes) -> Blob:
        """The blob of this content."""
        key = hash(content)
        with self._lock:
            blob = self._blobs.get(key)
            if blob is None:
                blob = self._blobs[key] = self._counted(Blob(content, self))
                return blob
        if blob.is_of(content):
            return blob
        with self._lock:
            other = self._counted(Blob(content, self))
            if blob.is_lost:
                self._blobs[key] = other
            # A second content with the same hash is not shared and never spilled.
            return other

    def spill_over(self) -> int:
        """Bring memory within its budget; return the bytes moved to disk. Call from one thread at a
        time."""
        with self._lock:
            self._settle_ended()
            free, self._free = self._free, []
            excess = self._held_bytes - self._max_memory_bytes
            refs = self._blobs.valuerefs() if excess > 0 else []
        if self._file is not None:
            for extent in free:
                self._file.free(extent)
        num_moved = 0
        for each in _coldest_first(refs):
            if num_moved >= excess:
                break
            blob = each()  # it may have been freed meanwhile
            if blob is not None:
                if not self._move(blob):
                    return num_moved
                num_moved += blob.num_bytes
        # All excess was spilled: warn again at the next failure. A full disk still takes one now
        # and then, as others are freed.
        self._has_warned = self._has_warned and num_moved < excess
        return num_moved

    def held_bytes(self) -> int:
        """Bytes of the blobs in memory."""
        with self._lock:
            self._settle_ended()
            return self._held_bytes

    def spilled_bytes(self) -> int:
        """Bytes of the blobs on disk."""
        with self._lock:
            self._settle_ended()
            return self._spilled_bytes

    def freed_bytes(self) -> int:
        """Bytes of all blobs so far that were freed from memory or spilled; only grows."""
        with self._lock:
            self._settle_ended()
            return self._freed_bytes

    def num_blobs(self) -> int:
        """Number of blobs, in memory and on disk."""
        return len(self._blobs)

    def close(self) -> None:
        """Close the spill file; spilled contents are lost."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._free.clear()
            for blob in list(self._blobs.values()):
                blob.is_lost = blob.is_spilled

    def _move(self, blob: Blob) -> bool:
        """Spill one blob; False if the disk takes no more."""
        try:
            self._file = self._file or SpillFile(self._folder)
            blob.spill(self._file)
        except OSError as error:
            if not self._has_warned:
                remedy = f"they stay in memory; {remedy_of(error)} (interception.spill_folder)"
                log.warning("blobs.not_spilled", error=str(error), remedy=remedy)
            self._has_warned = True
            return False
        with self._lock:
            self._held_bytes -= blob.num_bytes
            self._spilled_bytes += blob.num_bytes
            self._freed_bytes += blob.num_bytes
        return True

    def _counted(self, blob: Blob) -> Blob:
        self._held_bytes += blob.num_bytes
        return blob

    def _settle_ended(self) -> None:
        while self.ended:
            num_bytes, place = self.ended.popleft()
            if place is None:
                self._held_bytes -= num_bytes
                self._freed_bytes += num_bytes
            else:
                self._spilled_bytes -= num_bytes
                file, extent = place
                if file is self._file:
                    self._free.append(extent)


def _coldest_first(refs: Sequence[ref[Blob]]) -> list[ref[Blob]]:
    """Blobs in memory, least recently used first; weak references keep none of them alive."""
    blobs = ((each(), each) for each in refs)
    used = [(blob.last_use, each) for blob, each in blobs if blob and not blob.is_spilled]
    return [each for _, each in sorted(used, key=itemgetter(0))]


store = BlobStore()
atexit.register(store.close)
settle = store.settle
hold = store.hold
spill_over = store.spill_over
held_bytes = store.held_bytes
spilled_bytes = store.spilled_bytes
freed_bytes = store.freed_bytes
num_blobs = store.num_blobs
