"""Trains on several ranks: the controller moves handles, ranks fetch what is theirs.

    python -m examples.ranks.train --ranks 2

The curve is the same for any number of ranks, and after each step nothing of its batch is left in
any process.
"""

import argparse
import contextlib
import random

import torch
from torch import Tensor

from rollmesh.tensors.plane import use
from rollmesh.trainer.controller.answers import Reduce
from rollmesh.trainer.controller.controller import Call, Held, RankPlan, TrainController
from rollmesh.trainer.controller.dispatch import Rule
from rollmesh.trainer.controller.household import Household
from rollmesh.trainer.controller.spec import PlaneSpec, RoleSpec
from rollmesh.trainer.controller.topology import Topology

VOCAB = 17
ROWS = 10
TRAIN = Call(
    "writer.train",
    rule=Rule(uneven="pad"),
    reduce=Reduce(rules={"loss": "sum", "num_tokens": "sum"}),
)
SCORE = Call("writer.score", rule=Rule(uneven="pad"))


def batch(step: int) -> list[Tensor]:
    """Sequences of many lengths in which each number, most of the time, follows from the last."""
    chance = random.Random(step)
    rows = []
    for _ in range(ROWS):
        ids = [chance.randrange(VOCAB)]
        for _ in range(chance.randrange(4, 60)):
            ids.append((3 * ids[-1] + 1) % VOCAB if chance.random() < 0.9 else 0)
        rows.append(torch.tensor(ids, dtype=torch.int32))
    return rows


def train(num_ranks: int, num_steps: int) -> list[float]:
    """The loss of each step."""
    settings = {"vocab_size": VOCAB, "learning_rate": 0.01, "seed": 0}
    writer = RoleSpec(make="examples.ranks.roles:Writer", settings=settings)
    plan = RankPlan(topology=Topology(num_ranks), roles={"writer": writer})
    losses = []
    with (
        contextlib.closing(Household(PlaneSpec(), None)) as home,
        TrainController(plan, home) as controller,
    ):
        use(home.plane)
        print("ranks run as pids", *controller.pids())
        for step in range(num_steps):
            rows = controller.take(home.plane.remotize(batch(step)), step)
            report = controller.call(TRAIN, rows)
            told(step, report, controller.end_step(step))
            losses.append(report["loss"])
        unseen = home.plane.remotize(batch(num_steps))
        surprises = controller.call(SCORE, unseen)
        worst = max(float(each.max()) for each in home.plane.localize(surprises))
        held = controller.clear_batches(unseen, surprises)
        print(f"{held.num_cleared} shards of an unseen batch are freed; worst surprise {worst:.2f}")
    return losses


def told(step: int, report: dict[str, float], held: Held) -> None:
    """A line of a step."""
    left = sum(each.stored.total_bytes + each.buffered.total_bytes for each in held.processes)
    print(
        f"step {step:2d}  loss {report['loss']:.4f}  {report['num_tokens']:.0f} tokens  "
        f"{left} bytes left in {len(held.processes)} processes"
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="train on several ranks")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    train(options.ranks, options.steps)


if __name__ == "__main__":
    main()
