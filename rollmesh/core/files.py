"""Files of a run: the modes that we write with, and reading a file that another process writes.

- A process sets its umask at its start, so that files written by libraries follow it as well;
  processes that launch starts inherit launch's.
- A tail returns whole lines only and reads a bounded amount; a file that was replaced or truncated
  is read again from its start.
"""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

FileMode = Literal["private", "group"]

_UMASKS: dict[FileMode, int] = {"private": 0o077, "group": 0o027}


_restricted: list[int] = []
"""The umasks to restore, one for each open block of `restricted_files`."""


@contextmanager
def restricted_files() -> Iterator[None]:
    """Inside the block, new files and folders are private, or have the mode of `set_file_mode`."""
    _restricted.append(os.umask(_UMASKS["private"]))
    try:
        yield
    finally:
        os.umask(_restricted.pop())


def set_file_mode(mode: FileMode) -> None:
    """Apply `mode` to new files; no effect outside `restricted_files`, as in a child of launch,
    which inherits its umask.
    """
    if _restricted:
        os.umask(_UMASKS[mode])


def make_folder(folder: Path, mode: FileMode) -> None:
    """Create `folder`, or remove permissions of an existing one beyond `mode`; OSError if that
    fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    allowed = 0o777 & ~_UMASKS[mode]
    found = folder.stat().st_mode & 0o777
    if found & ~allowed or (mode == "group" and found != allowed):
        folder.chmod(allowed)


class FileLine(NamedTuple):
    """A whole line without its newline, and its offset in the file."""

    offset: int
    data: bytes


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines, without an incomplete last one; none if it does not
    exist.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [msgspec.json.decode(line) for line in lines]


class FileTail:
    """Returns the lines that a growing file gained since the last call."""

    def __init__(
        self, path: Path, max_read_bytes: int = 2**20, last_bytes: int | None = None
    ) -> None:
        """Start at the file's head, or `last_bytes` before its end."""
        self.path = path
        self.num_restarts = 0
        """How often the file was replaced or truncated."""
        self._max_read_bytes = max_read_bytes
        self._last_bytes = last_bytes
        self._inode = 0
        self._offset = 0
        self._inside_line = False

    def read(self) -> list[FileLine]:
        """Return new whole lines; empty if there are none or the file does not exist yet. A line
        longer than `max_read_bytes` is skipped.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._start_over(file, status)
            file.seek(self._offset)
            block = file.read(self._max_read_bytes)
        return self._cut(block)

    def _start_over(self, file: io.BufferedReader, status: os.stat_result) -> None:
        self.num_restarts += self._inode != 0
        self._inode = status.st_ino
        self._offset, self._inside_line = 0, False
        if self._last_bytes is not None and status.st_size > self._last_bytes:
            self._offset = status.st_size - self._last_bytes
            file.seek(self._offset - 1)
            self._inside_line = file.read(1) != b"\n"

    def _cut(self, block: bytes) -> list[FileLine]:
        lines: list[FileLine] = []
        start = 0
        while (end := block.find(b"\n", start)) >= 0:
            if not self._inside_line:
                lines.append(FileLine(self._offset + start, block[start:end]))
            self._inside_line = False
            start = end + 1
        if self._inside_line or (start == 0 and len(block) == self._max_read_bytes):
            self._inside_line = True
            start = len(block)
        self._offset += start
        return lines
