"""Shared memory of a host: a file in /dev/shm that is removed when its owner dies.

    made --locked--> OWNED --close--> gone
                     OWNED --its owner was killed--> ORPHANED --the next sweep--> gone

- The owner holds a flock, which the kernel releases at its death: a sweep removes the files of dead
  owners only. A removed file has no name, and its memory stays until its last user is done.
- A file has its final length from the start, but takes memory only where `back` was called: a full
  /dev/shm is an error there, and never a SIGBUS later.
- Only our own user can open it. A forked child of the owner neither locks nor removes it.
"""

import fcntl
import mmap
import os
import secrets
import weakref
from io import FileIO
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollmesh.core import orphans
from rollmesh.core.orphans import memory_prefix, sweep_memory
from rollmesh.core.process import close_in_children

SHARED_MEMORY = Path(orphans.SHARED_MEMORY)
"""Where Linux keeps files in memory."""
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Segment:
    """A file in shared memory, mapped writable; OSError if `folder` cannot hold it."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        sweep(folder)
        self.path, self._locked = _make(folder)
        self._unlink = weakref.finalize(self, _unlink, self.path, self._locked, os.getpid())
        os.ftruncate(self._locked.fileno(), num_bytes)
        # Opened again: a mapping keeps its file, and so its lock, open in forked children.
        with open(self.path, "r+b", buffering=0) as file:
            self.memory = mmap.mmap(file.fileno(), num_bytes)

    def back(self, start: int, num_bytes: int) -> None:
        """Allocate memory for these bytes; OSError if there is not enough."""
        os.posix_fallocate(self._locked.fileno(), start, num_bytes)

    def close(self) -> None:
        """Remove the name; processes that have it mapped keep the memory."""
        self._unlink()


class AttachedSegment:
    """Another process's segment, mapped read-only; OSError if that fails."""

    def __init__(self, path: str | Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
        try:
            self._memory = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(descriptor)

    def view(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """Return a read-only view, uint8 [num_bytes]; ValueError if the segment is shorter."""
        return np.frombuffer(self._memory, np.uint8, num_bytes, offset)


def sweep(folder: Path) -> int:
    """Remove the files of killed owners; return how many."""
    return sweep_memory(str(folder))


def _make(folder: Path) -> tuple[Path, FileIO]:
    """Create and lock a new file."""
    while True:
        path = folder / f"{memory_prefix()}{secrets.token_hex(8)}"
        file = FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600), "r+")
        close_in_children(file)
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return path, file
        file.close()  # swept before it was locked


def _unlink(path: Path, locked: FileIO, owner_pid: int) -> None:
    locked.close()
    if os.getpid() == owner_pid:
        path.unlink(missing_ok=True)


class SharedRange(msgspec.Struct, frozen=True, gc=False):
    """The place of a shard in a segment, for processes of this host."""

    path: str
    offset: int
    num_bytes: int
