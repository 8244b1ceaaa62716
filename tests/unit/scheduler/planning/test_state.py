"""State of the planner: GPU ownership as workers move and nodes fail and return, the demand
history, and the index, which equals one that is computed from scratch.
"""

import copy
import math
import random

import pytest

from rollmesh.scheduler.planning.claims import read_claims, read_gpu_pools
from rollmesh.scheduler.planning.plan import Expand, Grant, PlanBuilder, apply
from rollmesh.scheduler.planning.planner import plan
from rollmesh.scheduler.planning.policies import make_policy
from rollmesh.scheduler.planning.state import (
    AWAKE_PHASES,
    FIXED,
    OWNING_PHASES,
    Availability,
    DemandHistory,
    FleetIndex,
    FleetState,
    GpuNode,
    NodePhase,
    Owner,
    StreamProgress,
)
from rollmesh.wire.scheduling import GENERATION_CLUSTER, WorkerPhase
from tests.unit.scheduler.planning.fleets import (
    TRAIN,
    Greedy,
    Idle,
    add,
    ask,
    carry_out,
    demand,
    fleet,
    settle,
    wake,
)
from tests.unit.scheduler.planning.histories import History


def phases(state: FleetState, pipeline_id: str) -> list[WorkerPhase]:
    return [worker.phase for worker in state.pipelines[pipeline_id].workers]


@pytest.mark.parametrize("phase", WorkerPhase)
def test_the_phase_of_a_worker_decides_whether_it_owns_its_gpus(phase: WorkerPhase) -> None:
    state = fleet(4)
    add(state, "p", generation=range(4), tp=2)
    wake(state, "p", 1)
    state.now_s = 3.0
    state.move_worker("p", 1, phase)
    owner = Owner("p", GENERATION_CLUSTER, 1)
    owns = {2: owner, 3: owner} if phase in OWNING_PHASES else {}
    assert state.owners == owns
    worker = state.pipelines["p"].workers[1]
    assert worker.since_s == (0.0 if phase is WorkerPhase.AWAKE else 3.0)


def test_a_lost_worker_does_not_own_gpus_promised_to_another() -> None:
    state = fleet(2)
    add(state, "p", train=(0,))
    add(state, "q", generation=(0, 1), tp=2)
    wake(state, "q", 0)
    ask(state, "p")
    carry_out(state, Idle())
    state.move_worker("q", 0, WorkerPhase.LOST)
    assert state.owners == {0: Owner("p", TRAIN, FIXED), 1: Owner("q", GENERATION_CLUSTER, 0)}
    state.move_worker("q", 0, WorkerPhase.ASLEEP)
    assert state.owners == {0: Owner("p", TRAIN, FIXED)}


def test_a_pipeline_waits_from_its_demand_until_a_worker_wakes() -> None:
    state = fleet(1)
    pipeline = add(state, "p", generation=(0,))
    state.now_s = 2.0
    demand(state, "p")
    waits_s = [pipeline.waiting_s]
    state.now_s = 3.0
    state.update_waiting(pipeline)
    waits_s.append(pipeline.waiting_s)
    carry_out(state, Greedy())
    waits_s.append(pipeline.waiting_s)
    state.move_worker("p", 0, WorkerPhase.LOST)
    waits_s.append(pipeline.waiting_s)
    pipeline.demand = None
    state.update_waiting(pipeline)
    assert [*waits_s, pipeline.waiting_s] == [2.0, 2.0, None, 3.0, None]


def test_a_removed_pipeline_leaves_nothing() -> None:
    state = fleet(4)
    add(state, "p", generation=(0, 1), train=(1, 2))
    add(state, "q", generation=(0, 3), train=(3,))
    wake(state, "p", 0)
    wake(state, "q", 1)
    state.move_worker("p", 1, WorkerPhase.LOST)
    ask(state, "p")
    key = ask(state, "q")
    state.remove_pipeline("p")
    assert state.owners == {3: Owner("q", GENERATION_CLUSTER, 1)}
    assert list(state.requests) == [key]
    assert list(state.pipelines) == ["q"]


# nodes


def two_nodes() -> FleetState:
    """p may generate on both nodes and q only on a; both have demand, r trains on a."""
    state = fleet(4, 2)
    add(state, "p", generation=(0, 1, 4, 5))
    add(state, "q", generation=(2,))
    add(state, "r", train=(3,))
    demand(state, "p")
    demand(state, "q")
    ask(state, "r")
    carry_out(state, Greedy())
    settle(state)
    return state


def test_workers_leave_a_draining_node_and_nothing_starts_there() -> None:
    state = two_nodes()
    state.drain_node("a")
    asleep = [WorkerPhase.ASLEEP, WorkerPhase.ASLEEP]
    carry_out(state, Greedy())
    settle(state)
    assert phases(state, "p") == [*asleep, WorkerPhase.AWAKE, WorkerPhase.AWAKE]
    assert phases(state, "q") == asleep[:1]
    assert plan(state, Greedy()).ops == ()
    assert state.owners[3].pipeline_id == "r", "a held cluster stays until it is released"


def test_workers_awake_on_a_dead_node_are_lost_with_their_gpus() -> None:
    state = two_nodes()
    state.move_worker("p", 1, WorkerPhase.SLEEPING)
    state.move_worker("q", 0, WorkerPhase.ASLEEP)
    state.lose_node("a")
    lost, awake = WorkerPhase.LOST, WorkerPhase.AWAKE
    assert phases(state, "p") == [lost, lost, awake, awake]
    assert phases(state, "q") == [WorkerPhase.ASLEEP]
    assert plan(state, Greedy()).ops == ()


def test_a_node_that_returns_has_its_gpus_and_lost_workers_stay_lost_until_reported() -> None:
    state = two_nodes()
    state.lose_node("a")
    state.add_node(GpuNode(name="a", gpus=(0, 1, 2, 3)))
    assert state.nodes["a"].phase is NodePhase.UP
    assert plan(state, Greedy()).ops == ()
    state.move_worker("p", 1, WorkerPhase.ASLEEP)
    assert plan(state, Greedy()).ops == (Expand("p", 1),)
    state.move_worker("p", 1, WorkerPhase.AWAKE)
    assert plan(state, Greedy()).ops == ()


def test_a_node_that_joins_later_is_used() -> None:
    state = fleet(1)
    add(state, "p", generation=(0, 1), train=(0, 1))
    demand(state, "p")
    assert plan(state, Greedy()).ops == (Expand("p", 0),)
    key = ask(state, "p")
    assert plan(state, Idle()).ops == ()
    state.add_node(GpuNode(name="b", gpus=(1, 2, 3)))
    assert plan(state, Idle()).ops == (Grant(key),)
    del state.requests[key]
    assert plan(state, Greedy()).ops == (Expand("p", 0), Expand("p", 1))


# progress


def test_progress_corrects_the_estimate_and_is_not_added_to_it() -> None:
    state = fleet(1)
    pipeline = add(state, "p", generation=(0,))
    counts = [pipeline.remaining]
    for estimate in (0, 8):
        demand(state, "p", estimate)
        counts.append(pipeline.remaining)
    pipeline.progress["train"] = StreamProgress(batch=1, target=10, completed=4)
    counts.append(pipeline.remaining)
    pipeline.progress["eval"] = StreamProgress(batch=1, target=3, completed=5)
    counts.append(pipeline.remaining)
    pipeline.progress["train"].is_retired = True
    assert [*counts, pipeline.remaining] == [0, None, 8, 6, 6, 0]


def step(demand_history: DemandHistory, begun_s: float, phases: tuple[float, ...]) -> None:
    """End the demand, grant a cluster after each of these times, and open it again after 100 s."""
    demand_history.note_ended(begun_s)
    for number, after_s in enumerate(phases):
        demand_history.note_granted(f"c{number}", 1, begun_s + after_s)
    demand_history.note_requested(64, begun_s + 100.0)


def test_the_newest_mark_predicts_as_in_the_last_step() -> None:
    demand_history = DemandHistory()
    step(demand_history, 0.0, (20.0, 60.0))
    demand_history.note_ended(1000.0)
    assert demand_history.expected_s == 1100.0
    demand_history.note_granted("c0", 1, 1050.0)
    assert demand_history.expected_s == 1130.0, "it waited for its GPUs, and is that much later"
    demand_history.note_granted("c1", 1, 1090.0)
    assert (demand_history.newest_mark_s, demand_history.expected_s, demand_history.estimate) == (
        1090.0,
        1130.0,
        64,
    )


def test_a_new_mark_predicts_nothing() -> None:
    demand_history = DemandHistory()
    assert demand_history.expected_s == math.inf
    demand_history.note_ended(0.0)
    assert demand_history.expected_s == math.inf
    demand_history.note_requested(64, 50.0)
    demand_history.note_ended(100.0)
    demand_history.note_granted("c0", 1, 110.0)
    assert demand_history.expected_s == math.inf
    demand_history.reset()
    assert demand_history.newest_mark_s is None


def test_grants_during_generation_predict_nothing() -> None:
    demand_history = DemandHistory()
    demand_history.note_granted("c0", 1, 5.0)
    assert demand_history.marks == {}
    demand_history.note_ended(10.0)
    demand_history.note_granted("c0", 1, 20.0)
    demand_history.note_granted("c0", 1, 30.0)
    demand_history.note_requested(64, 40.0)
    assert demand_history.until_s == {"ended": 30.0, "c0/1": 20.0}, "the first of a kind counts"


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
    """A fleet so large that shares continue from those of the last plan."""

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

    def add_or_remove_pipeline(self) -> None:
        """Open or close a demand, and request a cluster."""
        self.open_or_close_demand()
        pipeline = self.pipeline()
        asked = {each.pipeline_id for each in self.state.requests.values()}
        if pipeline and not pipeline.holds and pipeline.pipeline_id not in asked:
            ask(self.state, pipeline.pipeline_id)


def run_events(history: History, num: int) -> None:
    """Apply `num` events; after each, the plan equals that with a new index."""
    state, policy = history.state, make_policy("fair")
    for _ in range(num):
        history.apply_random_event()
        check_index(state)
        made = plan(state, policy)
        assert made == plan(with_new_index(state), policy)
        for op in made.ops:
            apply(state, op)
        for pipeline_id, credit in made.credits.items():
            state.pipelines[pipeline_id].credit_gpu_s = credit
        state.credited_s, state.fair_shares = state.now_s, made.fair_shares


@pytest.mark.parametrize("seed", range(15))
def test_an_index_equals_one_computed_from_scratch(seed: int) -> None:
    run_events(History(seed), 30)


@pytest.mark.parametrize("seed", range(3))
def test_in_a_large_fleet_a_kept_index_gives_the_same_plan_as_a_new_one(seed: int) -> None:
    history = WideHistory(seed)
    for name in list(history.state.pipelines)[::2]:
        demand(history.state, name)
    assert plan(history.state, make_policy("fair")).fair_shares is not None
    run_events(history, 25)


class ForgetsNothing(FleetIndex):
    """The fault: keep the results although the state has changed."""

    def update_availability(self, closed: set[int], kept: dict[int, str]) -> Availability:
        self.availability.closed, self.availability.exclusive = closed, kept
        return self.availability


@pytest.mark.parametrize("index_type", [FleetIndex, ForgetsNothing])
def test_held_gpus_are_not_usable_for_generation_whatever_was_kept(
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


def test_a_pipeline_that_reuses_a_name_has_its_own_bundles() -> None:
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
