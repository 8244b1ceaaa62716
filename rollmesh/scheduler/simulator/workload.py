"""Traces drawn from a few parameters: pipelines of agents' reinforcement learning on one fleet.

Owns the parameters of the published results, which were fixed before any policy was tuned to them.
Invariant: a trace is a function of shape, number of pipelines and seed. Driven by
benchmarks/_scheduler_results.py and by `rollmesh scheduler simulate`.

Where the shapes are from, and what is assumed:

    tails     lognormal, the longest of a thousand some ten medians, as the abstract of DARTS (arXiv
              2605.30859) tells of reasoning and agents' rollouts; sigma 0.6 to 0.9 puts the 99th
              percentile at 4 to 8 medians, and a context's end cuts at 8
    a step    60 to 80 % of it is rollouts where nobody shares (a tutorial says about 70), the rest
              log-probs and training on the fixed set, and scoring that needs no GPU: assumed
    sets      each pipeline has a block of the fleet where it trains, on a quarter or half of it,
              and generates on all GPUs, as rlix's canonical topology does
    sizes     steps of 128 to 512 rollouts, two long contexts at a time for each GPU of a worker;
              pipelines come within half an hour, and stay for 6 to 18 steps
    switches  20 s, see trace.Costs

A step can never be shorter than its longest rollout and its phases, whatever the fleet: in `even`,
where all are alike and always there, that leaves little to win. In `scarce` there are half as many
engines as pipelines, since each takes a whole node: some wait, and no partition gives all a part.
"""

import math
import random

import msgspec

from rollmesh.scheduler.simulator.trace import Costs, Lengths, Phase, Trace, TracePipeline
from rollmesh.wire.scheduling import GpuPriority


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Pairs are the ends of a uniform draw, one for each pipeline; other tuples are choices."""

    block_gpus: int = 8
    """Of the fleet, for each pipeline."""
    node_gpus: int = 8
    train_gpus: tuple[int, ...] = (2, 2, 4)
    tp: tuple[int, ...] = (1, 2, 2, 4)
    rollouts_per_gpu: int = 2
    rollouts_per_step: tuple[int, ...] = (128, 256, 512)
    median_s: tuple[float, float] = (20.0, 40.0)
    sigma: tuple[float, float] = (0.6, 0.9)
    cap_medians: float = 8.0
    train_share: tuple[float, float] = (0.2, 0.5)
    """Seconds of log-probs and training, of what the rollouts take a full block."""
    scoring_share: tuple[float, float] = (0.1, 0.2)
    """The same of what needs no GPU."""
    arrival_s: tuple[float, float] = (0.0, 1800.0)
    num_steps: tuple[int, int] = (6, 18)
    costs: Costs = Costs()


SHAPES = {
    "mixed": Shape(),
    "even": Shape(
        train_gpus=(2,),
        tp=(2,),
        rollouts_per_step=(256,),
        median_s=(30.0, 30.0),
        sigma=(0.75, 0.75),
        train_share=(0.35, 0.35),
        scoring_share=(0.15, 0.15),
        arrival_s=(0.0, 0.0),
        num_steps=(12, 12),
    ),
    "scarce": Shape(
        block_gpus=4, train_gpus=(2,), tp=(8,), rollouts_per_step=(64, 128, 256), num_steps=(4, 12)
    ),
}
LOG_PROBS_SHARE = 0.2
"""Of log-probs and training together."""


def generate(shape: Shape, num_pipelines: int, seed: int) -> Trace:
    """A fleet of as many blocks as pipelines."""
    chance = random.Random(f"{seed}/{num_pipelines}")
    blocks = range(num_pipelines)
    num_nodes, rest = divmod(shape.block_gpus * num_pipelines, shape.node_gpus)
    assert rest == 0, "blocks of so many pipelines fill no whole nodes"
    return Trace(
        name=f"{num_pipelines} pipelines, seed {seed}",
        nodes=(shape.node_gpus,) * num_nodes,
        pipelines=tuple(_pipeline(shape, num_pipelines, block, chance) for block in blocks),
        costs=shape.costs,
        seed=seed,
    )


def _pipeline(shape: Shape, num_blocks: int, block: int, chance: random.Random) -> TracePipeline:
    first = block * shape.block_gpus
    train = range(first, first + chance.choice(shape.train_gpus))
    tp = chance.choice(shape.tp)
    rollouts = chance.choice(shape.rollouts_per_step)
    median_s, sigma = chance.uniform(*shape.median_s), chance.uniform(*shape.sigma)
    lengths = Lengths(round(median_s, 1), round(sigma, 2), round(median_s * shape.cap_medians, 1))
    mean_s = median_s * math.exp(sigma**2 / 2)
    bulk_s = rollouts * mean_s / (shape.block_gpus * shape.rollouts_per_gpu)
    return TracePipeline(
        pipeline_id=f"p{block}",
        clusters={"actor_train": tuple(train)},
        generation=tuple(range(num_blocks * shape.block_gpus)),
        tp=tp,
        rollouts_per_worker=tp * shape.rollouts_per_gpu,
        arrival_s=round(chance.uniform(*shape.arrival_s), 1),
        num_steps=chance.randint(*shape.num_steps),
        rollouts_per_step=rollouts,
        lengths=lengths,
        phases=_phases(shape, bulk_s, chance),
    )


def _phases(shape: Shape, bulk_s: float, chance: random.Random) -> tuple[Phase, ...]:
    fixed_s = bulk_s * chance.uniform(*shape.train_share)
    log_probs_s = fixed_s * LOG_PROBS_SHARE
    train = "actor_train"
    return (
        Phase("", round(bulk_s * chance.uniform(*shape.scoring_share), 1)),
        Phase(train, round(log_probs_s, 1), GpuPriority.OLD_LOG_PROBS),
        Phase(train, round(fixed_s - log_probs_s, 1), GpuPriority.ACTOR_TRAINING),
    )
