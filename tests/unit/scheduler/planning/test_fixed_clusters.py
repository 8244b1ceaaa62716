"""Fixed clusters: which requests wait, which owners give way, and what may not bypass a request."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.scheduler.planning import planner
from rollmesh.scheduler.planning.invariants import Invariant, PlanError, validate
from rollmesh.scheduler.planning.plan import (
    Expand,
    Grant,
    Op,
    PlanBuilder,
    ReleaseCluster,
    Shrink,
    apply,
)
from rollmesh.scheduler.planning.planner import plan
from rollmesh.scheduler.planning.state import FleetState, NodePhase, PipelinePhase
from rollmesh.wire.scheduling import GpuPriority, WorkerPhase
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
    trains,
    wake,
)
from tests.unit.scheduler.planning.histories import Churn, Executor

RESERVE_S = Idle.reserve_after_s


def served(state: FleetState) -> tuple[Op, ...]:
    return plan(state, Idle()).ops


# giving way


def test_a_request_takes_its_gpus_from_generation() -> None:
    state = fleet(4)
    add(state, "p", generation=(0, 1), train=(0, 1, 2))
    add(state, "q", generation=(2, 3), tp=2)
    wake(state, "p", 0, 1)
    wake(state, "q", 0)
    key = ask(state, "p")
    shrinks = {Shrink("p", 0, key), Shrink("p", 1, key), Shrink("q", 0, key)}
    assert set(served(state)) == {*shrinks, Grant(key)}


def test_gpus_of_a_worker_that_goes_to_sleep_count_as_free() -> None:
    state = fleet(2)
    add(state, "p", generation=(0, 1), train=(0, 1))
    wake(state, "p", 0)
    state.move_worker("p", 0, WorkerPhase.SLEEPING)
    key = ask(state, "p")
    assert served(state) == (Grant(key),)


@pytest.mark.parametrize("phase", [WorkerPhase.WAKING, WorkerPhase.LOST])
def test_no_worker_is_evicted_while_another_blocks_the_request(phase: WorkerPhase) -> None:
    state = fleet(2)
    add(state, "p", train=(0, 1))
    add(state, "q", generation=(0, 1))
    wake(state, "q", 0, 1)
    state.move_worker("q", 1, phase)
    ask(state, "p")
    assert served(state) == ()


def test_a_pipeline_that_is_not_preemptible_gives_way_only_to_its_own_clusters() -> None:
    state = fleet(2)
    add(state, "p", train=(0, 1))
    add(state, "q", generation=(0, 1), train=(0, 1), is_preemptible=False)
    demand(state, "q")
    wake(state, "q", 0, 1)
    ask(state, "p")
    assert served(state) == ()
    key = ask(state, "q")
    assert set(served(state)) == {Shrink("q", 0, key), Shrink("q", 1, key), Grant(key)}


def test_a_pipeline_that_is_not_preemptible_gives_way_to_all_without_demand() -> None:
    state = fleet(2)
    add(state, "p", train=(0, 1))
    add(state, "q", generation=(0, 1), is_preemptible=False)
    wake(state, "q", 0, 1)
    key = ask(state, "p")
    assert set(served(state)) == {Shrink("q", 0, key), Shrink("q", 1, key), Grant(key)}


def test_a_quarantined_pipeline_is_neither_preempted_nor_granted_a_cluster() -> None:
    state = fleet(2)
    add(state, "p", train=(0,))
    add(state, "q", generation=(0,), train=(1,))
    wake(state, "q", 0)
    state.pipelines["q"].phase = PipelinePhase.QUARANTINED
    ask(state, "p")
    ask(state, "q")
    assert served(state) == ()


@pytest.mark.parametrize("phase", [NodePhase.DRAINING, NodePhase.DOWN])
def test_a_request_waits_for_its_node_and_blocks_no_other(phase: NodePhase) -> None:
    state = fleet(1, 1)
    add(state, "p", train=(0, 1))
    add(state, "q", train=(1,))
    state.nodes["a"].phase = phase
    mine, other = ask(state, "p"), ask(state, "q")
    state.now_s = 2 * RESERVE_S
    assert served(state) == (Grant(other),)
    state.requests.pop(other)
    state.nodes["a"].phase = NodePhase.UP
    assert served(state) == (Grant(mine),)


# the queue


def test_the_queue_is_by_priority_and_then_by_arrival() -> None:
    state = fleet(1)
    for name in ("p", "q", "r", "s"):
        add(state, name, train=(0,))
    low = ask(state, "p", priority=GpuPriority.REF_LOG_PROBS)
    first = ask(state, "q", priority=GpuPriority.ACTOR_TRAINING)
    second = ask(state, "r", priority=GpuPriority.ACTOR_TRAINING)
    top = ask(state, "s", priority=GpuPriority.INITIALIZATION)
    order = []
    while state.requests:
        (grant,) = served(state)
        assert isinstance(grant, Grant)
        order.append(grant.key)
        del state.requests[grant.key]
    assert order == [top, first, second, low]


def test_a_request_that_waited_long_precedes_a_higher_priority() -> None:
    state = fleet(1)
    add(state, "p", train=(0,))
    add(state, "q", train=(0,))
    old = ask(state, "p", priority=GpuPriority.VALUE_COMPUTE)
    state.now_s = RESERVE_S
    ask(state, "q", priority=GpuPriority.INITIALIZATION)
    assert served(state) == (Grant(old),)


def test_a_plan_reports_when_age_will_change_the_order() -> None:
    state = fleet(2)
    trains(state, "q", 0)
    add(state, "p", train=(0, 1))
    state.now_s = 5.0
    ask(state, "p")
    assert plan(state, Idle()).again_s == 5.0 + RESERVE_S
    state.now_s = 5.0 + RESERVE_S
    assert plan(state, Idle()).again_s == math.inf
    add(state, "r", train=(1,))
    ask(state, "r")
    assert plan(state, Idle()).again_s == state.now_s + RESERVE_S


# W5: an eviction without a grant


class KeepsShrinks(PlanBuilder):
    """The fault: workers shrunk for a request that cannot be granted stay shrunk."""

    def rollback(self, mark: int) -> None:
        pass


def evictions(builder_type: type[PlanBuilder]) -> int:
    """Evictions of q in six cycles, while p waits for GPU 0, which r trains on."""
    state = fleet(4)
    trains(state, "r", 0)
    add(state, "p", train=(2, 0))
    add(state, "q", generation=(2, 3))
    demand(state, "q")
    wake(state, "q", 0, 1)
    ask(state, "p")
    count = 0
    for _ in range(6):
        builder = builder_type(state)
        planner.serve_requests(builder, RESERVE_S)
        count += sum(isinstance(op, Shrink) for op in builder.ops)
        Greedy().generate(builder)
        for op in builder.ops:
            apply(state, op)
        settle(state)
    return count


def test_a_request_that_cannot_be_granted_evicts_no_worker() -> None:
    assert evictions(PlanBuilder) == 0
    assert evictions(KeepsShrinks) >= 3


def test_an_eviction_without_a_grant_is_refused_by_the_proof() -> None:
    state = fleet(2)
    trains(state, "r", 0)
    add(state, "p", train=(1, 0))
    add(state, "q", generation=(1,))
    wake(state, "q", 0)
    ask(state, "p")
    builder = KeepsShrinks(state)
    planner.serve_requests(builder, RESERVE_S)
    with pytest.raises(PlanError) as caught:
        validate(state, builder.ops)
    assert caught.value.invariant is Invariant.EVICTION_HAS_GRANT


# W10: a big request that small ones bypass forever


class NeverReserves(Idle):
    """The fault: no request is ever old enough for GPUs to be reserved for it."""

    reserve_after_s = math.inf


def hand_offs(policy: Idle, num: int) -> int | None:
    """Return the hand-offs between small requests, each on GPU 0 or 1, until a big one has both.

    A hand-off takes a second. The two GPUs are never free at once.
    """
    state = fleet(2)
    add(state, "big", train=(0, 1))
    for gpu, name in ((0, "a"), (1, "b"), (0, "c"), (1, "d")):
        add(state, name, train=(gpu,))
    apply(state, Grant(ask(state, "a")))
    apply(state, Grant(ask(state, "b")))
    big = ask(state, "big")
    pairs = [("a", "c"), ("b", "d"), ("c", "a"), ("d", "b")]
    for count in range(num):
        giver, taker = pairs[count % 4]
        state.now_s += 1.0
        if TRAIN in state.pipelines[giver].holds:
            state.pipelines[giver].releasing[TRAIN] = "release"
        if not any(request.pipeline_id == taker for request in state.requests.values()):
            ask(state, taker)
        carry_out(state, policy)
        if big not in state.requests:
            return count
    return None


def test_small_requests_do_not_bypass_a_big_one_forever() -> None:
    assert hand_offs(NeverReserves(), 200) is None
    waited = hand_offs(Idle(), 200)
    assert waited is not None
    assert RESERVE_S <= waited <= RESERVE_S + 2


def test_a_request_may_be_bypassed_until_it_is_old() -> None:
    state = fleet(2)
    trains(state, "r", 0)
    add(state, "big", train=(0, 1))
    add(state, "small", train=(1,))
    ask(state, "big")
    small = ask(state, "small")
    assert served(state) == (Grant(small),)
    state.now_s = RESERVE_S
    assert served(state) == ()


# reservations


def test_holders_that_a_big_request_waits_for_may_continue() -> None:
    """Otherwise they would wait for each other: big for r, r for s, and s for a GPU of big."""
    state = fleet(4)
    add(state, "r", train=(0,)).spec.clusters["critic"] = (3,)
    add(state, "s", train=(3,)).spec.clusters["critic"] = (1,)
    apply(state, Grant(ask(state, "r")))
    apply(state, Grant(ask(state, "s")))
    add(state, "big", train=(0, 1))
    add(state, "small", train=(1,))
    ask(state, "big")
    state.now_s = RESERVE_S
    ask(state, "small")
    ask(state, "r", "critic")
    needed = ask(state, "s", "critic")
    assert served(state) == (Grant(needed),)


@pytest.mark.parametrize("fault", ["lost", "quarantine", "node"])
def test_a_request_that_may_wait_forever_blocks_no_other(fault: str) -> None:
    """A fault of f blocks big, directly or through r, which waits for f; small is granted."""
    state = fleet(3, 1)
    add(state, "big", train=(0, 1))
    add(state, "small", train=(1,))
    faulty = add(state, "f", generation=(0,), train=(0,))
    waiting = add(state, "r", train=(0,))
    waiting.spec.clusters["critic"] = (3,)
    match fault:
        case "lost":
            state.move_worker("f", 0, WorkerPhase.LOST)
        case "quarantine":
            apply(state, Grant(ask(state, "f")))
            faulty.phase = PipelinePhase.QUARANTINED
        case "node":
            apply(state, Grant(ask(state, "r")))
            ask(state, "r", "critic")
            state.lose_node("b")
    ask(state, "big")
    state.now_s = RESERVE_S
    key = ask(state, "small")
    assert served(state) == (Grant(key),)


def test_a_request_that_waits_for_its_own_pipeline_blocks_no_other() -> None:
    """p requests more while it holds: GPUs that it holds itself, or GPUs of q that waits for p."""
    state = fleet(4)
    requester = add(state, "p", train=(0,))
    requester.spec.clusters["critic"] = (0, 1)
    add(state, "small", train=(1,))
    apply(state, Grant(ask(state, "p")))
    ask(state, "p", "critic")
    state.now_s = RESERVE_S
    key = ask(state, "small")
    assert served(state) == (Grant(key),)
    requester.spec.clusters["critic"] = (1, 2)
    add(state, "q", train=(2,)).spec.clusters["critic"] = (0,)
    apply(state, Grant(ask(state, "q")))
    ask(state, "q", "critic")
    assert served(state) == (Grant(key),)


def test_nothing_starts_on_gpus_that_settle_for_a_request() -> None:
    state = fleet(2)
    add(state, "p", train=(0, 1))
    add(state, "q", generation=(0, 1))
    add(state, "r", train=(1,))
    demand(state, "q")
    state.move_worker("q", 0, WorkerPhase.WAKING)
    key = ask(state, "p", priority=GpuPriority.ACTOR_TRAINING)
    ask(state, "r", priority=GpuPriority.REF_LOG_PROBS)
    assert carry_out(state, Greedy()).ops == ()
    settle(state)
    assert carry_out(state, Greedy()).ops == (Shrink("q", 0, key), Grant(key))


def test_preemptible_generation_uses_reserved_gpus_and_other_generation_does_not() -> None:
    state = fleet(2)
    trains(state, "r", 0)
    add(state, "big", train=(0, 1))
    add(state, "keeps", generation=(1,), is_preemptible=False)
    add(state, "yields", generation=(1,))
    demand(state, "keeps")
    demand(state, "yields")
    ask(state, "big")
    assert plan(state, Greedy()).ops == (Expand("keeps", 0),)
    state.now_s = RESERVE_S
    assert plan(state, Greedy()).ops == (Expand("yields", 0),)


def test_a_reservation_ends_with_its_grant() -> None:
    state = fleet(2)
    trains(state, "r", 0)
    add(state, "big", train=(0, 1))
    add(state, "small", train=(1,))
    big = ask(state, "big")
    state.now_s = RESERVE_S
    small = ask(state, "small")
    state.pipelines["r"].releasing[TRAIN] = "release"
    assert carry_out(state, Idle()).ops == (ReleaseCluster("r", TRAIN), Grant(big))
    state.pipelines["big"].releasing[TRAIN] = "release"
    assert carry_out(state, Idle()).ops == (ReleaseCluster("big", TRAIN), Grant(small))


# the bound


class Impatient(Greedy):
    reserve_after_s = 5.0


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**6), churns=st.booleans())
def test_every_feasible_request_is_granted_within_the_bound(seed: int, churns: bool) -> None:
    executor = Executor(seed, Churn(seed) if churns else Impatient())
    assert executor.run(200) <= executor.bound_s


class MakesNoException(PlanBuilder):
    """The fault: reservations also block the holders that a request waits for."""

    def may_start(self, pipeline_id: str, gpu: int, gives_way: bool) -> bool:
        return super().may_start("", gpu, gives_way)


def is_late(seed: int, builder_type: type[PlanBuilder]) -> bool:
    executor = Executor(seed, Churn(seed), builder_type)
    return executor.run(200) > executor.bound_s


def test_the_bound_does_not_hold_if_awaited_holders_are_kept_waiting() -> None:
    assert not any(is_late(seed, PlanBuilder) for seed in range(30))
    assert any(is_late(seed, MakesNoException) for seed in range(30))
