"""The index kept between plans equals one computed from scratch."""

import copy
import random

import pytest

from rollmesh.scheduler.planning.claims import read_claims, read_gpu_pools
from rollmesh.scheduler.planning.plan import Grant, PlanBuilder, apply
from rollmesh.scheduler.planning.planner import plan
from rollmesh.scheduler.planning.policies import make_policy
from rollmesh.scheduler.planning.state import (
    AWAKE_PHASES,
    Availability,
    FleetIndex,
    FleetState,
    GpuNode,
)
from rollmesh.wire.scheduling import WorkerPhase
from tests.unit.scheduler.planning.fleets import add, ask, demand
from tests.unit.scheduler.planning.histories import History

NUM_NODES, NODE_GPUS = 70, 2


def with_new_index(state: FleetState) -> FleetState:
    """Return the state with an index that knows only the registered pipelines."""
    other = copy.deepcopy(state)
    other.index = FleetIndex()
    for name, pipeline in other.pipelines.items():
        other.index.add(name, pipeline.spec.generation)
    return other


def check_index(state: FleetState) -> None:
    other = with_new_index(state)
    assert state.index.cells() == other.index.cells()
    claims, others = read_claims(PlanBuilder(state)), read_claims(PlanBuilder(other))
    assert claims == others
    assert read_gpu_pools(state, claims) == read_gpu_pools(other, others)
    for pipeline in state.pipelines.values():
        phases = [worker.phase for worker in pipeline.workers]
        assert pipeline.num_awake == sum(each in AWAKE_PHASES for each in phases)
        assert pipeline.num_lost == phases.count(WorkerPhase.LOST)


class WideHistory(History):
    """Enough nodes that shares continue from those of the last plan."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.state = FleetState()
        self._num_added = 0
        for number in range(NUM_NODES):
            gpus = tuple(range(number * NODE_GPUS, (number + 1) * NODE_GPUS))
            self.state.add_node(GpuNode(name=f"n{number}", gpus=gpus))
        for number in range(24):
            nodes = sorted(self.rng.sample(range(NUM_NODES), 12))
            gpus = tuple(gpu for each in nodes for gpu in self.state.nodes[f"n{each}"].gpus)
            tp = self.rng.choice((1, 2))
            add(self.state, f"p{number}", gpus, tp, train=gpus[:3], rollouts_per_worker=1)

    def come_or_go(self) -> None:
        """Open or close a demand, and request a cluster."""
        self.open_or_close()
        pipeline = self.pipeline()
        asked = {each.pipeline_id for each in self.state.requests.values()}
        if pipeline and not pipeline.holds and pipeline.pipeline_id not in asked:
            ask(self.state, pipeline.pipeline_id)


def lead(history: History, num: int) -> None:
    """Apply `num` events; after each, the plan equals that with a new index."""
    state, policy = history.state, make_policy("fair")
    for _ in range(num):
        history.happen()
        check_index(state)
        made = plan(state, policy)
        assert made == plan(with_new_index(state), policy)
        for op in made.ops:
            apply(state, op)
        for pipeline_id, credit in made.credits.items():
            state.pipelines[pipeline_id].credit_gpu_s = credit
        state.credited_s, state.fair_shares = state.now_s, made.fair_shares


@pytest.mark.parametrize("seed", range(15))
def test_an_index_is_what_would_be_with_new_index(seed: int) -> None:
    lead(History(seed), 30)


@pytest.mark.parametrize("seed", range(3))
def test_in_a_large_fleet_the_same_state_gives_the_same_plan_whatever_is_kept(seed: int) -> None:
    history = WideHistory(seed)
    for name in list(history.state.pipelines)[::2]:
        demand(history.state, name)
    assert plan(history.state, make_policy("fair")).fair_shares is not None
    lead(history, 25)


class ForgetsNothing(FleetIndex):
    """The fault: keep the results although the state has changed."""

    def update_availability(self, closed: set[int], kept: dict[int, str]) -> Availability:
        self.availability.closed, self.availability.exclusive = closed, kept
        return self.availability


@pytest.mark.parametrize("index_type", [FleetIndex, ForgetsNothing])
def test_held_gpus_are_not_for_generation_whatever_was_kept(
    index_type: type[FleetIndex],
) -> None:
    state = FleetState(index=index_type())
    state.add_node(GpuNode(name="a", gpus=(0, 1)))
    add(state, "p", (0, 1), train=(0,))
    demand(state, "p")
    assert len(read_claims(PlanBuilder(state))[0].bundles) == 2
    apply(state, Grant(ask(state, "p")))
    bundles = read_claims(PlanBuilder(state))[0].bundles
    assert (len(bundles) == 1) == (index_type is FleetIndex)


def test_a_pipeline_that_comes_again_under_its_name_is_another() -> None:
    state = FleetState()
    state.add_node(GpuNode(name="a", gpus=(0, 1, 2, 3)))
    for gpus in ((0, 1), (2, 3)):
        add(state, "p", gpus)
        demand(state, "p")
        check_index(state)
        assert [each.gpus for each in read_claims(PlanBuilder(state))[0].bundles] == [
            (gpu,) for gpu in gpus
        ]
        state.remove_pipeline("p")
