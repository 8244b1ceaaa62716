"""The common recipes on real roles: each learns, and each step leaves nothing behind, on one rank
or two.
"""

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from examples.recipes.train import LOSSES, rows_for, share_correct
from rollmesh.core.config import TrainerConfig
from rollmesh.trainer.controller.controller import RankPlan, RoleCall, TensorUsage, TrainController
from rollmesh.trainer.controller.dispatch import DispatchRule
from rollmesh.trainer.controller.spec import Topology
from rollmesh.trainer.models.tiny import TinyShape, write_tiny_model
from rollmesh.trainer.roles.recipes import RECIPES, Report, role_specs
from tests.flow.rank_group import SMALL, serving_runtime
from tests.unit.trainer.roles.rows import drawn
from tests.unit.trainer.roles.stock import one_by_one, write_soft_capped

pytestmark = pytest.mark.slow

NUM_STEPS = 20
ALIKE = 1e-4
"""The tolerance; losses were within 1e-5. For larger figures (a divergence of 70 nats) it is
relative.
"""
ROLES = ("actor", "reference", "critic", "scorer")
ORDER = ("sft", "dpo", "grpo", "ppo", "reward")
"""Every second recipe prefers what the one before it taught to avoid."""
# More than one forward pass a step, and a different number at each rank.
TRAINER = TrainerConfig(learning_rate=3e-3, microbatch_tokens=80)


class RecipeRun(NamedTuple):
    """The reports of 20 steps of a recipe, what they left in memory, and the results before and
    after.
    """

    reports: list[Report]
    held: list[TensorUsage]
    right_before: float
    right_after: float


def courses(folder: Path, num_ranks: int) -> dict[str, RecipeRun]:
    """Run all recipes one after the other on the same roles."""
    specs = role_specs(ROLES, str(folder), TRAINER, LOSSES)
    plan = RankPlan(topology=Topology(num_ranks), roles=specs, plane=SMALL)
    runs = {}
    with serving_runtime() as home, TrainController(plan, home) as controller:
        for at, name in enumerate(ORDER):
            reports, held, turned = [], [], at % 2 == 1
            before = share_correct(controller, home.plane, name, turned)
            for step in range(at * NUM_STEPS, (at + 1) * NUM_STEPS):
                rows = controller.take(home.plane.remotize(rows_for(name, step, turned)), step)
                reports.append(RECIPES[name].step(controller, rows, step))
                held.append(controller.end_step(step))
            after = share_correct(controller, home.plane, name, turned)
            runs[name] = RecipeRun(reports, held, before, after)
    return runs


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes") / "model"
    write_tiny_model(folder, ["a"], TinyShape(), seed=0)
    return folder


@pytest.fixture(scope="module")
def on_one(model_folder: Path) -> dict[str, RecipeRun]:
    return courses(model_folder, 1)


@pytest.fixture(scope="module")
def on_two(model_folder: Path) -> dict[str, RecipeRun]:
    return courses(model_folder, 2)


@pytest.mark.parametrize("name", ORDER)
def test_a_recipe_learns_and_no_step_leaves_anything_behind(
    on_two: dict[str, RecipeRun], name: str
) -> None:
    course = on_two[name]
    assert (course.right_before <= 0.25, course.right_after) == (True, 1.0)
    assert len(course.held) == NUM_STEPS
    for held in course.held:
        assert (held.leaks, held.missing, len(held.processes)) == ((), (), 3)
        for each in held.processes:
            stored, buffered = each.stored, each.buffered
            assert (stored.num_tensors, stored.total_bytes, stored.retained_bytes) == (0, 0, 0)
            assert (buffered.num_tensors, buffered.total_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("name", "what"),
    [("sft", "loss"), ("dpo", "loss"), ("ppo", "value_loss"), ("reward", "loss")],
)
def test_the_quantity_that_a_recipe_minimizes_falls(
    on_two: dict[str, RecipeRun], name: str, what: str
) -> None:
    figures = [report[what] for report in on_two[name].reports]
    assert sum(figures[-3:]) < 0.5 * sum(figures[:3])


@pytest.mark.parametrize("name", ORDER)
def test_a_recipe_is_the_same_on_one_rank_and_on_two(
    on_one: dict[str, RecipeRun], on_two: dict[str, RecipeRun], name: str
) -> None:
    for one, two in zip(on_one[name].reports, on_two[name].reports, strict=True):
        assert one == pytest.approx(two, rel=ALIKE, abs=ALIKE)


def test_a_model_that_cannot_be_packed_makes_as_many_forward_passes_at_each_rank(
    tmp_path: Path,
) -> None:
    write_soft_capped(tmp_path)
    rows = drawn(0, 5, 12, 12, 7, 9, 4)
    expected = [*zip(rows, one_by_one(tmp_path, rows), strict=True)]
    specs = role_specs(RECIPES["dpo"].roles, str(tmp_path), TRAINER)
    plan = RankPlan(topology=Topology(2), roles=specs, plane=SMALL)
    with serving_runtime() as home, TrainController(plan, home) as controller:
        batch = controller.take(home.plane.remotize(rows), 0)
        # Three pairs for two ranks: one has two pairs, the other one and padding.
        preferred = RECIPES["dpo"].step(controller, batch, 0)
        untouched = controller.call(
            RoleCall("reference.logprobs", 0, DispatchRule(uneven="pad")), batch
        )
        for each, (_, logprobs) in zip(home.plane.localize(untouched), expected, strict=True):
            assert each.tolist() == pytest.approx(logprobs.tolist(), abs=1e-5)
        texts = RECIPES["sft"].step(controller, batch, 0)
    assert preferred["loss"] == pytest.approx(math.log(2))
    assert (preferred["num"], texts["num"]) == (3, sum(len(logprobs) for _, logprobs in expected))


def test_the_example_prints_the_gain_of_training() -> None:
    argv = [sys.executable, "-m", "examples.recipes.train", "--recipe", "reward"]
    shown = subprocess.run(
        [*argv, "--ranks", "1", "--steps", "2"], capture_output=True, text=True, timeout=100
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    *steps, last = shown.stdout.splitlines()
    assert [re.sub(r"loss \S+.*  0 ", "loss ..  0 ", line) for line in steps] == [
        f"step  {at}  loss ..  0 bytes left in 2 processes" for at in range(2)
    ]
    assert last.startswith("unseen pairs ranked correctly: 0% before, ")
