"""Scratch folders of rollouts, and reading their files without following links out of them.

    rollmesh-rollout-x1y2/  home/  work/  lock       held while the rollout and its worker run

- A scratch folder is readable by our user only, below TMPDIR, and removed whatever its program did
  to permissions; `sweep` removes those of killed workers.
- Files are opened below the folder without symbolic links, by openat2(2) or part by part with
  O_NOFOLLOW.
- Only regular files of at most `max_bytes` are read: a FIFO or a device never blocks the reader.
"""

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from rollmesh.core.errors import InfraError
from rollmesh.core.logs import get_logger

log = get_logger()

PREFIX = "rollmesh-"
"""Begins the names of rollmesh's temporary folders; those whose lock is free are swept."""
ROLLOUT_PREFIX = f"{PREFIX}rollout-"
"""Begins the names of scratch folders; empty ones are swept too, as their creators expect."""
LOCK = "lock"


class ScratchFolders(msgspec.Struct, frozen=True):
    """Two empty folders."""

    home: Path
    """The program's HOME: configuration and caches."""
    work: Path
    """The program's working directory, with the task's files."""


@contextlib.asynccontextmanager
async def new_scratch() -> AsyncIterator[ScratchFolders]:
    """Provide a scratch folder while the block runs; InfraError if it cannot be created."""
    making = asyncio.create_task(asyncio.to_thread(_make))
    try:
        try:
            scratch, _ = await asyncio.shield(making)
        except OSError as error:
            where = tempfile.gettempdir()
            raise InfraError(f"{where}: no scratch folder: {error.strerror}") from None
        yield scratch
    finally:
        await asyncio.shield(asyncio.create_task(_unmake(making)))


async def _unmake(making: asyncio.Task[tuple[ScratchFolders, int]]) -> None:
    """Remove the folder, also one that was being created when its rollout was cancelled."""
    with contextlib.suppress(OSError):
        scratch, lock = await making
        try:
            await asyncio.to_thread(_empty_and_remove, scratch.home.parent)
        finally:
            os.close(lock)


def sweep() -> int:
    """Remove our user's scratch folders whose workers have ended; return how many there were.

    Symbolic links and folders of other users are skipped.
    """
    num_removed = 0
    for root in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        lock = _lock_of_ours(root)
        if lock is not None:
            _empty_and_remove(root)
            os.close(lock)
            num_removed += 1
    return num_removed


def _lock_of_ours(root: Path) -> int | None:
    """Take the lock of `root`, if it is a folder of our user and no worker holds the lock.

    An empty scratch folder is removed here: its worker was killed just before or just after the
    lock file was there. A worker that lives creates another one (`_make`).
    """
    try:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            return None
        if root.name.startswith(ROLLOUT_PREFIX):
            with contextlib.suppress(OSError):
                root.rmdir()
        return _lock(LOCK, os.O_RDWR, folder)
    except OSError:
        return None
    finally:
        os.close(folder)


def _make() -> tuple[ScratchFolders, int]:
    """Create the folders; return them and the descriptor that holds their lock."""
    while True:
        root = Path(tempfile.mkdtemp(prefix=ROLLOUT_PREFIX))
        try:
            lock = _lock(root / LOCK, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            continue  # another worker's sweep has removed the folder
        except OSError:
            remove(root)
            raise
        if lock is not None:  # else a sweep is removing the folder
            return _fill(root, lock)


def _fill(root: Path, lock: int) -> tuple[ScratchFolders, int]:
    scratch = ScratchFolders(root / "home", root / "work")
    try:
        scratch.home.mkdir()
        scratch.work.mkdir()
    except OSError:
        remove(root)
        os.close(lock)
        raise
    return scratch, lock


def _empty_and_remove(root: Path) -> None:
    """Remove a scratch folder, its lock file last: if we are killed, `sweep` still finds it."""
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            if path.name != LOCK:
                remove(path)
    remove(root)


def _lock(path: str | Path, flags: int, folder: int | None = None) -> int | None:
    """Return a descriptor that holds the file's lock; None if another process holds it, or has
    removed the file."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, stat.S_IRUSR | stat.S_IWUSR, dir_fd=folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None


def remove(folder: Path) -> None:
    """Remove a folder with its content; what cannot be removed is logged, and left."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        with contextlib.suppress(RecursionError, OSError):
            _unlock(folder)
        # Folders may be nested deeper than Python descends.
        with contextlib.suppress(OSError):
            subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)
    if folder.exists():
        log.warning("scratch.left", folder=str(folder))


def _unlock(folder: Path) -> None:
    """Restore permissions that a program removed from its folders, from the outermost on."""
    folder.chmod(stat.S_IRWXU)
    for inside, names, _ in os.walk(folder):
        for name in names:
            path = os.path.join(inside, name)
            if not os.path.islink(path):
                os.chmod(path, stat.S_IRWXU)


MAX_BYTES = 2**20
"""Default limit for reading one file: 1 MiB."""

_OPENAT2 = 437
"""Number of the system call, the same on each architecture that Python runs on."""
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_BENEATH = 0x02, 0x04, 0x08
_RESOLVE = _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_SYMLINKS | _RESOLVE_BENEATH
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
_UNSUPPORTED = (errno.ENOSYS, errno.EPERM, errno.EINVAL)
"""An older kernel, or a container whose seccomp filter does not know the call."""


class _OpenHow(ctypes.Structure):
    """struct open_how of openat2(2)."""

    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


def read_bytes(folder: Path, name: str, max_bytes: int = MAX_BYTES) -> bytes:
    """Read the regular file `name` below `folder`.

    Raise OSError if there is none: FileNotFoundError, or ELOOP or EXDEV for a path that leaves the
    folder or crosses a symbolic link, EINVAL for a FIFO, a device or a folder, EFBIG for a file of
    more than `max_bytes`.
    """
    root = os.open(folder, _FOLDER)
    try:
        descriptor = open_beneath(root, name)
    finally:
        os.close(root)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", name)
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise OSError(errno.EFBIG, f"longer than {max_bytes} bytes", name)
    return raw


def read_text(folder: Path, name: str, max_bytes: int = MAX_BYTES) -> str:
    """Read a file like `read_bytes`, as UTF-8 text; invalid bytes are replaced."""
    return read_bytes(folder, name, max_bytes).decode("utf-8", "replace")


def open_beneath(root: int, name: str) -> int:
    """Open `name` below the folder `root` for reading, without symbolic links; OSError."""
    try:
        return _openat2(root, name)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    return open_by_parts(root, name)


def open_by_parts(root: int, name: str) -> int:
    """Open a file without following links, on a kernel without openat2."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or not parts:
        raise OSError(errno.EXDEV, "not a path below the folder", name)
    folder = os.dup(root)
    try:
        for part in parts[:-1]:
            inner = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(parts[-1], _FILE, dir_fd=folder)
    finally:
        os.close(folder)


def _openat2(root: int, name: str) -> int:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    how = _OpenHow(_FILE, 0, _RESOLVE)
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    path = ctypes.c_char_p(os.fsencode(name))
    while True:
        size = ctypes.c_size_t(ctypes.sizeof(how))
        found: int = call(ctypes.c_long(_OPENAT2), root, path, ctypes.byref(how), size)
        if found >= 0:
            return found
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):  # a concurrent rename
            raise OSError(number, os.strerror(number), name)
