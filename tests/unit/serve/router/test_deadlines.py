"""Deadlines come due once, never grow, and are not kept of what has ended."""

import math

import pytest

from rollmesh.core.ids import GroupId
from rollmesh.serve.router.deadlines import SPARE_DEADLINES, Deadlines, left_s
from rollmesh.serve.router.groups import Group


def waiting(seq: int) -> Group:
    return Group(GroupId("r1", seq), "guess", 4, "tcp://sink", "c")


def test_deadlines_come_due_in_their_order_and_once() -> None:
    groups = {group.group_id: group for group in map(waiting, range(3))}
    deadlines = Deadlines(groups)
    for group, deadline_s in zip(groups.values(), (3.0, 1.0, 9.0), strict=True):
        deadlines.set(group, deadline_s, now_s=0.0)
    assert [group.group_id.seq for group in deadlines.take_overdue(5.0)] == [1, 0]
    assert deadlines.take_overdue(5.0) == []


def test_a_group_that_has_ended_is_not_overdue() -> None:
    group = waiting(1)
    groups = {group.group_id: group}
    deadlines = Deadlines(groups)
    deadlines.set(group, 1.0, now_s=0.0)
    groups.clear()
    assert deadlines.take_overdue(5.0) == []


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_sets_nothing(deadline_s: float) -> None:
    group = waiting(1)
    Deadlines({group.group_id: group}).set(group, deadline_s, now_s=0.0)
    assert left_s(group, 0.0) == 0.0


def test_deadlines_of_ended_groups_are_not_kept() -> None:
    groups: dict[GroupId, Group] = {}
    deadlines = Deadlines(groups)
    for group in map(waiting, range(3 * SPARE_DEADLINES)):
        groups[group.group_id] = group
        deadlines.set(group, 1e6, now_s=0.0)
        del groups[group.group_id]
    assert len(deadlines) <= SPARE_DEADLINES + 2
