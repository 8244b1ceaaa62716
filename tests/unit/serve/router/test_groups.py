"""The queue: priority first, then clients in turns; nothing is retained of removed groups."""

import random

import pytest

from rollmesh.core.ids import GroupId
from rollmesh.serve.router.groups import TRANSITIONS, Group, GroupQueue
from rollmesh.wire.messages import GroupState


def waiting(seq: int, client: str = "c", env: str = "guess", priority: int = 0) -> Group:
    return Group(GroupId("r1", seq), env, 4, "tcp://sink", client, priority, b"12345")


def drained(queue: GroupQueue, env: str = "guess", **weights: int) -> list[int]:
    order = []
    while group := queue.head(env):
        queue.take(group, weights.get(group.client_id, 1))
        order.append(group.group_id.seq)
    return order


def test_a_clients_groups_are_served_in_order() -> None:
    queue = GroupQueue()
    for seq in (3, 1, 2):
        queue.push(waiting(seq))
    assert drained(queue) == [3, 1, 2]


def test_a_returned_group_goes_first() -> None:
    queue = GroupQueue()
    queue.push(waiting(1))
    queue.push(waiting(2), first=True)
    assert drained(queue) == [2, 1]


def test_a_client_with_few_groups_waits_for_one_turn_of_each_other() -> None:
    queue = GroupQueue()
    for seq in range(4):
        queue.push(waiting(seq, "greedy"))
    for seq in (10, 11):
        queue.push(waiting(seq, "other"))
    queue.push(waiting(20, "modest"))
    assert drained(queue) == [0, 10, 20, 1, 11, 2, 3]


def test_a_client_has_as_many_turns_in_a_row_as_its_weight() -> None:
    queue = GroupQueue()
    for seq in range(7):
        queue.push(waiting(seq, "heavy"))
    for seq in range(10, 13):
        queue.push(waiting(seq, "light"))
    assert drained(queue, heavy=3) == [0, 1, 2, 10, 3, 4, 5, 11, 6, 12]


def test_a_higher_priority_goes_before_all_turns() -> None:
    queue = GroupQueue()
    queue.push(waiting(1, "a"))
    queue.push(waiting(2, "b", priority=1))
    queue.push(waiting(3, "a", priority=-1))
    assert drained(queue) == [2, 1, 3]


def test_groups_of_many_priorities_are_ordered_by_priority() -> None:
    queue, rng = GroupQueue(), random.Random(3)
    groups = [waiting(seq, priority=rng.randrange(-200, 200)) for seq in range(500)]
    for each in groups:
        queue.push(each)
    gone = rng.sample(groups, 200)
    for each in gone:
        queue.remove(each)
    left = [each for each in groups if each not in gone]
    in_order = sorted(left, key=lambda each: (-each.priority, each.group_id.seq))
    assert drained(queue) == [each.group_id.seq for each in in_order]
    assert queue.envs() == []


def test_the_first_group_of_each_client_is_known() -> None:
    queue = GroupQueue()
    for seq, client in enumerate(("a", "a", "b", "b")):
        queue.push(waiting(seq, client))
    queue.push(waiting(9, "c", env="echo"))
    assert [each.group_id.seq for each in queue.firsts("guess")] == [0, 2]
    assert queue.firsts("none") == []
    assert set(queue.envs()) == {"guess", "echo"}


def test_groups_do_not_wait_for_other_environments() -> None:
    queue = GroupQueue()
    queue.push(waiting(1, env="echo"))
    queue.push(waiting(2))
    assert drained(queue) == [2]
    assert [g.group_id.seq for g in queue.of_env("echo")] == [1]


def test_a_group_can_be_removed_from_the_middle() -> None:
    queue = GroupQueue()
    groups = [waiting(seq) for seq in range(3)]
    for group in groups:
        queue.push(group)
    assert queue.remove(groups[1])
    assert not queue.remove(groups[1])
    assert drained(queue) == [0, 2]


def test_an_emptied_queue_has_no_length_and_retains_nothing() -> None:
    queue = GroupQueue()
    groups = [waiting(seq, f"c{seq}", f"env{seq}", seq) for seq in range(5)]
    for group in groups:
        queue.push(group)
    assert len(queue) == 5
    for group in groups:
        queue.remove(group)
    assert len(queue) == 0
    assert all(queue.head(group.env) is None for group in groups)


@pytest.mark.parametrize("state", list(GroupState))
def test_an_ended_group_stays_ended_and_every_other_can_end(state: GroupState) -> None:
    ends = {GroupState.DONE, GroupState.FAILED, GroupState.CANCELLED}
    following = set(TRANSITIONS[state])
    assert following == set() if state in ends else ends <= following
