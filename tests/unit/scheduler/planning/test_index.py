"""What is kept from plan to plan is what would be found anew, whatever happens in between."""

import copy
import random

import pytest

from rollmesh.scheduler.planning.draft import Draft
from rollmesh.scheduler.planning.index import Ground, Index
from rollmesh.scheduler.planning.ops import Grant, apply
from rollmesh.scheduler.planning.plan import plan
from rollmesh.scheduler.planning.policies import by_name
from rollmesh.scheduler.planning.policies.claims import read_basins, read_claims
from rollmesh.scheduler.planning.state import AWAKE_PHASES, Node, State
from rollmesh.wire.scheduling import WorkerPhase
from tests.unit.scheduler.planning.fleets import add, ask, demand
from tests.unit.scheduler.planning.histories import History

NUM_NODES, NODE_GPUS = 70, 2


def found_anew(state: State) -> State:
    """The same, with an index that knows nothing but who is registered."""
    other = copy.deepcopy(state)
    other.index = Index()
    for name, pipeline in other.pipelines.items():
        other.index.add(name, pipeline.spec.generation)
    return other


def check_index(state: State) -> None:
    other = found_anew(state)
    assert state.index.cells() == other.index.cells()
    claims, others = read_claims(Draft(state)), read_claims(Draft(other))
    assert claims == others
    assert read_basins(state, claims) == read_basins(other, others)
    for pipeline in state.pipelines.values():
        phases = [worker.phase for worker in pipeline.workers]
        assert pipeline.num_awake == sum(each in AWAKE_PHASES for each in phases)
        assert pipeline.num_lost == phases.count(WorkerPhase.LOST)


class WideHistory(History):
    """Of so many nodes that shares go on from those of the last plan."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.state = State()
        self._num_added = 0
        for number in range(NUM_NODES):
            gpus = tuple(range(number * NODE_GPUS, (number + 1) * NODE_GPUS))
            self.state.add_node(Node(name=f"n{number}", gpus=gpus))
        for number in range(24):
            nodes = sorted(self.rng.sample(range(NUM_NODES), 12))
            gpus = tuple(gpu for each in nodes for gpu in self.state.nodes[f"n{each}"].gpus)
            tp = self.rng.choice((1, 2))
            add(self.state, f"p{number}", gpus, tp, train=gpus[:3], rollouts_per_worker=1)

    def come_or_go(self) -> None:
        """One demand opens or closes, and a cluster is asked for."""
        self.open_or_close()
        pipeline = self.pipeline()
        asked = {each.pipeline_id for each in self.state.requests.values()}
        if pipeline and not pipeline.holds and pipeline.pipeline_id not in asked:
            ask(self.state, pipeline.pipeline_id)


def lead(history: History, num: int) -> None:
    """So many things happen, and a plan is carried out after each that is the one found anew."""
    state, policy = history.state, by_name("fair")
    for _ in range(num):
        history.happen()
        check_index(state)
        made = plan(state, policy)
        assert made == plan(found_anew(state), policy)
        for op in made.ops:
            apply(state, op)
        for pipeline_id, credit in made.credits.items():
            state.pipelines[pipeline_id].credit_gpu_s = credit
        state.credited_s, state.water = state.now_s, made.water


@pytest.mark.parametrize("seed", range(15))
def test_an_index_is_what_would_be_found_anew(seed: int) -> None:
    lead(History(seed), 30)


@pytest.mark.parametrize("seed", range(3))
def test_in_a_large_fleet_the_same_state_gives_the_same_plan_whatever_is_kept(seed: int) -> None:
    history = WideHistory(seed)
    for name in list(history.state.pipelines)[::2]:
        demand(history.state, name)
    assert plan(history.state, by_name("fair")).water is not None
    lead(history, 25)


class ForgetsNothing(Index):
    """Keeps what it found, though the ground is another now."""

    def move_ground(self, closed: set[int], kept: dict[int, str]) -> Ground:
        self.ground.closed, self.ground.kept = closed, kept
        return self.ground


@pytest.mark.parametrize("index_type", [Index, ForgetsNothing])
def test_what_is_held_is_nobodys_to_generate_on_whatever_was_kept(index_type: type[Index]) -> None:
    state = State(index=index_type())
    state.add_node(Node(name="a", gpus=(0, 1)))
    add(state, "p", (0, 1), train=(0,))
    demand(state, "p")
    assert len(read_claims(Draft(state))[0].bundles) == 2
    apply(state, Grant(ask(state, "p")))
    bundles = read_claims(Draft(state))[0].bundles
    assert (len(bundles) == 1) == (index_type is Index)


def test_a_pipeline_that_comes_again_under_its_name_is_another() -> None:
    state = State()
    state.add_node(Node(name="a", gpus=(0, 1, 2, 3)))
    for gpus in ((0, 1), (2, 3)):
        add(state, "p", gpus)
        demand(state, "p")
        check_index(state)
        assert [each.gpus for each in read_claims(Draft(state))[0].bundles] == [
            (gpu,) for gpu in gpus
        ]
        state.remove_pipeline("p")
