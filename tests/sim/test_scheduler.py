"""Many pipelines on one fleet under faults: every one of them does its steps, and nothing is left.

A seed that ever failed is added to KEPT_SEEDS with what it found.
"""

import collections

import pytest

from rollmesh.testing.scheduler_sim.draws import Shape
from rollmesh.testing.scheduler_sim.faults import FleetFaults
from rollmesh.testing.scheduler_sim.fleet import simulate
from rollmesh.testing.scheduler_sim.plans import Boundary, TenantPlan
from rollmesh.wire.scheduling import GpuPriority, PipelineSpec

NUM_SEEDS = 200
SEEDS_PER_TEST = 50
KEPT_SEEDS = {
    216: "two that are not preemptible kept engines for which they had no demand, and both waited",
}
DELAYS = FleetFaults(slow=0.5)
"""Any message may take long, and overtake or be overtaken."""


def boundary(num: int, how: Boundary, *, num_steps: int = 5) -> Shape:
    """Pipelines whose training needs every GPU on which any of them generates."""
    gpus = (0, 1, 2, 3)
    phases = (("actor_train", GpuPriority.ACTOR_TRAINING, 1.0),)
    plans = tuple(
        TenantPlan(
            spec=PipelineSpec(
                pipeline_id=f"p{index}", clusters={"actor_train": gpus}, generation=gpus
            ),
            num_steps=num_steps,
            phases=phases,
            boundary=how,
        )
        for index in range(num)
    )
    return Shape(policy="fair", num_nodes=1, plans=plans)


@pytest.fixture(scope="module")
def seen() -> collections.Counter[str]:
    """Faults and transitions of all seeds; filled by the tests before the last one."""
    return collections.Counter()


@pytest.mark.parametrize("how", Boundary)
@pytest.mark.parametrize(("num", "seeds"), [(2, (0, 1, 2)), (5, (3,)), (8, (4,))])
def test_engine_is_awake_before_each_first_dispatch_at_the_rollout_boundary(
    num: int, seeds: tuple[int, ...], how: Boundary
) -> None:
    for seed in seeds:
        report = simulate(seed, faults=DELAYS, shape=boundary(num, how))
        assert report.num_dispatched == report.num_steps == num * 5
        assert report.num_granted_asleep == 0


@pytest.mark.parametrize("how", Boundary)
def test_pipeline_that_ends_early_does_not_wedge_the_other(how: Boundary) -> None:
    for seed in range(2):
        shape = boundary(2, how)
        first, other = shape.plans
        short = TenantPlan(
            spec=first.spec, num_steps=2, phases=first.phases, boundary=how, leaves=bool(seed % 2)
        )
        ended = Shape(policy="fair", num_nodes=1, plans=(short, other))
        report = simulate(seed, faults=DELAYS, shape=ended)
        assert report.num_steps == 2 + 5


def test_perfect_network_refuses_nobody_and_restarts_nothing() -> None:
    report = simulate(seed=1, faults=FleetFaults())
    assert report.num_lives == 1
    assert report.faults["waits_long"] == 0


def test_same_seed_gives_the_same_run() -> None:
    assert simulate(seed=7) == simulate(seed=7)


@pytest.mark.parametrize("seed", KEPT_SEEDS)
def test_kept_seed_comes_to_rest(seed: int) -> None:
    assert simulate(seed).num_steps > 0


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_every_pipeline_does_its_steps_under_faults(
    first: int, seen: collections.Counter[str]
) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        report = simulate(seed)
        assert report.num_dispatched >= report.num_steps
        seen.update(report.faults)
        seen.update(report.transitions.keys())
