"""Groups come due in their order, at their newest time alone, and of the rest nothing is kept."""

import math
from operator import attrgetter

import pytest

from rollmesh.core.ids import GroupId
from rollmesh.serve.router.group_table import SPARE_ENTRIES, TimerHeap
from rollmesh.serve.router.groups import Group


@pytest.fixture
def timers() -> TimerHeap:
    return TimerHeap(attrgetter("repeat_s"))


def put(timers: TimerHeap, seq: int, at_s: float) -> Group:
    group = Group(GroupId("r1", seq), "guess", 4, "tcp://sink", "c", repeat_s=at_s)
    timers.put(group)
    return group


def due(timers: TimerHeap, now_s: float) -> list[int]:
    return [group.group_id.seq for group in timers.take_due(now_s)]


def test_groups_come_due_in_their_order_and_once(timers: TimerHeap) -> None:
    for seq, at_s in ((0, 3.0), (1, 1.0), (2, 9.0)):
        put(timers, seq, at_s)
    assert due(timers, 5.0) == [1, 0]
    assert due(timers, 5.0) == []
    assert due(timers, 9.0) == [2]


@pytest.mark.parametrize("newest_s", [1.0, 7.0])
def test_a_group_is_due_at_its_newest_time_alone(timers: TimerHeap, newest_s: float) -> None:
    group = put(timers, 0, 3.0)
    group.repeat_s = newest_s
    timers.put(group)
    found = [now_s for now_s in (0.5, 2.0, 4.0, 8.0) if due(timers, now_s)]
    assert found == [min(now_s for now_s in (2.0, 4.0, 8.0) if now_s >= newest_s)]


def test_one_that_is_put_off_while_it_is_looked_at_is_not_due_again(timers: TimerHeap) -> None:
    put(timers, 0, 1.0)
    seen = []
    for group in timers.take_due(5.0):
        seen.append(group.group_id.seq)
        group.repeat_s = 6.0
        timers.put(group)
    assert seen == [0]
    assert due(timers, 6.0) == [0]


def test_what_is_never_due_any_more_is_not_kept(timers: TimerHeap) -> None:
    for seq in range(5 * SPARE_ENTRIES):
        put(timers, seq, 1e6).repeat_s = math.inf
    assert len(timers) <= SPARE_ENTRIES + 1


def test_all_that_are_still_due_survive_the_tidying(timers: TimerHeap) -> None:
    for seq in range(5 * SPARE_ENTRIES):
        group = put(timers, seq, 1e6 + seq)
        if seq % 2:
            group.repeat_s = math.inf
    assert due(timers, 1e9) == list(range(0, 5 * SPARE_ENTRIES, 2))
