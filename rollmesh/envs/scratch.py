"""The scratch folder of one rollout: a home and a working directory, gone when it ends.

Invariant: readable by our user alone, below the system's temporary folder (TMPDIR), and removed
whatever its program did to permissions. Driven by harness.py.
"""

import asyncio
import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.core.errors import InfraError
from rollmesh.core.logs import get_logger

log = get_logger()


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
        scratch = await asyncio.to_thread(_make)
    except OSError as error:
        raise InfraError(f"{tempfile.gettempdir()}: no scratch folder: {error.strerror}") from None
    try:
        yield scratch
    finally:
        await asyncio.shield(asyncio.to_thread(remove, scratch.home.parent))


def _make() -> Scratch:
    root = Path(tempfile.mkdtemp(prefix="rollmesh-"))
    scratch = Scratch(root / "home", root / "work")
    for folder in (scratch.home, scratch.work):
        folder.mkdir()
    return scratch


def remove(folder: Path) -> None:
    """The folder with all that is in it; what cannot be removed is logged, and left."""
    shutil.rmtree(folder, onerror=_unlock)
    if folder.exists():
        log.warning("scratch.left", folder=str(folder))


def _unlock(function: Callable[..., Any], path: str, fault: object) -> None:
    """Take back the permissions that a program removed, and try once more."""
    del fault
    for each in (os.path.dirname(path), path):
        with contextlib.suppress(OSError):
            os.chmod(each, stat.S_IRWXU)
    try:
        if function is os.unlink or not os.path.isdir(path):
            os.unlink(path)
        else:
            shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        log.warning("scratch.not_removed", path=path, error=str(error))
