"""Ids are parsed as they are written, and consumed groups are remembered cheaply."""

import random

import pytest

from rollmesh.core.ids import GroupId, IntervalSet, RolloutId, new_id


def test_ids_have_a_stable_text() -> None:
    group_id = GroupId("r7f3a9c1", 12)
    assert str(group_id) == "r7f3a9c1/12"
    assert str(RolloutId(group_id, 3)) == "r7f3a9c1/12/3"


def test_new_ids_differ() -> None:
    assert len({new_id("r") for _ in range(1000)}) == 1000


@pytest.mark.parametrize("seed", range(20))
def test_intervals_hold_what_was_added_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    values = rng.sample(range(150), 100)
    held, expected = IntervalSet(), set[int]()
    for value in values:
        assert held.add(value)
        assert not held.add(value)
        expected.add(value)
        assert len(held) == len(expected)
        assert all((each in held) == (each in expected) for each in range(-1, 151))
    for (_, stop), (start, _) in zip(held.intervals(), held.intervals()[1:], strict=False):
        assert stop < start, "neighbours are one interval"


def test_a_dense_set_is_one_interval() -> None:
    held = IntervalSet([(0, 5)])
    for value in (6, 5):
        held.add(value)
    assert held.intervals() == [(0, 7)]


@pytest.mark.parametrize("seed", range(20))
def test_intervals_include_ranges_that_overlap_touch_or_contain_others(seed: int) -> None:
    rng = random.Random(seed)
    held, expected = IntervalSet(), set[int]()
    for _ in range(30):
        start = rng.randrange(100)
        stop = start + rng.randrange(-2, 12)
        held.include(start, stop)
        expected |= set(range(start, stop))
        assert all((each in held) == (each in expected) for each in range(-1, 115))
        assert len(held) == len(expected)
    for (_, stop), (start, _) in zip(held.intervals(), held.intervals()[1:], strict=False):
        assert stop < start, "neighbours are one interval"
