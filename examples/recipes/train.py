"""Train a tiny, newly created model by one of the standard recipes, on several ranks.

    python -m examples.recipes.train --recipe ppo|grpo|dpo|sft|reward --ranks 2 [--run FOLDER]

- Before and after, it measures the share of unseen pairs that the model ranks correctly, by its
  log-probs or, for a reward model, by its rewards.
- After each step no process holds any tensor of its batch.
- With --run it writes checkpoints there, and resumes from the newest.
"""

import argparse
import contextlib
import tempfile
from pathlib import Path

from examples.recipes.data import batch
from rollmesh.core.config import TrainerConfig
from rollmesh.tensors.plane import Plane, use
from rollmesh.trainer.checkpoints.recovery_plan import LoopState
from rollmesh.trainer.checkpoints.store import CheckpointStore
from rollmesh.trainer.controller.controller import RankPlan, RoleCall, TensorUsage, TrainController
from rollmesh.trainer.controller.dispatch import DispatchRule
from rollmesh.trainer.controller.spec import PlaneSpec, Topology
from rollmesh.trainer.controller.tensor_runtime import TensorRuntime
from rollmesh.trainer.models.tiny import TinyShape, write_tiny_model
from rollmesh.trainer.roles.recipes import RECIPES, Report, Rows, SavedRoles, role_specs

TRAINER = TrainerConfig(learning_rate=3e-3)
LOSSES = {"actor": {"kl_coef": 0.005}, "critic": {"kl_coef": 0.005}}
FROZEN = "reference"
SETTLE_S = 60.0
UNSEEN = 1_000_000
"""A seed that no step uses."""


def train(recipe: str, num_ranks: int, num_steps: int, folder: Path, run: Path | None) -> None:
    """Print a line for each step, and the share of correctly ranked pairs before and after."""
    write_tiny_model(folder, ["a"], TinyShape(), seed=0)
    roles = role_specs(RECIPES[recipe].roles, str(folder), TRAINER, LOSSES)
    plan = RankPlan(topology=Topology(num_ranks), roles=roles)
    with (
        contextlib.closing(TensorRuntime(PlaneSpec(), None)) as home,
        TrainController(plan, home) as controller,
    ):
        use(home.plane)
        subject = SavedRoles(controller, [each for each in RECIPES[recipe].roles if each != FROZEN])
        checkpoints = CheckpointStore(run) if run else None
        newest = checkpoints.newest() if checkpoints else None
        if checkpoints and newest:
            checkpoints.restore(newest, subject)
        before = share_correct(controller, home.plane, recipe)
        for step in range(newest.state.num_steps if newest else 0, num_steps):
            rows = controller.take(home.plane.remotize(rows_for(recipe, step)), step)
            report = RECIPES[recipe].step(controller, rows, step)
            print_step(step, report, controller.end_step(step))
        if checkpoints and checkpoints.begin(LoopState(num_steps=num_steps), subject):
            checkpoints.settled(SETTLE_S)
        after = share_correct(controller, home.plane, recipe)
    print(f"unseen pairs ranked correctly: {before:.0%} before, {after:.0%} now")


def rows_for(recipe: str, step: int, is_upside_down: bool = False) -> Rows:
    """Return a batch; for `sft` only the better text of each pair."""
    rows = batch(step, is_upside_down)
    return rows[::2] if recipe == "sft" else rows


def share_correct(
    controller: TrainController, plane: Plane, recipe: str, is_upside_down: bool = False
) -> float:
    """Share of unseen pairs that are ranked correctly."""
    rows = plane.remotize(batch(UNSEEN, is_upside_down))
    rule = DispatchRule(uneven="pad")
    ratings: list[float]
    if "scorer" in RECIPES[recipe].roles:
        ratings = controller.call(RoleCall("scorer.rewards", rule=rule), rows)
        controller.clear_batches(rows)
    else:
        logprobs = controller.call(RoleCall("actor.logprobs", rule=rule), rows)
        ratings = [float(each.sum()) for each in plane.localize(logprobs)]
        controller.clear_batches(rows, logprobs)
    pairs = [*zip(ratings[::2], ratings[1::2], strict=True)]
    return sum(better > worse for better, worse in pairs) / len(pairs)


def print_step(step: int, report: Report, held: TensorUsage) -> None:
    """Print the line of a step."""
    left = sum(each.stored.total_bytes + each.buffered.total_bytes for each in held.processes)
    figures = "  ".join(f"{name} {value:.4g}" for name, value in report.items())
    print(f"step {step:2d}  {figures}  {left} bytes left in {len(held.processes)} processes")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="train a tiny model by a recipe")
    parser.add_argument("--recipe", choices=RECIPES, default="ppo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--run", type=Path, help="folder of checkpoints, from which training resumes"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        train(options.recipe, options.ranks, options.steps, Path(folder), options.run)


if __name__ == "__main__":
    main()
