"""Modes of the files and folders that rollmesh writes.

- A process sets its umask at its start, so that files written by libraries follow it as well.
- Processes that launch starts inherit launch's umask.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

FileMode = Literal["private", "group"]

_UMASKS: dict[FileMode, int] = {"private": 0o077, "group": 0o027}


_restricted: list[int] = []
"""The umasks to return to, one for each open block of `restricted_files`."""


@contextmanager
def restricted_files() -> Iterator[None]:
    """Inside the block, new files and folders are their owner's alone, or as `use` says."""
    _restricted.append(os.umask(_UMASKS["private"]))
    try:
        yield
    finally:
        os.umask(_restricted.pop())


def use(mode: FileMode) -> None:
    """Apply `mode` to new files; no effect outside `restricted_files`, as in a process of launch,
    which inherited its umask."""
    if _restricted:
        os.umask(_UMASKS[mode])


def make_folder(folder: Path, mode: FileMode) -> None:
    """Make `folder`, or take away what an existing one allows beyond `mode`.

    Raise OSError if that fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    allowed = 0o777 & ~_UMASKS[mode]
    found = folder.stat().st_mode & 0o777
    if found & ~allowed or (mode == "group" and found != allowed):
        folder.chmod(allowed)
