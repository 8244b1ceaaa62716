"""Owners that run, are killed, and fork: what is left in shared memory, and which processes still
see it.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import pytest
from numpy.typing import NDArray

from rollmesh.tensors.segment import SHARED_MEMORY, AttachedSegment, sweep
from tests.flow.tensor_owner import range_of

WAIT_S = 60.0


class Owner:
    """A process of tensor_owner.py, which runs until the end of the `with`."""

    def __init__(self, folder: Path) -> None:
        argv = [sys.executable, "-m", "tests.flow.tensor_owner", str(folder)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=WAIT_S)

    def command(self, line: str) -> str:
        """Send a line; return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def seen(self) -> NDArray[np.uint8]:
        """The content that it has stored, read by this process."""
        place = range_of(self.command("put"))
        return AttachedSegment(place.path).view(place.offset, place.num_bytes)

    def kill(self) -> None:
        """Kill it as the system does when it is out of memory."""
        self._process.kill()
        self._process.wait(WAIT_S)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in shared memory, which must be empty at the end."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as name:
        yield Path(name)
        assert [*Path(name).iterdir()] == []


def test_memory_of_a_killed_owner_is_swept_by_the_next_and_its_readers_are_unaffected(
    folder: Path,
) -> None:
    with Owner(folder) as owner:
        seen = owner.seen()
        owner.kill()
    (left,) = folder.iterdir()
    with Owner(folder) as other:
        also_seen = other.seen()
        assert left not in [*folder.iterdir()]
        assert (seen == 7).all()
    assert (also_seen == 7).all()


def test_a_sweep_keeps_the_memory_of_running_owners(folder: Path) -> None:
    with Owner(folder) as owner:
        seen = owner.seen()
        assert sweep(folder) == 0
        assert (owner.seen() == seen).all()
        owner.kill()
        assert sweep(folder) == 1


def test_a_forked_child_neither_uses_nor_removes_its_parents_memory(folder: Path) -> None:
    with Owner(folder) as owner:
        seen = owner.seen()
        assert "is the parent's" in owner.command("fork")
        assert len([*folder.iterdir()]) == 1
        assert (owner.seen() == seen).all()


def test_a_killed_owners_memory_is_swept_even_if_its_child_still_runs(folder: Path) -> None:
    with Owner(folder) as owner:
        seen = owner.seen()
        assert owner.command("linger") == "it lingers"
        assert sweep(folder) == 0
        owner.kill()
        assert sweep(folder) == 1
        assert (seen == 7).all()
