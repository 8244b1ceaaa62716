"""The fleet of a seed: nodes, pipelines, and what each pipeline does step by step.

- The same seed draws the same fleet, whose pipelines can all finish if there are no faults.
- A plan is a value; lengths are drawn for each step.
"""

import enum
import random

import msgspec

from rollmesh.wire.scheduling import GpuPriority, PipelineSpec

SIGMA = 0.8
"""Standard deviation of the logarithm of lengths: the longest of sixteen takes some five times the
median.
"""


class Boundary(enum.StrEnum):
    """How a pipeline moves from its rollouts to its training and back."""

    CLEARS = "clears"
    """The end of its progress closes the demand; each cluster is requested and released."""
    CHAINS = "chains"
    """The pipeline exchanges one cluster for the next at once."""
    SIGNALS = "signals"
    """The pipeline keeps its engines while it trains, and announces each step."""


class PipelinePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline."""

    spec: PipelineSpec
    num_steps: int = 3
    num_rollouts: int = 8
    median_s: float = 1.5
    """Seconds of a rollout."""
    per_engine: int = 4
    """Rollouts that one engine samples at a time."""
    phases: tuple[tuple[str, GpuPriority, float], ...] = ()
    """Training: cluster, priority, seconds."""
    boundary: Boundary = Boundary.CLEARS
    says_estimate: bool = True
    starts_s: float = 0.0
    leaves: bool = True
    """Whether it is unregistered when it is done."""

    def lengths(self, rng: random.Random) -> list[float]:
        """Draw the seconds of each rollout of a step."""
        return [
            self.median_s * rng.lognormvariate(0.0, SIGMA)  # long tails
            for _ in range(self.num_rollouts)
        ]


GPUS_A_NODE = 4
POLICIES = ("fair", "fair", "gap-ratio")
LATER = (
    ("critic", GpuPriority.CRITIC_TRAINING),
    ("reference", GpuPriority.REF_LOG_PROBS),
)


class FleetDraw(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet and its pipelines."""

    policy: str
    num_nodes: int
    plans: tuple[PipelinePlan, ...]


def draw(seed: int) -> FleetDraw:
    """Draw two to eight pipelines on one or two nodes of four GPUs."""
    rng = random.Random(seed * 7919 + 1)
    num_nodes = rng.choice((1, 1, 2))
    num = rng.choice((2, 2, 3, 4, 5, 8))
    tp = rng.choice((1, 1, 1, 2))
    plans = [_plan(rng, f"p{index}", num_nodes, tp) for index in range(num)]
    return FleetDraw(policy=rng.choice(POLICIES), num_nodes=num_nodes, plans=tuple(plans))


def _plan(rng: random.Random, name: str, num_nodes: int, tp: int) -> PipelinePlan:
    gpus = tuple(range(num_nodes * GPUS_A_NODE))
    generation = _some(rng, gpus, tp) if rng.random() < 0.4 else gpus
    phases = [("actor_train", GpuPriority.ACTOR_TRAINING, rng.uniform(0.5, 3.0))]
    if rng.random() < 0.4:
        cluster, priority = rng.choice(LATER)
        phases.insert(0, (cluster, priority, rng.uniform(0.3, 1.5)))
    clusters = {cluster: _some(rng, gpus, 1) for cluster, _, _ in phases}
    boundary = rng.choice(tuple(Boundary))
    # Two pipelines that keep engines without preemption and wait for each other's would deadlock.
    gives_way = boundary is Boundary.SIGNALS or rng.random() < 0.9
    spec = PipelineSpec(
        pipeline_id=name,
        clusters=clusters,
        generation=generation,
        tp=tp,
        weight=rng.choice((1.0, 1.0, 2.0)),
        max_gpus=rng.choice((0, 0, 0, 2 * tp)),
        is_preemptible=gives_way,
        rollouts_per_worker=rng.choice((0, 4)),
    )
    return PipelinePlan(
        spec=spec,
        num_steps=rng.choice((2, 3)),
        num_rollouts=rng.choice((4, 8, 12)),
        phases=tuple(phases),
        boundary=boundary,
        says_estimate=rng.random() < 0.8,
        starts_s=rng.choice((0.0, 0.0, 2.0, 6.0)),
        leaves=rng.random() < 0.7,
    )


def _some(rng: random.Random, gpus: tuple[int, ...], unit: int) -> tuple[int, ...]:
    """Return neighbouring GPUs, in whole units."""
    num = unit * rng.randint(1, len(gpus) // unit)
    start = unit * rng.randint(0, (len(gpus) - num) // unit)
    return gpus[start : start + num]
