"""Recipes of training with one, two or three roles: each learns, and each step leaves nothing."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rollmesh.tensors.plane import Plane
from rollmesh.trainer.controller.answers import Reduce
from rollmesh.trainer.controller.controller import Call, RankPlan, TrainController
from rollmesh.trainer.controller.dispatch import Rule
from rollmesh.trainer.controller.spec import RoleSpec
from rollmesh.trainer.controller.topology import Topology
from tests.flow.rank_crew import SMALL, household

VOCAB, NUM_STEPS = 11, 20
ROLES = ("actor", "reference", "critic")
SUMS = Reduce(rules={"loss": "sum", "num": "sum"})
Rows = list[dict[str, Any]]


class Recipe:
    """What a step of each recipe calls."""

    def __init__(self, controller: TrainController, plane: Plane) -> None:
        self._controller = controller
        self._plane = plane

    def ppo(self, rows: Rows, step: int) -> float:
        """Actor, reference and critic; how much likelier noise is than what is rewarded."""
        old, reference, values = (
            self._call(method, step, 1, rows)
            for method in ("actor.logprobs", "reference.logprobs", "critic.values")
        )
        self._call("critic.train_values", step, 1, rows)
        self._call("actor.train_policy", step, 1, rows, old, reference, values)
        means = [float(each.mean()) for each in self._plane.localize(old)]
        return sum(means[1::2]) - sum(means[::2])

    def dpo(self, rows: Rows, step: int) -> float:
        """Actor and reference, on pairs."""
        reference = self._call("reference.logprobs", step, 2, rows)
        return float(self._call("actor.train_preference", step, 2, rows, reference)["loss"])

    def sft(self, rows: Rows, step: int) -> float:
        """Actor alone."""
        return float(self._call("actor.train_text", step, 1, rows)["loss"])

    def reward_model(self, rows: Rows, step: int) -> float:
        """Actor alone, on pairs."""
        return float(self._call("actor.train_reward", step, 2, rows)["loss"])

    def _call(self, method: str, step: int, group_size: int, *args: Any) -> Any:
        rule = Rule(group_size=group_size, uneven="pad")
        reduce = SUMS if ".train_" in method else Reduce()
        return self._controller.call(Call(method, step, rule, reduce), *args)


@pytest.fixture(scope="module")
def crew() -> Iterator[tuple[TrainController, Plane]]:
    """Two heads that have all roles."""
    make, settings = "tests.flow.recipe_roles:Tiny", {"vocab_size": VOCAB, "seed": 0}
    roles = {name: RoleSpec(make=make, settings=settings) for name in ROLES}
    plan = RankPlan(topology=Topology(2), roles=roles, plane=SMALL)
    with household() as home, TrainController(plan, home) as controller:
        yield controller, home.plane


def batch(plane: Plane, step: int) -> Rows:
    """Three pairs: the first counts up and is worth 1, the second is noise and is worth 0."""
    chance = random.Random(step)
    rows: Rows = []
    for _ in range(3):
        start, length = chance.randrange(VOCAB), chance.randrange(3, 12)
        good = [(start + at) % VOCAB for at in range(length)]
        bad = [chance.randrange(VOCAB) for _ in range(length)]
        rows += [{"token_ids": good, "reward": 1.0}, {"token_ids": bad, "reward": 0.0}]
    tensors = [
        row | {"token_ids": torch.tensor(row["token_ids"], dtype=torch.int32)} for row in rows
    ]
    stored: Rows = plane.remotize(tensors)
    return stored


@pytest.mark.parametrize("name", ["ppo", "dpo", "sft", "reward_model"])
def test_a_recipe_learns_and_every_step_leaves_nothing_anywhere(
    crew: tuple[TrainController, Plane], name: str
) -> None:
    controller, plane = crew
    step_of: Callable[[Rows, int], float] = getattr(Recipe(controller, plane), name)
    first = NUM_STEPS * ["ppo", "dpo", "sft", "reward_model"].index(name)
    losses = []
    for step in range(first, first + NUM_STEPS):
        losses.append(step_of(controller.take(batch(plane, step), step), step))
        held = controller.end_step(step)
        assert (held.leaks, held.missing) == ((), ())
        for each in held.processes:
            stored, buffered = each.stored, each.buffered
            assert (stored.num_tensors, stored.total_bytes, stored.retained_bytes) == (0, 0, 0)
            assert (buffered.num_tensors, buffered.total_bytes) == (0, 0)
    assert sum(losses[-5:]) < sum(losses[:5])
