"""What fleet a seed has: nodes, pipelines, and how each of these works.

Invariants: the same seed draws the same; what is drawn can come to its end on a fleet without
faults. Driven by fleet.py.
"""

import random

import msgspec

from rollmesh.testing.scheduler_sim.plans import Boundary, TenantPlan
from rollmesh.wire.scheduling import GpuPriority, PipelineSpec

GPUS_A_NODE = 4
POLICIES = ("fair", "fair", "gap-ratio")
LATER = (
    ("critic", GpuPriority.CRITIC_TRAINING),
    ("reference", GpuPriority.REF_LOG_PROBS),
)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet and its tenants."""

    policy: str
    num_nodes: int
    plans: tuple[TenantPlan, ...]


def draw(seed: int) -> Shape:
    """Two to eight pipelines on one or two nodes of four GPUs."""
    rng = random.Random(seed * 7919 + 1)
    num_nodes = rng.choice((1, 1, 2))
    num = rng.choice((2, 2, 3, 4, 5, 8))
    tp = rng.choice((1, 1, 1, 2))
    plans = [_plan(rng, f"p{index}", num_nodes, tp) for index in range(num)]
    return Shape(policy=rng.choice(POLICIES), num_nodes=num_nodes, plans=tuple(plans))


def _plan(rng: random.Random, name: str, num_nodes: int, tp: int) -> TenantPlan:
    gpus = tuple(range(num_nodes * GPUS_A_NODE))
    generation = _some(rng, gpus, tp) if rng.random() < 0.4 else gpus
    phases = [("actor_train", GpuPriority.ACTOR_TRAINING, rng.uniform(0.5, 3.0))]
    if rng.random() < 0.4:
        cluster, priority = rng.choice(LATER)
        phases.insert(0, (cluster, priority, rng.uniform(0.3, 1.5)))
    clusters = {cluster: _some(rng, gpus, 1) for cluster, _, _ in phases}
    boundary = rng.choice(tuple(Boundary))
    # Two that keep engines which nobody may take, and wait for each other's, wait for ever.
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
    return TenantPlan(
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
    """Neighbours, in whole units."""
    num = unit * rng.randint(1, len(gpus) // unit)
    start = unit * rng.randint(0, (len(gpus) - num) // unit)
    return gpus[start : start + num]
