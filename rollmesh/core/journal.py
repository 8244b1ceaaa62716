"""An append-only journal in segment files: what was acked or promised, so that a restart knows it.

    folder/00000000000000000000.journal    segments, named by the position of their first byte
    segment = magic, then records
    record  = u32 size of the lengths and the frames, u32 number of frames, u32 CRC of those eight
              bytes, u32 CRC of what follows; u32 length of each frame; the frames

All little-endian; the CRC is zlib's (RFC 1952). A position counts bytes over all segments, so it
only grows. Invariants: one process writes; a record is whole or absent: what a crash left torn at
the very end is cut off at open, any other damage is a JournalError that names file and offset and
nothing is skipped in silence. Driven by one thread of its owner, such as the client's.
"""

import contextlib
import fcntl
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollmesh.core.errors import JournalError

Buffer = bytes | bytearray | memoryview

MAGIC = b"RMJ1\n\0\0\0"
_HEAD = struct.Struct("<IIII")
_HEAD_SUM = struct.Struct("<II")
_MAX_FRAMES = 1 << 16
MAX_PARTS = 512
"""Of one write: Linux takes 1,024."""
_SUFFIX = ".journal"


class Journal:
    """The journal in `folder`; the constructor cuts off a torn end and takes the folder's lock."""

    def __init__(self, folder: Path, segment_bytes: int, *, fsync: bool = False) -> None:
        """JournalError if another process has it, or it is damaged at its end."""
        self.folder = folder
        self._segment_bytes = segment_bytes
        self._fsync = fsync
        self._file = -1
        self._is_torn = False
        """Behind the last record stands what a failed write has left."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"{folder}: {error.strerror}") from None
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
        """On disk."""
        return self._end - (self._starts[0] if self._starts else self._end)

    @property
    def end(self) -> int:
        """Where the next record will stand, or just before."""
        return self._end

    def can_drop_before(self, position: int) -> bool:
        """Whether a segment holds only records before `position`."""
        return len(self._starts) > 1 and self._starts[1] <= position

    def append(self, frames: Sequence[Buffer]) -> int:
        """Write one record; its position. JournalError if the disk does not take it.

        It survives the process once this returns, and the machine where `fsync` is set.
        """
        if self._file < 0 or self._end - self._starts[-1] >= self._segment_bytes:
            self._begin_segment()
        position = self._end
        parts, size = _record(frames)
        try:
            if self._is_torn:
                self._cut()
            self._is_torn = True
            _write(self._file, parts, size)
            if self._fsync:
                os.fdatasync(self._file)
        except OSError as error:
            # Now, for what it takes of a full disk; if that fails too, before the next record.
            with contextlib.suppress(OSError):
                self._cut()
            raise JournalError(f"{self._path(self._starts[-1])}: {error.strerror}") from None
        self._is_torn = False
        self._end = position + size
        return position

    def replay(self) -> Iterator[tuple[int, list[bytes]]]:
        """Every record with its position, oldest first; JournalError at damage."""
        for start in list(self._starts):
            with self._naming(start):
                raw = self._path(start).read_bytes()
            offset = len(MAGIC)
            while offset < len(raw):
                frames, size = _parse(raw, offset, self._path(start))
                yield start + offset, frames
                offset += size

    def drop_before(self, position: int) -> None:
        """Remove the segments that hold only records before `position`."""
        while self.can_drop_before(position):
            with self._naming(self._starts[0]):
                self._path(self._starts[0]).unlink(missing_ok=True)
            del self._starts[0]

    def close(self) -> None:
        """Close the files and give up the lock."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        os.close(self._lock)

    def _path(self, start: int) -> Path:
        return self.folder / f"{start:020d}{_SUFFIX}"

    @contextlib.contextmanager
    def _naming(self, start: int) -> Iterator[None]:
        """What the system refuses is a JournalError that names the segment."""
        try:
            yield
        except OSError as error:
            raise JournalError(f"{self._path(start)}: {error.strerror}") from None

    def _cut(self) -> None:
        """Cut off what stands behind the last record."""
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
        """Check the last segment, cut off its torn end and go on writing there."""
        start = self._starts[-1]
        path = self._path(start)
        with self._naming(start):
            raw = path.read_bytes()
            whole = _whole_bytes(raw, path)
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if whole < len(MAGIC):
                os.ftruncate(self._file, 0)
                _write(self._file, [MAGIC], len(MAGIC))
                whole = len(MAGIC)
            self._end = start + whole
            self._cut()

    def _begin_segment(self) -> None:
        with self._naming(self._end):
            # It may be there, without its magic: when it was begun before, the disk was full.
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
        raise JournalError(f"{folder}: {error.strerror}") from None


def _start_of(path: Path) -> int:
    if not path.stem.isdecimal():
        raise JournalError(f"{path}: is no segment of a journal; take it away")
    return int(path.stem)


def _record(frames: Sequence[Buffer]) -> tuple[list[Buffer], int]:
    """The buffers of one record, none copied, and how many bytes they are."""
    flat = [frame if type(frame) is bytes else memoryview(frame).cast("B") for frame in frames]
    sizes = list(map(len, flat))
    lengths = struct.pack(f"<{len(flat)}I", *sizes)
    checksum = zlib.crc32(lengths)
    for frame in flat:
        checksum = zlib.crc32(frame, checksum)
    size = len(lengths) + sum(sizes)
    start = _HEAD_SUM.pack(size, len(flat))
    head = _HEAD.pack(size, len(flat), zlib.crc32(start), checksum)
    return [head, lengths, *flat], _HEAD.size + size


def _parse(raw: bytes, offset: int, path: Path) -> tuple[list[bytes], int]:
    """The frames of the record at `offset` and its whole size; JournalError if it is damaged."""
    end = offset + _HEAD.size
    if end > len(raw):
        raise _damage(path, offset, "is cut off")
    size, num_frames, head_sum, checksum = _HEAD.unpack_from(raw, offset)
    if zlib.crc32(raw[offset : offset + _HEAD_SUM.size]) != head_sum:
        raise _damage(path, offset, "has a damaged header")
    if end + size > len(raw):
        raise _damage(path, offset, "is cut off")
    view = memoryview(raw)[end : end + size]
    if zlib.crc32(view) != checksum or num_frames > _MAX_FRAMES or 4 * num_frames > size:
        raise _damage(path, offset, "has a wrong checksum")
    lengths = struct.unpack_from(f"<{num_frames}I", view)
    frames, at = [], 4 * num_frames
    for length in lengths:
        frames.append(bytes(view[at : at + length]))
        at += length
    return frames, _HEAD.size + size


def _whole_bytes(raw: bytes, path: Path) -> int:
    """How much of a last segment is whole records; JournalError unless the rest is a torn end."""
    if len(raw) < len(MAGIC) and MAGIC.startswith(raw):
        return 0
    if not raw.startswith(MAGIC):
        raise _damage(path, 0, "is not a journal of this format")
    offset = len(MAGIC)
    while offset < len(raw):
        try:
            _, size = _parse(raw, offset, path)
        except JournalError:
            if _is_torn(raw, offset):
                return offset
            raise
        offset += size
    return offset


def _is_torn(raw: bytes, offset: int) -> bool:
    """Whether what stands at `offset` is the last thing that was being written when all ended.

    A process that dies leaves a prefix of its record; a machine that dies may leave zeros or, in
    the last record, pages that never came.
    """
    rest = raw[offset:]
    if len(rest) < _HEAD.size or not any(rest):
        return True
    size, _, head_sum, _ = _HEAD.unpack_from(rest)
    header_is_good = zlib.crc32(rest[: _HEAD_SUM.size]) == head_sum
    return bool(header_is_good and _HEAD.size + size >= len(rest))


def _damage(path: Path, offset: int, what: str) -> JournalError:
    return JournalError(f"{path}: the record at offset {offset} {what}")


def _write(file: int, parts: list[Buffer], size: int) -> None:
    """All of `parts`, whatever the kernel takes at a time; mostly it takes all at once."""
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
