"""Owners that live, are killed, and fork: what is left in shared memory, and who still sees it."""

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
    """A process of tensor_owner.py, until the end of the `with`."""

    def __init__(self, folder: Path) -> None:
        argv = [sys.executable, "-m", "tests.flow.tensor_owner", str(folder)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=WAIT_S)

    def says(self, line: str) -> str:
        """Its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def seen(self) -> NDArray[np.uint8]:
        """What it has put, as it is seen from here."""
        place = range_of(self.says("put"))
        return AttachedSegment(place.path).view(place.offset, place.num_bytes)

    def kill(self) -> None:
        """As the system does when it is out of memory."""
        self._process.kill()
        self._process.wait(WAIT_S)


@pytest.fixture
def folder() -> Iterator[Path]:
    """In shared memory; all of it must be gone at the end."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as name:
        yield Path(name)
        assert [*Path(name).iterdir()] == []


def test_what_a_killed_owner_leaves_goes_when_the_next_starts_and_who_looks_goes_on(
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


def test_a_sweep_leaves_the_living_alone(folder: Path) -> None:
    with Owner(folder) as owner:
        seen = owner.seen()
        assert sweep(folder) == 0
        assert (owner.seen() == seen).all()
        owner.kill()
        assert sweep(folder) == 1


def test_a_forked_child_neither_uses_nor_removes_what_is_its_parents(folder: Path) -> None:
    with Owner(folder) as owner:
        seen = owner.seen()
        assert "is the parent's" in owner.says("fork")
        assert len([*folder.iterdir()]) == 1
        assert (owner.seen() == seen).all()


def test_a_killed_owners_memory_is_swept_also_where_a_child_of_its_lingers(folder: Path) -> None:
    with Owner(folder) as owner:
        seen = owner.seen()
        assert owner.says("linger") == "it lingers"
        assert sweep(folder) == 0
        owner.kill()
        assert sweep(folder) == 1
        assert (seen == 7).all()
