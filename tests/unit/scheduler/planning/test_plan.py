"""Operations of a plan: their effect, what PlanBuilder allows and rolls back, and the proof."""

from collections.abc import Callable

import msgspec
import pytest

from rollmesh.scheduler.planning.invariants import Invariant, PlanError, validate
from rollmesh.scheduler.planning.plan import (
    Expand,
    GpuReservation,
    Grant,
    Op,
    PlanBuilder,
    ReleaseCluster,
    Shrink,
    ShrinkReason,
    apply,
    worker_name,
)
from rollmesh.scheduler.planning.planner import plan
from rollmesh.scheduler.planning.state import (
    FIXED,
    FleetState,
    GpuHold,
    NodePhase,
    Owner,
    PipelinePhase,
)
from rollmesh.wire.scheduling import GENERATION_CLUSTER, GpuPriority, WorkerPhase
from tests.unit.scheduler.planning.fleets import (
    TRAIN,
    Greedy,
    Idle,
    add,
    ask,
    carry_out,
    demand,
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


def test_a_worker_is_named_by_its_pipeline_and_rank() -> None:
    assert worker_name("p", 3) == "p/3"


def generating_and_training() -> FleetState:
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
    state = generating_and_training()
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


def test_a_rollback_undoes_every_operation() -> None:
    state = generating_and_training()
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
    state = generating_and_training()
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
    state = generating_and_training()
    state.move_worker("p", 0, phase)
    worker = state.pipelines["p"].workers[0]
    builder = PlanBuilder(state)
    assert not builder.can_shrink("p", worker)
    assert not builder.can_expand("p", worker)


def test_a_worker_whose_gpus_are_promised_to_another_is_not_shrunk_for_a_third() -> None:
    state = generating_and_training()
    state.owners[0] = Owner("q", TRAIN, FIXED)
    assert not PlanBuilder(state).can_shrink("p", state.pipelines["p"].workers[0])


@pytest.mark.parametrize("phase", sorted(set(NodePhase) - {NodePhase.UP}))
def test_nothing_starts_on_a_node_that_is_not_up(phase: NodePhase) -> None:
    state = generating_and_training()
    worker = state.pipelines["p"].workers[1]
    assert PlanBuilder(state).can_expand("p", worker)
    assert PlanBuilder(state).is_open(1)
    state.nodes["a"].phase = phase
    assert not PlanBuilder(state).can_expand("p", worker)
    assert not PlanBuilder(state).is_open(1)


@pytest.mark.parametrize("phase", sorted(set(PipelinePhase) - {PipelinePhase.ADMITTED}))
def test_nothing_starts_of_a_pipeline_that_is_not_admitted(phase: PipelinePhase) -> None:
    state = generating_and_training()
    state.pipelines["p"].phase = phase
    assert not PlanBuilder(state).can_expand("p", state.pipelines["p"].workers[1])


def test_generation_that_is_being_given_up_does_not_start() -> None:
    state = generating_and_training()
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


def test_each_of_two_reservations_must_allow_a_start() -> None:
    builder = PlanBuilder(fleet(1))
    builder.reserve((0,), GpuReservation("a", is_settling=False, awaited=frozenset({"p", "q"})))
    builder.reserve((0,), GpuReservation("b", is_settling=False, awaited=frozenset({"p"})))
    assert builder.may_start("p", 0, gives_way=False)
    assert not builder.may_start("q", 0, gives_way=False)
    assert builder.may_start("q", 0, gives_way=True)
    builder.reserve((0,), GpuReservation("c", is_settling=True))
    assert not builder.may_start("p", 0, gives_way=True)


ASKED = "p-actor_train-1"


def three_pipelines() -> FleetState:
    """p generates on 0 and 1, could on 2 and 3, and requests 0 and 1 to train; q generates on 4 and
    could on 5; r trains on 6.
    """
    state = fleet(8)
    add(state, "p", generation=(0, 1, 2, 3), train=(0, 1))
    add(state, "q", generation=(4, 5))
    add(state, "r", generation=(4, 5), train=(6,))
    wake(state, "p", 0, 1)
    wake(state, "q", 0)
    assert ask(state, "p") == ASKED
    hold(state, "r", TRAIN)
    return state


def hold(state: FleetState, pipeline_id: str, cluster: str) -> None:
    pipeline = state.pipelines[pipeline_id]
    pipeline.holds[cluster] = GpuHold(
        key="held", cluster=cluster, priority=GpuPriority.ACTOR_TRAINING, since_s=0.0
    )
    for gpu in pipeline.spec.clusters[cluster]:
        state.owners[gpu] = Owner(pipeline_id, cluster, -1)


GOOD: tuple[Op, ...] = (
    Shrink("p", 0, ASKED),
    Shrink("p", 1, ASKED),
    Grant(ASKED),
    Expand("p", 2),
    Expand("q", 1),
)


def nothing(state: FleetState) -> None:
    """Leave the state as it is."""


def remap(state: FleetState) -> None:
    worker = state.pipelines["p"].workers[2]
    worker.gpus = (7,)


def double(state: FleetState) -> None:
    spec = state.pipelines["p"].spec
    state.pipelines["p"].spec = msgspec.structs.replace(spec, clusters={TRAIN: (0, 0)})


def one_too_many(state: FleetState) -> None:
    pipeline = state.pipelines["p"]
    pipeline.workers.append(msgspec.structs.replace(pipeline.workers[3], rank=4))


def lose_gpu(state: FleetState) -> None:
    del state.node_of[2]


def ask_for_generation(state: FleetState) -> None:
    request = state.requests[ASKED]
    state.requests[ASKED] = msgspec.structs.replace(request, cluster=GENERATION_CLUSTER)


def ask_for_another(state: FleetState) -> None:
    request = state.requests[ASKED]
    state.requests[ASKED] = msgspec.structs.replace(request, cluster="critic")


def forget_hold(state: FleetState) -> None:
    del state.owners[6]


def promise_elsewhere(state: FleetState) -> None:
    state.owners[0] = Owner("r", TRAIN, -1)


def keep(state: FleetState) -> None:
    spec = state.pipelines["q"].spec
    state.pipelines["q"].spec = msgspec.structs.replace(spec, is_preemptible=False)
    demand(state, "q")


def limit(state: FleetState) -> None:
    spec = state.pipelines["q"].spec
    state.pipelines["q"].spec = msgspec.structs.replace(spec, max_gpus=1)


def drain(state: FleetState) -> None:
    state.nodes["a"].phase = NodePhase.DRAINING


def quarantine(state: FleetState) -> None:
    state.pipelines["p"].phase = PipelinePhase.QUARANTINED


def register_q(state: FleetState) -> None:
    state.pipelines["q"].phase = PipelinePhase.REGISTERED


def grant_generation(state: FleetState) -> None:
    ask_for_generation(state)
    spec = state.pipelines["p"].spec
    clusters = {**spec.clusters, GENERATION_CLUSTER: (0, 1)}
    state.pipelines["p"].spec = msgspec.structs.replace(spec, clusters=clusters)


Tamper = Callable[[FleetState], None]
CASES: list[tuple[Invariant, Tamper, tuple[Op, ...]]] = [
    (Invariant.ONE_OP_EACH, nothing, (Shrink("p", 0, ASKED), *GOOD)),
    (Invariant.ONE_OP_EACH, nothing, (*GOOD, Expand("p", 2))),
    (Invariant.ONE_OP_EACH, nothing, (*GOOD, Grant(ASKED))),
    (Invariant.ONE_OP_EACH, nothing, (ReleaseCluster("r", TRAIN), ReleaseCluster("r", TRAIN))),
    (Invariant.ONE_OP_EACH, lambda state: hold(state, "p", TRAIN), (Grant(ASKED),)),
    (Invariant.ELASTIC_IS_GENERATION, nothing, (Expand("p", 4),)),
    (Invariant.ELASTIC_IS_GENERATION, nothing, (Shrink("p", -1, ASKED),)),
    (Invariant.ELASTIC_IS_GENERATION, nothing, (ReleaseCluster("p", GENERATION_CLUSTER),)),
    (Invariant.ELASTIC_IS_GENERATION, grant_generation, GOOD),
    (Invariant.ONE_WAY, nothing, (*GOOD, Expand("p", 0))),
    (Invariant.ONE_WAY, nothing, (*GOOD, Shrink("p", 2, ASKED))),
    (Invariant.ONE_WAY, nothing, (*GOOD, ReleaseCluster("p", TRAIN))),
    (Invariant.TAKES_FREE, nothing, (Grant(ASKED),)),
    (Invariant.TAKES_FREE, nothing, (Expand("r", 0),)),
    (Invariant.IS_SETTLED, nothing, (Shrink("q", 1, ShrinkReason.QUOTA),)),
    (Invariant.IS_SETTLED, nothing, (Expand("q", 0),)),
    (Invariant.WHOLE_BUNDLE, remap, (Expand("p", 2),)),
    (Invariant.WHOLE_BUNDLE, double, (*GOOD[:3],)),
    (Invariant.WITHIN_MAPPING, one_too_many, (Expand("p", 3),)),
    (Invariant.KNOWN_GPUS, lose_gpu, (Expand("p", 2),)),
    (Invariant.FREES_ITS_OWN, promise_elsewhere, GOOD),
    (Invariant.FREES_ITS_OWN, forget_hold, (ReleaseCluster("r", TRAIN),)),
    (Invariant.ONE_OWNER, nothing, (*GOOD, Expand("r", 1))),
    (Invariant.EXISTS, nothing, (Grant("unknown-key"),)),
    (Invariant.EXISTS, nothing, (Expand("unknown", 0),)),
    (Invariant.EXISTS, nothing, (ReleaseCluster("p", TRAIN),)),
    (Invariant.ELASTIC_IS_GENERATION, ask_for_generation, (Grant(ASKED),)),
    (Invariant.EXISTS, ask_for_another, (Grant(ASKED),)),
    (Invariant.EVICTION_HAS_GRANT, nothing, GOOD[:2]),
    (Invariant.EVICTION_HAS_GRANT, nothing, (Shrink("q", 0, ASKED), *GOOD)),
    (Invariant.EVICTION_HAS_GRANT, nothing, (Shrink("q", 0, "r/0"), *GOOD)),
    *(
        (Invariant.EVICTION_HAS_GRANT, nothing, (Shrink("q", 0, reason),))
        for reason in ShrinkReason
    ),
    (Invariant.GIVES_WAY, keep, (Shrink("q", 0, "r/0"), Expand("r", 0))),
    (Invariant.WITHIN_QUOTA, limit, (Expand("q", 1),)),
    (Invariant.NODE_IS_UP, drain, (Expand("q", 1),)),
    (Invariant.NODE_IS_UP, drain, GOOD),
    (Invariant.IS_ADMITTED, quarantine, (Expand("p", 2),)),
    (Invariant.IS_ADMITTED, quarantine, GOOD),
    (Invariant.IS_ADMITTED, register_q, (Expand("q", 1),)),
]


def test_the_plan_is_valid_before_it_is_tampered_with() -> None:
    validate(three_pipelines(), GOOD)
    validate(three_pipelines(), (ReleaseCluster("r", TRAIN),))
    validate(three_pipelines(), (Shrink("q", 0, "r/0"), Expand("r", 0)))


@pytest.mark.parametrize(("invariant", "tamper", "ops"), CASES)
def test_a_plan_that_violates_an_invariant_is_refused_by_its_name(
    invariant: Invariant, tamper: Tamper, ops: tuple[Op, ...]
) -> None:
    state = three_pipelines()
    tamper(state)
    with pytest.raises(PlanError, match=invariant) as caught:
        validate(state, ops)
    assert caught.value.invariant is invariant


def test_every_invariant_has_a_plan_that_violates_it() -> None:
    assert {invariant for invariant, _, _ in CASES} == set(Invariant)


@pytest.mark.parametrize(
    ("reason", "make_so"),
    [
        (ShrinkReason.RELEASE, lambda p: p.releasing.update({GENERATION_CLUSTER: "key"})),
        (ShrinkReason.LEAVE, lambda p: setattr(p, "phase", PipelinePhase.LEAVING)),
    ],
)
def test_a_shrink_without_a_beneficiary_is_valid_if_its_reason_applies(
    reason: ShrinkReason, make_so: Callable[[object], None]
) -> None:
    state = three_pipelines()
    make_so(state.pipelines["q"])
    validate(state, (Shrink("q", 0, reason),))


def test_workers_on_a_draining_node_and_over_quota_may_sleep() -> None:
    state = three_pipelines()
    drain(state)
    validate(state, (Shrink("q", 0, ShrinkReason.DRAIN),))
    state = three_pipelines()
    limit(state)
    wake(state, "q", 1)
    validate(state, (Shrink("q", 0, ShrinkReason.QUOTA),))


def test_generation_gives_way_to_its_own_pipeline_though_it_is_not_preemptible() -> None:
    state = three_pipelines()
    spec = state.pipelines["p"].spec
    state.pipelines["p"].spec = msgspec.structs.replace(spec, is_preemptible=False)
    validate(state, GOOD)


def test_a_cluster_may_be_handed_over_to_itself() -> None:
    state = three_pipelines()
    key = ask(state, "r")
    validate(state, (ReleaseCluster("r", TRAIN), Grant(key)))


def test_the_planner_proves_its_plans() -> None:
    """plan() refuses an invalid plan, whichever policy made it."""

    class TakesWhatIsTaken(Greedy):
        def generate(self, builder):  # type: ignore[no-untyped-def]
            builder.expand("r", builder.state.pipelines["r"].workers[0])
            return super().generate(builder)

    state = three_pipelines()
    demand(state, "r")
    plan(state, Greedy())
    with pytest.raises(PlanError, match="takes free GPUs"):
        plan(state, TakesWhatIsTaken())
