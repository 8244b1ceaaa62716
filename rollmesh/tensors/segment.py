"""Memory that all processes of a host can look at: a file in /dev/shm that dies with its owner.

    made --locked--> OWNED --close--> gone
                     OWNED --its owner was killed--> ORPHANED --the next sweep--> gone

Owns the file's life. Invariants: its owner holds a flock on it, which the kernel drops however that
one ends, so that a sweep takes the files of the dead and none of the living; what is gone has no
name any more, and its memory lasts as long as somebody looks at it; a file is as long as it will
ever be, and takes memory only where `back` was called, so that a full /dev/shm is an error there
and never a SIGBUS later. Only our own user can open it. A process that was forked from the owner
has no part in it: it neither locks nor removes it. Driven by arena.py, and by connection.py on the
consumer's side.
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
    """See the module. OSError where `folder` takes no such file."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        sweep(folder)
        self.path, self._locked = _make(folder)
        self._unlink = weakref.finalize(self, _unlink, self.path, self._locked, os.getpid())
        os.ftruncate(self._locked.fileno(), num_bytes)
        # Opened once more: a mapping keeps its file open in forked children too, lock and all.
        with open(self.path, "r+b", buffering=0) as file:
            self.memory = mmap.mmap(file.fileno(), num_bytes)

    def back(self, start: int, num_bytes: int) -> None:
        """Put memory under these bytes; OSError where there is not enough of it."""
        os.posix_fallocate(self._locked.fileno(), start, num_bytes)

    def close(self) -> None:
        """Take its name away; who looks at it goes on."""
        self._unlink()


class AttachedSegment:
    """Another process's segment, as one who may only look; OSError where it cannot be seen."""

    def __init__(self, path: str | Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
        try:
            self._memory = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(descriptor)

    def view(self, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        """uint8 [num_bytes], read-only, over its memory; ValueError where it is not that long."""
        return np.frombuffer(self._memory, np.uint8, num_bytes, offset)


def sweep(folder: Path) -> int:
    """Remove the files of owners that were killed; how many there were."""
    return sweep_memory(str(folder))


def _make(folder: Path) -> tuple[Path, FileIO]:
    """A new file, locked."""
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
    """Where a shard lies, for a process of this host that attaches to it."""

    path: str
    offset: int
    num_bytes: int
