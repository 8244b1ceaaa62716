"""The age bound holds whatever the order of things, and pacing neither starves nor bursts."""

import random

import pytest

from rollmesh.core.ids import GroupId
from rollmesh.trainer.staleness import (
    BatchTaken,
    GroupArrived,
    GroupAsked,
    GroupEnded,
    GroupStale,
    StalenessManager,
    StalenessSettings,
    StepPublished,
    TakeBatch,
)


def manager(batch: int = 2, max_staleness: int = 1, max_running: int = 100) -> StalenessManager:
    settings = StalenessSettings(batch=batch, max_staleness=max_staleness, max_running=max_running)
    return StalenessManager(settings)


def group(seq: int) -> GroupId:
    return GroupId("r", seq)


def test_capacity_at_start_is_one_batch_per_step_of_the_bound() -> None:
    assert manager(batch=4, max_staleness=2).capacity == 12
    assert manager(batch=4, max_staleness=0).capacity == 4


def test_capacity_after_recovery_does_not_grow_with_the_step() -> None:
    settings = StalenessSettings(batch=4, max_staleness=2, max_running=1000)
    assert StalenessManager(settings, published_step=268).capacity == 12


def test_capacity_is_limited_by_running() -> None:
    m = manager(batch=4, max_staleness=2, max_running=5)
    for seq in range(3):
        m.step(GroupAsked(group(seq)))
    assert m.capacity == 2


def test_training_groups_count_until_their_step_is_published() -> None:
    m = manager(batch=2, max_staleness=1)
    for seq in range(4):
        m.step(GroupAsked(group(seq)))
        m.step(GroupArrived(group(seq), 0))
    assert m.capacity == 0
    assert m.step(TakeBatch(0)) == [BatchTaken(0, (group(0), group(1)))]
    assert m.capacity == 0
    m.step(StepPublished(1))
    assert m.capacity == 2


def test_oldest_group_is_taken_first() -> None:
    m = manager(batch=1, max_staleness=3)
    m.step(GroupAsked(group(0)))
    m.step(StepPublished(1))
    m.step(GroupAsked(group(1)))
    m.step(GroupArrived(group(1), 1))
    m.step(GroupArrived(group(0), 0))
    assert m.step(TakeBatch(1)) == [BatchTaken(1, (group(0),))]


def test_step_waits_for_a_straggler_that_the_next_step_could_not_take() -> None:
    m = manager(batch=1, max_staleness=1)
    m.step(GroupAsked(group(0)))
    m.step(GroupAsked(group(1)))
    m.step(GroupArrived(group(1), 0))
    assert m.step(TakeBatch(0)) == [BatchTaken(0, (group(1),))]
    m.step(StepPublished(1))
    m.step(GroupAsked(group(2)))
    m.step(GroupArrived(group(2), 1))
    assert m.step(TakeBatch(1)) == []
    m.step(GroupArrived(group(0), 0))
    assert m.step(TakeBatch(1)) == [BatchTaken(1, (group(0),))]


def test_group_past_the_bound_is_dropped_with_its_age() -> None:
    m = manager(batch=1, max_staleness=1)
    m.step(GroupAsked(group(0)))
    m.step(GroupArrived(group(0), 0))
    assert m.step(TakeBatch(5)) == [GroupStale(group(0), 5)]
    assert m.num_ready == 0


@pytest.mark.parametrize("event", [GroupArrived(group(9), 0), GroupEnded(group(9))])
def test_unknown_groups_change_nothing(event: GroupArrived | GroupEnded) -> None:
    m = manager()
    assert m.step(event) == []
    assert m.capacity == 4


@pytest.mark.parametrize("seed", range(40))
def test_age_bound_holds_and_training_never_starves(seed: int) -> None:
    rng = random.Random(seed)
    batch, bound = rng.randint(1, 4), rng.randint(0, 3)
    m = manager(batch=batch, max_staleness=bound, max_running=rng.randint(batch, 20))
    running: dict[GroupId, int] = {}
    publishing: list[int] = []
    seq, step, num_idle = 0, 0, 0
    while step < 60:
        num_idle += 1
        assert num_idle < 500, "nothing moves any more"
        for _ in range(m.capacity):
            running[group(seq)] = m.published_step
            m.step(GroupAsked(group(seq)))
            seq += 1
        choice = rng.random()
        if running and choice < 0.6:
            done = rng.choice(list(running))
            asked_at = running.pop(done)
            if rng.random() < 0.1:
                m.step(GroupEnded(done))
            else:
                m.step(GroupArrived(done, rng.randint(asked_at, m.published_step)))
        elif choice < 0.8 and len(publishing) < 2:
            for action in m.step(TakeBatch(step)):
                assert isinstance(action, BatchTaken), "pacing lets nothing grow too old"
                assert len(action.group_ids) == batch
                step += 1
                publishing.append(step)
                num_idle = 0
        elif publishing:
            m.step(StepPublished(publishing.pop(0)))
        assert not any(isinstance(a, GroupStale) for a in m.step(GroupEnded(group(10**6))))
