"""Disks that are full or lose data, for tests of the code that writes there."""

import errno
import os
import resource
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rollmesh.runtime import blobs


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Limit every file of this process to `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def small_disk(
    monkeypatch: pytest.MonkeyPatch, folder: Path, size: int, code: int = errno.ENOSPC
) -> Iterator[None]:
    """Limit the files in `folder` to `size` bytes together, as far as `os.writev` writes them;
    beyond that it fails with `code`.
    """
    writev = os.writev

    def takes_what_fits(file: int, parts: Sequence[bytes]) -> int:
        room = size - sum(path.stat().st_size for path in folder.iterdir())
        if room <= 0:
            raise OSError(code, os.strerror(code))
        return writev(file, [b"".join(parts)[:room]])

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", takes_what_fits)
        yield


@contextmanager
def no_more_bytes(path: Path) -> Iterator[None]:
    """Let the disk accept no more bytes of a file that this process has open (full(4))."""
    [number] = descriptors_in(path)
    own, full = os.dup(number), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, number)
    try:
        yield
    finally:
        os.dup2(own, number)
        os.close(own)
        os.close(full)


@contextmanager
def no_new_folders(monkeypatch: pytest.MonkeyPatch, within: Path) -> Iterator[threading.Event]:
    """Let the disk of `within` refuse new folders; the event is set once it has refused one."""
    mkdir, has_refused = os.mkdir, threading.Event()

    def refuses(path: Path, *more: int) -> None:
        if Path(path).is_relative_to(within):
            has_refused.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        mkdir(path, *more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refuses)
        yield has_refused


def lose_files(folder: Path, process: int | str = "self") -> None:
    """Remove all bytes of the files in `folder` that a process has open, even if they have no
    name.
    """
    for number in descriptors_in(folder, process):
        with suppress(FileNotFoundError):  # closed by now
            os.truncate(f"/proc/{process}/fd/{number}", 0)


def descriptors_in(path: Path, process: int | str = "self") -> list[int]:
    """Descriptors of this file, or of files in this folder, even if they have no name."""
    found, folder = [], Path(f"/proc/{process}/fd")
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):  # the descriptor of the listing
            if str((folder / name).readlink()).startswith(str(path)):
                found.append(int(name))
    return found


@contextmanager
def no_room_in_memory(folder: Path) -> Iterator[None]:
    """Make this process spill its blobs to `folder` when they are asked to."""
    blobs.store.close()  # an earlier test's file
    blobs.settle(0, folder)
    try:
        yield
    finally:
        blobs.settle(sys.maxsize, None)
        blobs.store.close()
