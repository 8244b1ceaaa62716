"""Deadlines come due once, and never grow."""

import math

import msgspec
import pytest

from rollmesh.core.ids import GroupId
from rollmesh.serve.router.group_table import Deadlines, left_s
from rollmesh.serve.router.groups import Group
from rollmesh.wire.messages import CancelRun, GroupFailed, GroupState, RunGroup
from tests.unit.serve.router.story import Story, ask, group, only


def waiting(seq: int) -> Group:
    return Group(GroupId("r1", seq), "guess", 4, "tcp://sink", "c")


def test_deadlines_come_due_in_their_order_and_once() -> None:
    groups = {each.group_id: each for each in map(waiting, range(3))}
    deadlines = Deadlines(groups)
    for each, deadline_s in zip(groups.values(), (3.0, 1.0, 9.0), strict=True):
        deadlines.set(each, deadline_s, now_s=0.0)
    assert [each.group_id.seq for each in deadlines.take_overdue(5.0)] == [1, 0]
    assert deadlines.take_overdue(5.0) == []


def test_a_group_that_has_ended_is_not_overdue() -> None:
    waits = waiting(1)
    groups = {waits.group_id: waits}
    deadlines = Deadlines(groups)
    deadlines.set(waits, 1.0, now_s=0.0)
    groups.clear()
    assert deadlines.take_overdue(5.0) == []


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_sets_nothing(deadline_s: float) -> None:
    waits = waiting(1)
    Deadlines({waits.group_id: waits}).set(waits, deadline_s, now_s=0.0)
    assert left_s(waits, 0.0) == 0.0


# as the ledger keeps them


def test_a_group_ends_at_its_deadline_wherever_it_is(story: Story) -> None:
    story.worker("w0")
    for seq in (1, 2, 3):
        story.asks(msgspec.structs.replace(ask(seq), deadline_s=5.0))
    assert story.state(3) is GroupState.QUEUED
    assert not only(story.passes(4.5, "w0", "c"), GroupFailed)
    sends = story.passes(0.5, "w0", "c")
    reasons = [failed.reason for failed in only(sends, GroupFailed)]
    assert len(reasons) == 3
    assert all(reason.startswith("deadline: ") for reason in reasons)
    assert {cancel.group_id for cancel in only(sends, CancelRun, "w0")} >= {group(1), group(2)}
    assert story.is_empty()


def test_a_worker_is_told_what_is_left_of_the_deadline(story: Story) -> None:
    story.asks(msgspec.structs.replace(ask(1), deadline_s=5.0))
    story.passes(2, "c")
    [run] = only(story.worker("w0"), RunGroup)
    assert run.deadline_s == pytest.approx(3.0)


def test_a_late_double_of_an_ask_does_not_lengthen_its_deadline(story: Story) -> None:
    story.asks(msgspec.structs.replace(ask(1), deadline_s=5.0))
    story.passes(4, "c")
    story.asks(msgspec.structs.replace(ask(1), deadline_s=5.0))
    assert only(story.passes(1, "c"), GroupFailed)


def test_an_ask_after_its_deadline_fails_at_once(story: Story) -> None:
    [failed] = only(story.asks(msgspec.structs.replace(ask(1), deadline_s=-1.0)), GroupFailed)
    assert failed.reason.startswith("deadline: ")
