"""Free space is taken once, merged when freed, and found among any number of gaps."""

import random
from itertools import accumulate

import pytest

from rollmesh.core.free_space import FreeSpace, Run

MANY = 20_000


@pytest.fixture
def space() -> FreeSpace:
    return FreeSpace(1 << 40)


def taken(space: FreeSpace, sizes: list[int]) -> list[Run]:
    """The offset of each of `sizes`."""
    marks = list(accumulate(sizes))
    pieces = space.take(marks)
    assert pieces is not None
    runs: list[Run] = []
    for start, number in pieces:
        for size in sizes[len(runs) : len(runs) + number]:
            runs.append((start, start + size))
            start += size
    assert len(runs) == len(sizes)
    return runs


def give(space: FreeSpace, runs: list[Run]) -> None:
    for run in runs:
        space.give(*run)


def test_parts_taken_together_are_adjacent(space: FreeSpace) -> None:
    assert taken(space, [10, 0, 30]) == [(0, 10), (10, 10), (10, 40)]
    assert taken(space, [5]) == [(40, 45)]
    assert space.end == 45


def test_a_freed_run_joins_its_neighbours(space: FreeSpace) -> None:
    a, b, c, last = taken(space, [10, 20, 30, 1])
    give(space, [a, c, b])
    assert taken(space, [60]) == [(0, 60)]
    give(space, [(0, 60), last])
    assert space.end == 0
    assert space.take_longest() is None


def test_the_run_that_fits_is_taken_before_a_longer_one(space: FreeSpace) -> None:
    _, small, _, large, _ = taken(space, [1, 100, 1, 1000, 1])
    give(space, [small, large])
    assert taken(space, [96]) == [(1, 97)]
    assert taken(space, [96]) == [(102, 198)]


def test_parts_fill_the_gaps_before_the_end_moves(space: FreeSpace) -> None:
    runs = taken(space, [100, 1] * 4)
    give(space, runs[::2])
    parts = taken(space, [30] * 14)
    assert sum(stop <= runs[-1][1] for _, stop in parts) == 12
    assert space.end == runs[-1][1] + 60


def test_a_request_that_does_not_fit_takes_nothing() -> None:
    space = FreeSpace(100)
    first, _ = taken(space, [40, 10])
    give(space, [first])
    assert space.take([30, 100]) is None
    assert taken(space, [40, 50]) == [(0, 40), (50, 100)]


def test_take_longest_returns_a_run_within_an_eighth_of_the_longest(space: FreeSpace) -> None:
    runs = taken(space, [size for n in range(1, 200) for size in (64 * n, 1)])
    give(space, runs[::2])
    found = space.take_longest()
    assert found is not None
    assert found[1] - found[0] >= 64 * 199 * 7 / 8


def test_space_behind_the_end_can_be_taken_up_to_an_offset(space: FreeSpace) -> None:
    taken(space, [10])
    assert space.take_to(10) is None
    assert space.take_to(64) == (10, 64)
    assert taken(space, [1]) == [(64, 65)]


@pytest.mark.parametrize("seed", range(6))
def test_random_use_agrees_with_a_byte_map(seed: int) -> None:
    chance, line, held = random.Random(seed), bytearray(4096), list[Run]()
    space = FreeSpace(len(line))
    for _ in range(1500):
        if chance.random() < 0.55:
            sizes = [chance.choice([0, 1, 7, 64, 200]) for _ in range(chance.randrange(1, 6))]
            pieces = space.take(list(accumulate(sizes)))
            if pieces is None:
                longest = max(map(len, line.split(b"\1")))
                assert longest < sum(sizes)
                continue
            assert sum(number for _, number in pieces) == len(sizes)
            for start, number in pieces:
                for size in [sizes.pop(0) for _ in range(number)]:
                    assert not any(line[start : start + size])
                    line[start : start + size] = b"\1" * size
                    held.append((start, start + size))
                    start += size
        elif held:
            run = held.pop(chance.randrange(len(held)))
            space.give(*run)
            line[slice(*run)] = bytes(run[1] - run[0])
        assert space.end == len(line.rstrip(b"\0"))
    give(space, held)
    assert (space.end, space.take_longest()) == (0, None)


def test_many_free_runs_are_all_reused(space: FreeSpace) -> None:
    runs = taken(space, [64] * 2 * MANY)
    give(space, runs[::2])
    again = [taken(space, [64])[0] for _ in range(MANY)]
    assert sorted(again) == runs[::2]
    give(space, runs)
    assert space.end == 0
