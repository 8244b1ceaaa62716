"""The planning cycle: cleanup, fixed clusters, generation; random histories of it."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.scheduler.planning import policies
from rollmesh.scheduler.planning.plan import (
    Expand,
    Grant,
    PlanBuilder,
    ReleaseCluster,
    Shrink,
    ShrinkReason,
)
from rollmesh.scheduler.planning.planner import PolicyResult, SchedulingPolicy, plan
from rollmesh.scheduler.planning.state import FleetState, PipelinePhase
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
    trains,
    wake,
)
from tests.unit.scheduler.planning.histories import Churn, History, check_owners


def test_idle_gpus_go_to_the_one_pipeline_that_wants_them() -> None:
    state = fleet(2)
    add(state, "p", generation=(0, 1))
    demand(state, "p")
    assert plan(state, Greedy()).ops == (Expand("p", 0), Expand("p", 1))


def test_training_takes_its_gpus_from_generation_and_gives_them_back() -> None:
    state = fleet(2)
    add(state, "p", generation=(0, 1), train=(0,))
    demand(state, "p")
    wake(state, "p", 0, 1)
    key = ask(state, "p")
    assert carry_out(state, Greedy()).ops == (Shrink("p", 0, key), Grant(key))
    settle(state)
    assert carry_out(state, Greedy()).ops == ()
    state.pipelines["p"].releasing[TRAIN] = "release"
    assert carry_out(state, Greedy()).ops == (ReleaseCluster("p", TRAIN), Expand("p", 0))


def keepers(*trains: tuple[int, ...]) -> FleetState:
    """Each pipeline has a worker that is not preemptible, by its rank, and requests a cluster where
    all of them are."""
    state = fleet(len(trains))
    for rank, gpus in enumerate(trains):
        name = f"p{rank}"
        add(state, name, generation=range(len(trains)), train=gpus, is_preemptible=False)
        demand(state, name)
        wake(state, name, rank)
    return state


@pytest.mark.parametrize("trains", [((1,), (0,)), ((0, 1), (0, 1)), ((1,), (2,), (0,))])
def test_a_worker_that_is_not_preemptible_gives_way_where_pipelines_wait_for_each_other(
    trains: tuple[tuple[int, ...], ...],
) -> None:
    state = keepers(*trains)
    key = ask(state, "p0")
    assert plan(state, Idle()).ops == (), "no other pipeline waits yet"
    for rank in range(1, len(trains)):
        ask(state, f"p{rank}")
    ops = carry_out(state, Idle()).ops
    assert Grant(key) in ops
    assert Shrink("p1", 1, key) in ops
    settle(state)
    assert plan(state, Idle()).ops == (), "a training pipeline blocks no other"


def test_a_pipeline_outside_the_cycle_of_waiting_ones_is_not_evicted() -> None:
    """p0 wants GPUs of p1, which waits for it, and of p2, which does not."""
    state = keepers((1, 2), (0,), ())
    ask(state, "p0")
    ask(state, "p1")
    ops = carry_out(state, Idle()).ops
    assert not [op for op in ops if isinstance(op, Shrink) and op.pipeline_id == "p2"]


def test_all_workers_of_given_up_generation_sleep() -> None:
    state = fleet(2)
    pipeline = add(state, "p", generation=(0, 1))
    wake(state, "p", 0, 1)
    pipeline.releasing[GENERATION_CLUSTER] = "release"
    shrinks = (Shrink("p", 0, ShrinkReason.RELEASE), Shrink("p", 1, ShrinkReason.RELEASE))
    assert plan(state, Idle()).ops == shrinks


def test_a_worker_that_wakes_goes_to_sleep_once_it_is_awake() -> None:
    state = fleet(1)
    pipeline = add(state, "p", generation=(0,))
    state.move_worker("p", 0, WorkerPhase.WAKING)
    pipeline.releasing[GENERATION_CLUSTER] = "release"
    assert plan(state, Idle()).ops == ()
    settle(state)
    assert plan(state, Idle()).ops == (Shrink("p", 0, ShrinkReason.RELEASE),)


def test_a_leaving_pipeline_sleeps_and_another_gets_its_gpus_at_once() -> None:
    state = fleet(2)
    leaver = add(state, "p", generation=(0,), train=(1,))
    wake(state, "p", 0)
    ask(state, "p")
    carry_out(state, Idle())
    add(state, "q", generation=(0,), train=(1,))
    demand(state, "q")
    key = ask(state, "q")
    leaver.phase = PipelinePhase.LEAVING
    shrink = Shrink("p", 0, ShrinkReason.LEAVE)
    assert plan(state, Greedy()).ops == (shrink, Expand("q", 0)), "its trainer is still there"
    leaver.releasing[TRAIN] = "release"
    assert plan(state, Greedy()).ops == (
        ReleaseCluster("p", TRAIN),
        shrink,
        Grant(key),
        Expand("q", 0),
    )


def test_a_release_and_a_request_at_one_time_leave_no_gap_for_others() -> None:
    """The request with the higher priority gets the released GPUs, even where another waited
    before."""
    state = fleet(1)
    giver = add(state, "p", train=(0,))
    giver.spec.clusters["critic"] = (0,)
    add(state, "q", generation=(0,))
    demand(state, "q")
    ask(state, "p")
    carry_out(state, Greedy())
    giver.releasing[TRAIN] = "release"
    key = ask(state, "p", "critic")
    assert plan(state, Greedy()).ops == (ReleaseCluster("p", TRAIN), Grant(key))


def test_operations_are_in_an_order_in_which_they_can_be_applied() -> None:
    """Releases, shrinks, grants, expands, whichever request was served first."""
    state = fleet(4)
    for name, gpu in (("p", 0), ("q", 1), ("r", 2)):
        add(state, name, generation=(gpu,), train=(gpu,))
    wake(state, "q", 0)
    ask(state, "r")
    carry_out(state, Idle())
    state.pipelines["r"].releasing[TRAIN] = "release"
    demand(state, "r")
    first, second = ask(state, "p"), ask(state, "q")
    assert plan(state, Greedy()).ops == (
        ReleaseCluster("r", TRAIN),
        Shrink("q", 0, second),
        Grant(first),
        Grant(second),
        Expand("r", 0),
    )


def test_workers_over_quota_sleep_cheapest_first() -> None:
    state = fleet(4)
    pipeline = add(state, "p", generation=range(4), max_gpus=2)
    for worker, kv_tokens in zip(wake(state, "p", 0, 1, 2, 3), (9, 2, 5, 2), strict=True):
        worker.kv_tokens = kv_tokens
    assert pipeline.spec.max_gpus == 2
    quota = ShrinkReason.QUOTA
    assert plan(state, Idle()).ops == (Shrink("p", 3, quota), Shrink("p", 1, quota))


class Counting(Idle):
    """Returns credits and a time to plan again."""

    def generate(self, builder: PlanBuilder) -> PolicyResult:
        return PolicyResult(credits={"p": 2.5}, again_s=7.0)


def test_a_plan_has_the_credits_of_its_policy_and_the_earlier_of_both_times() -> None:
    state = fleet(1)
    add(state, "p", train=(0,))
    trains(state, "q", 0)
    made = plan(state, Counting())
    assert (made.credits, made.again_s) == ({"p": 2.5}, 7.0)
    ask(state, "p")
    assert plan(state, Counting()).again_s == 7.0
    state.now_s = 1.0 - Idle.reserve_after_s
    ask(state, "p")
    assert plan(state, Counting()).again_s == 1.0


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert plan(fleet(), Greedy()).ops == ()
    state = fleet(2)
    add(state, "p", generation=(0,), train=(1,))
    assert plan(state, Greedy()).ops == ()


@pytest.mark.parametrize(
    "policy",
    [Greedy(), Churn(0), *map(policies.make_policy, ("fair", "gap-ratio", "static"))],
    ids=lambda policy: policy.name,
)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_plans_of_random_histories_are_valid_and_deterministic(
    policy: SchedulingPolicy, seed: int
) -> None:
    """plan() proves each plan itself."""
    history = History(seed)
    for _ in range(40):
        history.apply_random_event()
        before = copy.deepcopy(history.state)
        first = plan(history.state, policy)
        assert history.state == before, "a plan leaves the state as it is"
        assert plan(before, policy) == first
        carry_out(history.state, policy)
        check_owners(history.state)


@pytest.mark.parametrize(
    "policy", [Churn(0), policies.make_policy("fair")], ids=lambda each: each.name
)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_once_all_faults_are_repaired_every_request_is_granted(
    policy: SchedulingPolicy, seed: int
) -> None:
    """Each request needs a hold, and at most two wakes, before it is granted."""
    history = History(seed)
    for _ in range(40):
        history.apply_random_event()
        carry_out(history.state, policy)
    leaving = {k for k, each in history.state.pipelines.items() if each.phase == "leaving"}
    keys = {k for k, each in history.state.requests.items() if each.pipeline_id not in leaving}
    for _ in range(3 + 3 * len(keys)):
        history.repair()
        carry_out(history.state, policy)
    assert keys.isdisjoint(history.state.requests)
    assert leaving.isdisjoint(history.state.pipelines)
