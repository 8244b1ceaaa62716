"""An append-only journal in segment files, which records what was acknowledged or promised.

    folder/00000000000000000000.journal    segments, named by the position of their first byte
    segment = magic, then records
    record  = u32 size of the lengths and the frames, u32 number of frames, u32 CRC of those eight
              bytes, u32 CRC of what follows; u32 length of each frame; the frames

- All little-endian; the CRC is zlib's (RFC 1952). A position counts bytes over all segments.
- One process writes, on one thread; `read` is thread-safe.
- A record is whole or absent: a torn end is cut off at open; any other damage is a JournalError
  that names file and offset, and nothing is skipped silently.
- Reading holds one record in memory.
"""

import bisect
import contextlib
import fcntl
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rollmesh.core.errors import JournalDamaged, JournalError

Buffer = bytes | bytearray | memoryview

MAGIC = b"RMJ1\n\0\0\0"
_HEAD = struct.Struct("<IIII")
_HEAD_SUM = struct.Struct("<II")
_MAX_FRAMES = 1 << 16
MAX_PARTS = 512
"""Limit per write; Linux accepts 1,024."""
SMALL_BYTES = 64 * 1024
"""A smaller record is copied into one buffer, which is cheaper than passing its parts."""
BLOCK_BYTES = 2**20
"""Bytes of a torn end that are examined at a time."""
_SUFFIX = ".journal"


class Journal:
    """The journal in `folder`; the constructor cuts off a torn end and takes the folder's lock."""

    def __init__(self, folder: Path, segment_bytes: int, *, fsync: bool = False) -> None:
        """JournalError if another process has the lock, or the end is damaged."""
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._fsync = fsync
        self._file = -1
        self._is_torn = False
        """Whether a failed write left bytes after the last record."""
        self.torn_bytes = 0
        """Bytes that were cut off the end at open."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError.at(folder, error) from None
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._take_lock()
            self._starts = sorted(map(_start_of, _segments(folder)))
            self._end = self._starts[0] if self._starts else 0
            if self._starts:
                self._reopen()
            undo.pop_all()

    @property
    def size_bytes(self) -> int:
        """Bytes on disk."""
        return self._end - (self._starts[0] if self._starts else self._end)

    @property
    def end(self) -> int:
        """The position of the next record, or just before it."""
        return self._end

    @property
    def segments(self) -> Sequence[int]:
        """Start positions of the segments, oldest first; the newest is being written."""
        return self._starts

    def can_drop_before(self, position: int) -> bool:
        """Return whether a segment holds only records before `position`."""
        return len(self._starts) > 1 and self._starts[1] <= position

    def append(self, frames: Sequence[Buffer]) -> int:
        """Write one record and return its position. JournalError if the disk does not take it.

        Once this returns, the record survives the process, and with `fsync` the machine.
        """
        return self.append_all([frames])[0]

    def append_all(self, records: Iterable[Sequence[Buffer]]) -> list[int]:
        """Write these records at once; see `append`. If the disk refuses, none of them is kept.

        A process that is killed meanwhile may leave the first of them and one torn record. A
        machine that crashes may leave any of them torn, and only the last may be: with `fsync`,
        append one by one.
        """
        if self._file < 0 or self._end - self._starts[-1] >= self._segment_bytes:
            self._begin_segment()
        parts: list[Buffer] = []
        positions: list[int] = []
        end = self._end
        for frames in records:
            positions.append(end)
            record, size = _record(frames)
            parts += record
            end += size
        try:
            if self._is_torn:
                self._cut()
            self._is_torn = True
            _write(self._file, parts, end - self._end)
            if self._fsync:
                os.fdatasync(self._file)
        except OSError as error:
            # Now, to free space on a full disk; if that fails too, before the next record.
            with contextlib.suppress(OSError):
                self._cut()
            raise JournalError.at(self._path(self._starts[-1]), error) from None
        self._is_torn = False
        self._end = end
        return positions

    def replay(self) -> Iterator[tuple[int, list[bytes]]]:
        """Yield every record with its position, oldest first; JournalError at damage."""
        for start in list(self._starts):
            yield from self._records(start)

    def oldest(self) -> Iterator[list[bytes]]:
        """Yield the records of the oldest segment, if it is closed; `drop_oldest` then removes
        it.
        """
        if len(self._starts) > 1:
            for _, frames in self._records(self._starts[0]):
                yield frames

    def drop_oldest(self) -> None:
        """Remove the oldest segment, if it is closed."""
        if len(self._starts) > 1:
            self.drop_before(self._starts[1])

    def read(self, position: int) -> list[bytes]:
        """Return the record that `append` wrote at `position`; JournalError if it was removed.

        Thread-safe.
        """
        starts = list(self._starts)
        at = bisect.bisect_right(starts, position)
        if not at:
            raise JournalError(f"{self.folder}: of position {position} nothing is left")
        start = starts[at - 1]
        with self._naming(start), self._path(start).open("rb", buffering=0) as file:
            return _JournalSegment(file.fileno(), self._path(start)).parse(position - start)[0]

    def drop_before(self, position: int) -> None:
        """Remove the segments that hold only records before `position`."""
        while self.can_drop_before(position):
            with self._naming(self._starts[0]):
                self._path(self._starts[0]).unlink(missing_ok=True)
            del self._starts[0]

    def close(self) -> None:
        """Close the files and give up the lock. Idempotent."""
        for closed in (self._file, self._lock):
            if closed >= 0:
                os.close(closed)
        self._file = self._lock = -1

    def _records(self, start: int) -> Iterator[tuple[int, list[bytes]]]:
        with self._naming(start), self._path(start).open("rb", buffering=0) as file:
            segment = _JournalSegment(file.fileno(), self._path(start))
            offset = len(MAGIC)
            while offset < segment.size_bytes:
                frames, size = segment.parse(offset)
                yield start + offset, frames
                offset += size

    def _path(self, start: int) -> Path:
        return self.folder / f"{start:020d}{_SUFFIX}"

    @contextlib.contextmanager
    def _naming(self, start: int) -> Iterator[None]:
        """Raise OSError as a JournalError that names the segment."""
        try:
            yield
        except OSError as error:
            raise JournalError.at(self._path(start), error) from None

    def _cut(self) -> None:
        """Cut off the bytes after the last record."""
        os.ftruncate(self._file, self._end - self._starts[-1])
        os.lseek(self._file, 0, os.SEEK_END)
        self._is_torn = False

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalError(f"{self.folder}: another process writes this journal") from None
        except OSError as error:
            raise JournalError(f"{self.folder}: cannot be locked: {error.strerror}") from None

    def _reopen(self) -> None:
        """Check the last segment, cut off its torn end and continue writing to it."""
        start = self._starts[-1]
        path = self._path(start)
        with self._naming(start):
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            segment = _JournalSegment(self._file, path)
            whole = segment.whole_bytes()
            self.torn_bytes = segment.size_bytes - whole
            if whole < len(MAGIC):
                os.ftruncate(self._file, 0)
                _write(self._file, [MAGIC], len(MAGIC))
                whole = len(MAGIC)
            self._end = start + whole
            self._cut()

    def _begin_segment(self) -> None:
        with self._naming(self._end):
            # The segment may exist without its magic, if the disk was full when it was begun.
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            file = os.open(self._path(self._end), flags, 0o600)
            try:
                _write(file, [MAGIC], len(MAGIC))
                if self._fsync:
                    _sync_folder(self.folder)
            except OSError:
                os.close(file)
                raise
        if self._file >= 0:
            os.close(self._file)
        self._file = file
        self._starts.append(self._end)
        self._end += len(MAGIC)


def _segments(folder: Path) -> list[Path]:
    try:
        return list(folder.glob(f"*{_SUFFIX}"))
    except OSError as error:
        raise JournalError.at(folder, error) from None


def _start_of(path: Path) -> int:
    if not path.stem.isdecimal():
        raise JournalError(f"{path}: is no segment of a journal; take it away")
    return int(path.stem)


def _record(frames: Sequence[Buffer]) -> tuple[list[Buffer], int]:
    """Return the buffers of one record, none copied unless all are small, and their size."""
    flat = [frame if type(frame) is bytes else memoryview(frame).cast("B") for frame in frames]
    sizes = list(map(len, flat))
    parts: list[Buffer] = [struct.pack(f"<{len(flat)}I", *sizes), *flat]
    size = 4 * len(flat) + sum(sizes)
    is_small = size <= SMALL_BYTES
    if is_small:
        parts = [b"".join(parts)]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    start = _HEAD_SUM.pack(size, len(flat))
    head = _HEAD.pack(size, len(flat), zlib.crc32(start), checksum)
    return [head + parts[0]] if is_small else [head, *parts], _HEAD.size + size


class _JournalSegment:
    """One file of a journal, read record by record."""

    def __init__(self, file: int, path: Path) -> None:
        self.size_bytes = os.fstat(file).st_size
        self._file = file
        self._path = path

    def parse(self, offset: int) -> tuple[list[bytes], int]:
        """Return the record at `offset`, its frames and whole size; JournalError if it is
        damaged.
        """
        start = offset + _HEAD.size
        if start > self.size_bytes:
            raise _damage(self._path, offset, "is cut off")
        head = self._read(offset, _HEAD.size)
        size, num_frames, head_sum, checksum = _HEAD.unpack(head)
        if zlib.crc32(head[: _HEAD_SUM.size]) != head_sum:
            raise _damage(self._path, offset, "has a damaged header")
        if start + size > self.size_bytes:
            raise _damage(self._path, offset, "is cut off")
        frames = self._frames(start, size, num_frames, checksum)
        if frames is None:
            raise _damage(self._path, offset, "has a wrong checksum")
        return frames, _HEAD.size + size

    def whole_bytes(self) -> int:
        """Return the size of a last segment's whole records; JournalError unless the rest is
        torn.
        """
        magic = self._read(0, len(MAGIC))
        if len(magic) < len(MAGIC) and MAGIC.startswith(magic):
            return 0
        if magic != MAGIC:
            raise _damage(self._path, 0, "is not a journal of this format")
        offset = len(MAGIC)
        while offset < self.size_bytes:
            try:
                _, size = self.parse(offset)
            except JournalError:
                if self._is_torn(offset):
                    return offset
                raise
            offset += size
        return offset

    def _frames(self, at: int, size: int, num_frames: int, checksum: int) -> list[bytes] | None:
        """Return what follows a header; None if its checksum is wrong."""
        if num_frames > _MAX_FRAMES or 4 * num_frames > size:
            return None
        packed = self._read(at, 4 * num_frames)
        lengths = struct.unpack(f"<{num_frames}I", packed)
        if len(packed) + sum(lengths) != size:
            return None
        at, found = at + len(packed), zlib.crc32(packed)
        frames = []
        for length in lengths:
            frame = self._read(at, length)
            frames.append(frame)
            at, found = at + length, zlib.crc32(frame, found)
        return frames if found == checksum else None

    def _is_torn(self, offset: int) -> bool:
        """Return whether the bytes at `offset` are the last that were written.

        A process that dies leaves a prefix of its record; a machine that crashes may leave zeros
        or, in the last record, pages that were never written.
        """
        num_left = self.size_bytes - offset
        if num_left < _HEAD.size or self._is_blank(offset):
            return True
        head = self._read(offset, _HEAD.size)
        size, _, head_sum, _ = _HEAD.unpack(head)
        header_is_good = zlib.crc32(head[: _HEAD_SUM.size]) == head_sum
        return bool(header_is_good and _HEAD.size + size >= num_left)

    def _is_blank(self, offset: int) -> bool:
        """Return whether only zeros follow."""
        blocks = range(offset, self.size_bytes, BLOCK_BYTES)
        return not any(any(self._read(at, BLOCK_BYTES)) for at in blocks)

    def _read(self, offset: int, num_bytes: int) -> bytes:
        """Read this many bytes, or up to the end."""
        found = os.pread(self._file, num_bytes, offset)
        # The kernel reads at most 2 GiB at a time.
        while num_left := num_bytes - len(found):
            more = os.pread(self._file, num_left, offset + len(found))
            if not more:
                break
            found += more
        return found


def _damage(path: Path, offset: int, what: str) -> JournalDamaged:
    return JournalDamaged(f"{path}: the record at offset {offset} {what}")


def _write(file: int, parts: list[Buffer], size: int) -> None:
    """Write all of `parts`, whatever the kernel takes at a time; mostly it takes all at once."""
    num_bytes = os.writev(file, parts[:MAX_PARTS])
    if num_bytes == size:
        return
    views = [memoryview(part) for part in parts if len(part)]
    while True:
        while views and num_bytes >= len(views[0]):
            num_bytes -= len(views.pop(0))
        if not views:
            return
        views[0] = views[0][num_bytes:]
        num_bytes = os.writev(file, views[:MAX_PARTS])


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable."""
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
