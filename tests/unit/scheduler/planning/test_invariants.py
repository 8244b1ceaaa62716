"""Each invariant is violated by a plan that was tampered with, and is named."""

from collections.abc import Callable

import msgspec
import pytest

from rollmesh.scheduler.planning.invariants import Invariant, PlanError, validate
from rollmesh.scheduler.planning.plan import Expand, Grant, Op, ReleaseCluster, Shrink, ShrinkReason
from rollmesh.scheduler.planning.planner import plan
from rollmesh.scheduler.planning.state import FleetState, GpuHold, NodePhase, Owner, PipelinePhase
from rollmesh.wire.scheduling import GENERATION_CLUSTER, GpuPriority
from tests.unit.scheduler.planning.fleets import TRAIN, Greedy, add, ask, demand, fleet, wake

ASKED = "p-actor_train-1"


def stage() -> FleetState:
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
    (Invariant.EXISTS, nothing, (Grant("nobody's"),)),
    (Invariant.EXISTS, nothing, (Expand("nobody", 0),)),
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


def test_the_plan_that_is_tampered_with_is_a_good_one() -> None:
    validate(stage(), GOOD)
    validate(stage(), (ReleaseCluster("r", TRAIN),))
    validate(stage(), (Shrink("q", 0, "r/0"), Expand("r", 0)))


@pytest.mark.parametrize(("invariant", "tamper", "ops"), CASES)
def test_a_plan_that_violates_it_is_refused_by_its_name(
    invariant: Invariant, tamper: Tamper, ops: tuple[Op, ...]
) -> None:
    state = stage()
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
    state = stage()
    make_so(state.pipelines["q"])
    validate(state, (Shrink("q", 0, reason),))


def test_a_worker_of_a_draining_node_and_one_too_many_may_go() -> None:
    state = stage()
    drain(state)
    validate(state, (Shrink("q", 0, ShrinkReason.DRAIN),))
    state = stage()
    limit(state)
    wake(state, "q", 1)
    validate(state, (Shrink("q", 0, ShrinkReason.QUOTA),))


def test_generation_gives_way_to_its_own_pipeline_though_it_is_not_preemptible() -> None:
    state = stage()
    spec = state.pipelines["p"].spec
    state.pipelines["p"].spec = msgspec.structs.replace(spec, is_preemptible=False)
    validate(state, GOOD)


def test_a_cluster_may_be_handed_over_to_itself() -> None:
    state = stage()
    key = ask(state, "r")
    validate(state, (ReleaseCluster("r", TRAIN), Grant(key)))


def test_what_the_planner_makes_is_proved() -> None:
    """A policy that returns an invalid plan is refused, whatever it is."""

    class TakesWhatIsTaken(Greedy):
        def generate(self, builder):  # type: ignore[no-untyped-def]
            builder.expand("r", builder.state.pipelines["r"].workers[0])
            return super().generate(builder)

    state = stage()
    demand(state, "r")
    plan(state, Greedy())
    with pytest.raises(PlanError, match="takes free GPUs"):
        plan(state, TakesWhatIsTaken())
