"""Train on several ranks: the controller sends handles, and ranks fetch their own tensors.

    python -m examples.ranks.train --ranks 2
    torchrun --nproc-per-node 2 -m examples.ranks.train     the same without a controller

- The loop and its loss curve are the same for any number of ranks, with and without a controller.
- After each step no process holds any tensor of its batch.
"""

import argparse
import contextlib
import os
import random
from collections.abc import Iterator

import torch
from torch import Tensor

from examples.ranks.ahead import Ahead
from rollmesh.tensors.plane import current, use
from rollmesh.trainer.controller.answers import Reduce
from rollmesh.trainer.controller.controller import RankPlan, RoleCall, TensorUsage, TrainController
from rollmesh.trainer.controller.dispatch import DispatchRule
from rollmesh.trainer.controller.spec import PlaneSpec, RoleSpec, Topology
from rollmesh.trainer.controller.tensor_runtime import TensorRuntime
from rollmesh.trainer.controller.torchrun import PlainRank
from rollmesh.trainer.staleness import Staleness

VOCAB = 17
ROWS = 10
MAX_STALENESS = 1
TRAIN = RoleCall(
    "writer.train",
    rule=DispatchRule(uneven="pad"),
    reduce=Reduce(rules={"loss": "sum", "num_tokens": "sum"}),
)
SCORE = RoleCall("writer.score", rule=DispatchRule(uneven="pad"))
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 0))
"""Set by torchrun; 0 of 0 under a controller."""


def batch(number: int) -> list[Tensor]:
    """Sequences of many lengths in which each number mostly follows from the previous one."""
    chance = random.Random(number)
    rows = []
    for _ in range(ROWS):
        ids = [chance.randrange(VOCAB)]
        for _ in range(chance.randrange(4, 60)):
            ids.append((3 * ids[-1] + 1) % VOCAB if chance.random() < 0.9 else 0)
        rows.append(torch.tensor(ids, dtype=torch.int32))
    return rows[RANK::WORLD_SIZE] if WORLD_SIZE else rows


@contextlib.contextmanager
def trainer(num_ranks: int, staleness: Staleness) -> Iterator[TrainController | PlainRank]:
    """A controller of `num_ranks` processes or, under torchrun, this process's rank."""
    settings = {"vocab_size": VOCAB, "learning_rate": 0.01, "seed": 0}
    writer = RoleSpec(make="examples.ranks.roles:Writer", settings=settings)
    plan = RankPlan(topology=Topology(WORLD_SIZE or num_ranks), roles={"writer": writer})
    if WORLD_SIZE:
        with PlainRank(plan, staleness) as rank:
            yield rank
        return
    with (
        contextlib.closing(TensorRuntime(PlaneSpec(), None)) as home,
        TrainController(plan, home, staleness=staleness) as controller,
    ):
        use(home.plane)
        print("ranks run as pids", *controller.pids())
        yield controller


def train(num_ranks: int, num_steps: int) -> None:
    """Print the loss of each step."""
    ahead = Ahead(batch, MAX_STALENESS)
    with trainer(num_ranks, ahead.staleness) as controller:
        for step in range(num_steps):
            rows = controller.take(current().remotize(ahead.next(step)), step)
            report = controller.call(TRAIN, rows)
            print_step(step, report, controller.end_step(step), controller.staleness)
            ahead.trained(step)
        unseen = current().remotize(batch(num_steps))
        surprises = controller.call(SCORE, unseen)
        worst = max(float(each.max()) for each in current().localize(surprises))
        held = controller.clear_batches(unseen, surprises)
    print_once(
        f"{held.num_cleared} shards of an unseen batch are freed; worst surprise {worst:.2f}"
    )


def print_step(
    step: int, report: dict[str, float], held: TensorUsage, staleness: Staleness | None
) -> None:
    """Print the line of a step."""
    left = sum(each.stored.total_bytes + each.buffered.total_bytes for each in held.processes)
    num_ready = staleness.ready if staleness else 0
    print_once(
        f"step {step:2d}  loss {report['loss']:.4f}  {report['num_tokens']:.0f} tokens  "
        f"{left} bytes left in {len(held.processes)} processes  {num_ready} batches drawn ahead"
    )


def print_once(line: str) -> None:
    """Print on rank 0 only."""
    if RANK == 0:
        print(line)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="train on several ranks")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    train(options.ranks, options.steps)


if __name__ == "__main__":
    main()
