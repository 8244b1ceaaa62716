"""For any lengths and speeds, no policy trains a sample that is too old, and every group ends."""

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lib.staleness_sim import (
    FAR,
    FleetShape,
    Managed,
    RequestedGroup,
    RunFigures,
    StalenessSimulation,
    StepBatch,
    arms,
)
from rollmesh.core.config import StalePolicy
from rollmesh.core.ids import GroupId
from rollmesh.trainer.staleness import (
    GroupAdmitted,
    GroupArrived,
    StalenessManager,
    StalenessState,
    StepRetaken,
)

NUM_ARMS = len(arms(FleetShape()))


def floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


SHAPES = st.builds(
    FleetShape,
    group_size=st.integers(1, 4),
    batch_groups=st.integers(1, 4),
    max_staleness=st.integers(0, 4),
    max_groups=st.integers(1, 12),
    task_spread=floats(0.0, 2.0),
    sibling_spread=floats(0.0, 1.0),
    rare_share=floats(0.0, 0.5),
    rare_factor=floats(1.0, 100.0),
    trained_tokens_per_s=floats(100.0, 10**6),
    step_s=floats(0.0, 30.0),
    publish_s=floats(0.0, 60.0),
)


@pytest.mark.parametrize("at", range(NUM_ARMS))
@settings(max_examples=25, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**32))
def test_no_sample_is_older_than_the_bound_and_every_group_ends(
    at: int, shape: FleetShape, seed: int
) -> None:
    arm = arms(shape)[at]
    outcome = StalenessSimulation(shape, arm, seed).run(20)
    assert max(outcome.ages) <= arm.bound
    num_again = outcome.num_requeued if arm.requeues else 0
    num_ended = outcome.num_trained + outcome.num_dropped + outcome.num_requeued
    assert num_ended == outcome.num_asked + num_again


@settings(max_examples=50, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**32))
def test_waiting_drops_nothing_and_prefers_no_length(shape: FleetShape, seed: int) -> None:
    arm = Managed("wait", "wait", shape, shape.max_staleness)
    outcome = StalenessSimulation(shape, arm, seed).run(20)
    assert (outcome.num_dropped, outcome.num_requeued, outcome.tokens_masked) == (0, 0, 0)
    assert (outcome.num_trained, outcome.tokens_trained) == (
        outcome.num_asked,
        outcome.tokens_asked,
    )


def test_the_known_formula_bounds_no_age() -> None:
    outcome = run("known formula", num_steps=100)
    assert max(outcome.ages) > 10 * FleetShape().max_staleness


def test_dropping_and_masking_select_against_long_rollouts() -> None:
    for name in ("drop", "mask"):
        assert run(name).figures()["length_bias"] < 0.9, name


def run(name: str, num_steps: int = 60) -> RunFigures:
    [arm] = [each for each in arms(FleetShape()) if each.name == name]
    return StalenessSimulation(FleetShape(), arm, 0).run(num_steps)


def test_a_seed_gives_the_same_result_twice() -> None:
    results = [msgspec.to_builtins(run("drop", 20).figures()) for _ in range(2)]
    assert results[0] == results[1]
    bounds = [arm.bound for arm in arms(FleetShape())]
    assert bounds.count(FAR) == 2


class Crashing(Managed):
    """A manager that is killed between any two events and restored from a journal."""

    def __init__(self, policy: StalePolicy, shape: FleetShape, seed: int) -> None:
        super().__init__(policy, policy, shape, shape.max_staleness)
        self._chance = random.Random(seed)
        self._asked: dict[GroupId, RequestedGroup] = {}
        self._arrived: dict[GroupId, RequestedGroup] = {}
        self._steps: dict[int, list[GroupId]] = {}
        self._published = 0
        self.num_incarnations = 1

    def asked(self, group: RequestedGroup) -> None:
        super().asked(group)
        self._asked[group.group_id] = group
        self._crash()

    def arrived(self, group: RequestedGroup, newest_steps: tuple[int, ...]) -> None:
        super().arrived(group, newest_steps)
        self._arrived[group.group_id] = group
        self._crash()

    def take(self, step: int, num_rollouts: int) -> StepBatch:
        taken = super().take(step, num_rollouts)
        for group_id in taken.stale:
            del self._asked[group_id]
        if taken.batch:
            self._steps[step] = taken.batch
        self._crash()
        return taken

    def published(self, step: int) -> None:
        super().published(step)
        self._published = step
        for done in [each for each in self._steps if each < step]:
            for group_id in self._steps.pop(done):
                del self._asked[group_id]
        self._crash()

    def _crash(self) -> None:
        if self._chance.random() > 1 / 8:
            return
        self.num_incarnations += 1
        was = self._manager
        results = StalenessState(consumed=was.consumed)
        self._manager = StalenessManager(was.settings, self._published, restored=results)
        for group in self._asked.values():
            event = GroupAdmitted(group.group_id, len(group.lengths), group.asked_step)
            self._manager.step(event)
            if group.group_id in self._arrived:
                num = len(group.lengths)
                self._manager.step(GroupArrived(group.group_id, num, group.asked_step))
        for step, group_ids in self._steps.items():
            self._manager.step(StepRetaken(step, tuple(group_ids)))
        assert counts(self._manager.state) == counts(was.state)


def counts(state: StalenessState) -> tuple[int, ...]:
    return state.capacity, state.running, state.ready, state.training, state.consumed


@pytest.mark.parametrize("policy", ["wait", "drop"])
@settings(max_examples=25, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 2**32))
def test_a_restored_trainer_has_the_same_free_capacity(
    policy: StalePolicy, shape: FleetShape, seed: int
) -> None:
    arm = Crashing(policy, shape, seed)
    outcome = StalenessSimulation(shape, arm, seed).run(20)
    assert arm.num_incarnations > 1
    assert max(outcome.ages) <= shape.max_staleness
    assert outcome.num_trained + outcome.num_dropped == outcome.num_asked
    assert policy == "drop" or not outcome.num_dropped
