"""The scratch folder of one rollout: a home and a working directory, gone when it ends.

    rollmesh-x1y2/  home/  work/  lock       held while the rollout runs and its worker lives

Invariants: readable by our user alone, below the system's temporary folder (TMPDIR), and removed
whatever its program did to permissions; `sweep` removes those of workers that were killed. Driven
by harness.py.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from rollmesh.core.errors import InfraError
from rollmesh.core.logs import get_logger

log = get_logger()

PREFIX = "rollmesh-"
LOCK = "lock"


class Scratch(msgspec.Struct, frozen=True):
    """Two empty folders."""

    home: Path
    """HOME of the program: its configuration and its caches."""
    work: Path
    """Where it starts: the files of the task."""


@contextlib.asynccontextmanager
async def new_scratch() -> AsyncIterator[Scratch]:
    """A scratch folder while the block runs; InfraError where there is no room for one."""
    try:
        scratch, lock = await asyncio.to_thread(_make)
    except OSError as error:
        raise InfraError(f"{tempfile.gettempdir()}: no scratch folder: {error.strerror}") from None
    try:
        yield scratch
    finally:
        await asyncio.shield(asyncio.to_thread(_unmake, scratch, lock))


def sweep() -> int:
    """Remove our user's scratch folders whose workers are gone; how many there were.

    Symbolic links and folders of other users are skipped.
    """
    num_removed = 0
    for root in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        lock = _lock_of_ours(root)
        if lock is not None:
            remove(root)
            os.close(lock)
            num_removed += 1
    return num_removed


def _lock_of_ours(root: Path) -> int | None:
    """The lock of `root`, if that is a folder of our user and no worker holds its lock."""
    try:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            return None
        return _lock(LOCK, folder)
    finally:
        os.close(folder)


def _make() -> tuple[Scratch, int]:
    """The folders, and the descriptor that holds their lock."""
    root = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        return _furnish(root)
    except OSError:
        remove(root)
        raise


def _furnish(root: Path) -> tuple[Scratch, int]:
    # Held before it has its name: nobody finds a lock that is not held.
    unnamed = root / f"{LOCK}.new"
    unnamed.touch()
    lock = _lock(unnamed)
    assert lock is not None
    unnamed.rename(root / LOCK)
    scratch = Scratch(root / "home", root / "work")
    for folder in (scratch.home, scratch.work):
        folder.mkdir()
    return scratch, lock


def _unmake(scratch: Scratch, lock: int) -> None:
    try:
        remove(scratch.home.parent)
    finally:
        os.close(lock)


def _lock(path: str | Path, folder: int | None = None) -> int | None:
    """A descriptor that holds the file's lock; None where another process holds it, or there is no
    file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def remove(folder: Path) -> None:
    """The folder with all that is in it; what cannot be removed is logged, and left."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        with contextlib.suppress(RecursionError, OSError):
            _unlock(folder)
        # Folders may stand deeper in each other than Python descends.
        with contextlib.suppress(OSError):
            subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)
    if folder.exists():
        log.warning("scratch.left", folder=str(folder))


def _unlock(folder: Path) -> None:
    """Take back the permissions that a program took from its folders, from the outermost on."""
    folder.chmod(stat.S_IRWXU)
    for inside, names, _ in os.walk(folder):
        for name in names:
            path = os.path.join(inside, name)
            if not os.path.islink(path):
                os.chmod(path, stat.S_IRWXU)
