"""Effects of operations on the state, and what PlanBuilder allows and rolls back."""

import pytest

from rollmesh.scheduler.planning.plan import (
    Expand,
    GpuReservation,
    Grant,
    PlanBuilder,
    ReleaseCluster,
    Shrink,
    apply,
    worker_name,
)
from rollmesh.scheduler.planning.state import FIXED, FleetState, NodePhase, Owner, PipelinePhase
from rollmesh.wire.scheduling import GENERATION_CLUSTER, GpuPriority, WorkerPhase
from tests.unit.scheduler.planning.fleets import (
    TRAIN,
    Idle,
    add,
    ask,
    carry_out,
    fleet,
    wake,
)


def test_a_worker_owns_its_gpus_from_its_expand_to_its_shrink() -> None:
    state = fleet(4)
    pipeline = add(state, "p", generation=range(4), tp=2)
    state.now_s = 1.0
    apply(state, Expand("p", 1))
    worker = pipeline.workers[1]
    assert (worker.phase, worker.since_s) == (WorkerPhase.WAKING, 1.0)
    assert state.owners == dict.fromkeys((2, 3), Owner("p", GENERATION_CLUSTER, 1))
    state.now_s = 2.0
    wake(state, "p", 1)
    apply(state, Shrink("p", 1, "release"))
    assert (worker.phase, worker.since_s) == (WorkerPhase.SLEEPING, 2.0)
    assert state.owners == {}


def test_a_cluster_holds_its_gpus_from_its_grant_to_its_release() -> None:
    state = fleet(2)
    pipeline = add(state, "p", train=(0, 1))
    key = ask(state, "p", priority=GpuPriority.CRITIC_TRAINING)
    state.now_s = 4.0
    apply(state, Grant(key))
    assert state.requests == {}
    hold = pipeline.holds[TRAIN]
    assert (hold.key, hold.priority, hold.since_s) == (key, GpuPriority.CRITIC_TRAINING, 4.0)
    assert state.owners == dict.fromkeys((0, 1), Owner("p", TRAIN, FIXED))
    pipeline.releasing[TRAIN] = "release"
    apply(state, ReleaseCluster("p", TRAIN))
    assert (pipeline.holds, pipeline.releasing, state.owners) == ({}, {}, {})


def test_a_worker_is_called_by_its_pipeline_and_rank() -> None:
    assert worker_name("p", 3) == "p/3"


def stage() -> FleetState:
    """p generates on 0, sleeps on 1; q trains on 2."""
    state = fleet(4)
    add(state, "p", generation=(0, 1), train=(1, 3))
    wake(state, "p", 0)
    add(state, "q", train=(2,))
    ask(state, "q")
    carry_out(state, Idle())
    return state


def view(builder: PlanBuilder) -> tuple[object, ...]:
    pipeline = builder.state.pipelines["p"]
    can = [
        (builder.can_shrink("p", worker), builder.can_expand("p", worker))
        for worker in pipeline.workers
    ]
    return (
        [builder.owner(gpu) for gpu in range(4)],
        can,
        builder.num_awake(pipeline),
        builder.ops[:],
    )


def test_operations_change_what_the_builder_sees_and_not_the_state() -> None:
    state = stage()
    builder = PlanBuilder(state)
    sleeper, waker = state.pipelines["p"].workers
    key = ask(state, "p")
    builder.shrink("p", sleeper, "p/1")
    builder.release("q", TRAIN)
    builder.expand("p", waker)
    assert builder.ops == [Shrink("p", 0, "p/1"), ReleaseCluster("q", TRAIN), Expand("p", 1)]
    owner = Owner("p", GENERATION_CLUSTER, 1)
    assert [builder.owner(gpu) for gpu in range(3)] == [None, owner, None]
    assert [builder.is_open(gpu) for gpu in range(3)] == [True, False, True]
    assert builder.num_awake(state.pipelines["p"]) == 1
    assert set(state.owners) == {0, 2}
    other = PlanBuilder(state)
    other.grant(key)
    assert other.owner(1) == other.owner(3) == Owner("p", TRAIN, FIXED)


def test_a_rollback_leaves_nothing() -> None:
    state = stage()
    key = ask(state, "p")
    sleeper, waker = state.pipelines["p"].workers
    builder = PlanBuilder(state)
    before = view(builder)
    mark = builder.mark()
    builder.shrink("p", sleeper, "p/1")
    middle, after_one = builder.mark(), view(builder)
    builder.expand("p", waker)
    builder.release("q", TRAIN)
    builder.rollback(middle)
    assert view(builder) == after_one
    builder.rollback(mark)
    builder.grant(key)
    assert builder.ops == [Grant(key)]
    builder.rollback(mark)
    assert view(builder) == before


def test_a_worker_moves_once_in_a_plan() -> None:
    state = stage()
    builder = PlanBuilder(state)
    sleeper, waker = state.pipelines["p"].workers
    builder.shrink("p", sleeper, "p/1")
    builder.expand("p", waker)
    for worker in (sleeper, waker):
        assert not builder.can_shrink("p", worker)
        assert not builder.can_expand("p", worker)
    with pytest.raises(AssertionError):
        builder.expand("p", sleeper)


@pytest.mark.parametrize(
    "phase", sorted(set(WorkerPhase) - {WorkerPhase.AWAKE, WorkerPhase.ASLEEP})
)
def test_a_worker_that_is_moving_or_lost_is_neither_shrunk_nor_expanded(phase: WorkerPhase) -> None:
    state = stage()
    state.move_worker("p", 0, phase)
    worker = state.pipelines["p"].workers[0]
    builder = PlanBuilder(state)
    assert not builder.can_shrink("p", worker)
    assert not builder.can_expand("p", worker)


def test_a_worker_whose_gpus_are_promised_to_another_is_not_shrunk_for_a_third() -> None:
    state = stage()
    state.owners[0] = Owner("q", TRAIN, FIXED)
    assert not PlanBuilder(state).can_shrink("p", state.pipelines["p"].workers[0])


@pytest.mark.parametrize("phase", sorted(set(NodePhase) - {NodePhase.UP}))
def test_nothing_starts_on_a_node_that_is_not_up(phase: NodePhase) -> None:
    state = stage()
    worker = state.pipelines["p"].workers[1]
    assert PlanBuilder(state).can_expand("p", worker)
    assert PlanBuilder(state).is_open(1)
    state.nodes["a"].phase = phase
    assert not PlanBuilder(state).can_expand("p", worker)
    assert not PlanBuilder(state).is_open(1)


@pytest.mark.parametrize("phase", sorted(set(PipelinePhase) - {PipelinePhase.ADMITTED}))
def test_nothing_of_a_pipeline_starts_that_is_not_admitted(phase: PipelinePhase) -> None:
    state = stage()
    state.pipelines["p"].phase = phase
    assert not PlanBuilder(state).can_expand("p", state.pipelines["p"].workers[1])


def test_generation_that_is_being_given_up_does_not_start() -> None:
    state = stage()
    state.pipelines["p"].releasing[GENERATION_CLUSTER] = "release"
    assert not PlanBuilder(state).can_expand("p", state.pipelines["p"].workers[1])


def test_the_quota_counts_what_the_plan_has_done_already() -> None:
    state = fleet(6)
    pipeline = add(state, "p", generation=range(6), tp=2, max_gpus=5)
    wake(state, "p", 0)
    builder = PlanBuilder(state)
    sleeper, second, third = pipeline.workers
    builder.expand("p", second)
    assert not builder.can_expand("p", third)
    builder.shrink("p", sleeper, "p/2")
    assert builder.can_expand("p", third)
    builder.rollback(0)
    assert builder.can_expand("p", third)


def test_of_two_reservations_each_must_allow() -> None:
    builder = PlanBuilder(fleet(1))
    builder.reserve((0,), GpuReservation("a", is_settling=False, awaited=frozenset({"p", "q"})))
    builder.reserve((0,), GpuReservation("b", is_settling=False, awaited=frozenset({"p"})))
    assert builder.may_start("p", 0, gives_way=False)
    assert not builder.may_start("q", 0, gives_way=False)
    assert builder.may_start("q", 0, gives_way=True)
    builder.reserve((0,), GpuReservation("c", is_settling=True))
    assert not builder.may_start("p", 0, gives_way=True)
