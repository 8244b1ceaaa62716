"""A spill file gives back what it was given, reuses what is free, and leaves nothing behind."""

import os
import random
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from rollmesh.runtime.blobs import PAGE_BYTES, Extent, FreeExtents, SpillFile
from tests.disks import full_disk


@pytest.mark.parametrize("seed", range(5))
def test_no_two_owners_share_a_page_and_the_file_ends_with_its_last_extent(seed: int) -> None:
    chance, space, taken = random.Random(seed), FreeExtents(), list[Extent]()
    for _ in range(1000):
        if chance.random() < 0.5 or not taken:
            taken.append(space.take(chance.randrange(1, 5 * PAGE_BYTES)))
        else:
            space.give(taken.pop(chance.randrange(len(taken))))
        runs = sorted((each.start, each.stop) for each in taken)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(runs))
        assert space.end == max([stop for _, stop in runs], default=0)
    for each in taken:
        space.give(each)
    assert (space.end, space.take(1).start) == (0, 0)


def test_what_is_free_is_used_again_before_the_file_grows() -> None:
    space = FreeExtents()
    small, _, large, _ = [space.take(n * PAGE_BYTES) for n in (1, 1, 3, 1)]
    space.give(large)
    space.give(small)
    end = space.end
    assert space.take(PAGE_BYTES).start == small.start
    assert space.take(2 * PAGE_BYTES + 1).start == large.start
    assert space.end == end


def test_parts_are_read_and_the_file_shrinks_with_what_it_holds(tmp_path: Path) -> None:
    file = SpillFile(tmp_path)
    one, two = file.write(b"a" * 10_000), file.write(b"bcd")
    assert file.read(one, 0, 1 << 40) == b"a" * 10_000
    assert (file.read(two, 1, 3), file.read(two, 2, 99), file.read(two, 3, 3)) == (b"cd", b"d", b"")
    assert file.num_bytes == 4 * PAGE_BYTES
    file.free(two)
    assert file.num_bytes == 3 * PAGE_BYTES
    file.free(one)
    assert file.num_bytes == 0
    file.close()


def test_a_full_disk_takes_nothing_and_loses_nothing(tmp_path: Path) -> None:
    file = SpillFile(tmp_path)
    held = file.write(b"a" * PAGE_BYTES)
    with full_disk(2 * PAGE_BYTES), pytest.raises(OSError, match="File too large"):
        file.write(b"b" * 3 * PAGE_BYTES)
    assert file.num_bytes == PAGE_BYTES
    assert file.read(held, 0, PAGE_BYTES) == b"a" * PAGE_BYTES
    assert file.read(file.write(b"c"), 0, 1) == b"c"
    file.close()


def test_bytes_that_the_disk_has_lost_are_an_error_not_silence(tmp_path: Path) -> None:
    file = SpillFile(tmp_path)
    held = file.write(b"a" * 10)
    os.ftruncate(file.fileno(), 5)
    with pytest.raises(OSError, match="shorter"):
        file.read(held, 0, 10)
    file.close()


KILLED = """
import sys
from itertools import pairwise
from pathlib import Path
from rollmesh.runtime.blobs import SpillFile
folder = Path(sys.argv[1])
file = SpillFile(folder)
file.write(b"a" * 1000)
print(len(list(folder.iterdir())), flush=True)
sys.stdin.read()
"""


def test_nothing_is_seen_of_it_nor_left_when_its_process_is_killed(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"0\n"
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
