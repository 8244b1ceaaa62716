"""A full disk holds up who writes, and loses nothing of it."""

import os
from pathlib import Path

import pytest

from rollmesh.core.errors import UserError
from rollmesh.trainer.books.lasting import open_lasting

FULL = Path("/dev/full")
"""Takes no byte: every write fails for want of room (full(4))."""


def test_what_a_full_disk_refused_is_written_when_there_is_room(tmp_path: Path) -> None:
    with (tmp_path / "room").open("wb") as allocator:
        num_waits = 0

        def makes_room() -> bool:
            nonlocal num_waits
            num_waits += 1
            os.dup2(allocator.fileno(), file.fileno())
            return True

        with open_lasting(FULL, makes_room) as file:
            file.write(b"a row\n")
            file.flush()
            file.write(b"another\n")
    assert (tmp_path / "room").read_bytes() == b"a row\nanother\n"
    assert num_waits == 1


def test_a_wait_that_is_over_is_one_line() -> None:
    file = open_lasting(FULL, lambda: False)
    file.write(b"a row\n")
    for end in (file.flush, file.close):
        with pytest.raises(UserError, match=r"^/dev/full: No space left .*; make room there, then"):
            end()
