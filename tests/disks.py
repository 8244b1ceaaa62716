"""Disks that are full, or lose what they have, for tests of what lies there."""

import errno
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rollmesh.runtime import blobs


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file of this process may grow past `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def small_disk(monkeypatch: pytest.MonkeyPatch, folder: Path, size: int) -> Iterator[None]:
    """The files in `folder` may hold `size` bytes together, as far as `os.writev` writes them."""
    writev = os.writev

    def takes_what_fits(file: int, parts: Sequence[bytes]) -> int:
        room = size - sum(path.stat().st_size for path in folder.iterdir())
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writev(file, [b"".join(parts)[:room]])

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", takes_what_fits)
        yield


def lose_files(folder: Path, process: int | str = "self") -> None:
    """The disk loses all bytes of the files in `folder` that a process has open, though they have
    no name."""
    descriptors = Path(f"/proc/{process}/fd")
    for name in os.listdir(descriptors):
        with suppress(FileNotFoundError):  # the listing's own
            if str((descriptors / name).readlink()).startswith(str(folder)):
                os.truncate(descriptors / name, 0)


@contextmanager
def no_room_in_memory(folder: Path) -> Iterator[None]:
    """The blobs of this process go to `folder`, once they are asked to spill over."""
    blobs.store.close()  # an earlier test's file
    blobs.settle(0, folder)
    try:
        yield
    finally:
        blobs.settle(sys.maxsize, None)
        blobs.store.close()
