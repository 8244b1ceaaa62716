"""The cycle of the planner: what must go, fixed clusters, generation; random histories of it."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.scheduler.planning import policies
from rollmesh.scheduler.planning.draft import Draft
from rollmesh.scheduler.planning.ops import Expand, Grant, Release, Shrink, ShrinkReason
from rollmesh.scheduler.planning.plan import Outlook, Policy, plan
from rollmesh.scheduler.planning.state import PipelinePhase, State
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
    assert carry_out(state, Greedy()).ops == (Release("p", TRAIN), Expand("p", 0))


def keepers(*trains: tuple[int, ...]) -> State:
    """Each has a worker for keeps, by its rank, and asks for a cluster where all of them are."""
    state = fleet(len(trains))
    for rank, gpus in enumerate(trains):
        name = f"p{rank}"
        add(state, name, generation=range(len(trains)), train=gpus, is_preemptible=False)
        demand(state, name)
        wake(state, name, rank)
    return state


@pytest.mark.parametrize("trains", [((1,), (0,)), ((0, 1), (0, 1)), ((1,), (2,), (0,))])
def test_who_is_not_preemptible_gives_way_where_all_would_wait_for_each_other(
    trains: tuple[tuple[int, ...], ...],
) -> None:
    state = keepers(*trains)
    key = ask(state, "p0")
    assert plan(state, Idle()).ops == (), "nobody else waits yet"
    for rank in range(1, len(trains)):
        ask(state, f"p{rank}")
    ops = carry_out(state, Idle()).ops
    assert Grant(key) in ops
    assert Shrink("p1", 1, key) in ops
    settle(state)
    assert plan(state, Idle()).ops == (), "who trains keeps nobody from it"


def test_who_keeps_workers_and_waits_for_nobody_is_not_evicted_with_those_that_wait() -> None:
    """p0 wants GPUs of p1, which waits for it, and of p2, which does not."""
    state = keepers((1, 2), (0,), ())
    ask(state, "p0")
    ask(state, "p1")
    ops = carry_out(state, Idle()).ops
    assert not [op for op in ops if isinstance(op, Shrink) and op.pipeline_id == "p2"]


def test_generation_that_is_given_up_goes_to_sleep_whole() -> None:
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


def test_a_pipeline_that_leaves_sleeps_and_what_it_gives_up_another_gets_at_once() -> None:
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
    assert plan(state, Greedy()).ops == (Release("p", TRAIN), shrink, Grant(key), Expand("q", 0))


def test_a_release_and_a_request_of_one_moment_leave_no_gap_for_others() -> None:
    """Also where the one that waits has asked before: the higher priority has what is given up."""
    state = fleet(1)
    giver = add(state, "p", train=(0,))
    giver.spec.clusters["critic"] = (0,)
    add(state, "q", generation=(0,))
    demand(state, "q")
    ask(state, "p")
    carry_out(state, Greedy())
    giver.releasing[TRAIN] = "release"
    key = ask(state, "p", "critic")
    assert plan(state, Greedy()).ops == (Release("p", TRAIN), Grant(key))


def test_ops_stand_in_an_order_in_which_they_can_be_done() -> None:
    """Releases, shrinks, grants, expands, whoever was served first."""
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
        Release("r", TRAIN),
        Shrink("q", 0, second),
        Grant(first),
        Grant(second),
        Expand("r", 0),
    )


def test_what_is_over_quota_goes_the_cheapest_first() -> None:
    state = fleet(4)
    pipeline = add(state, "p", generation=range(4), max_gpus=2)
    for worker, kv_tokens in zip(wake(state, "p", 0, 1, 2, 3), (9, 2, 5, 2), strict=True):
        worker.kv_tokens = kv_tokens
    assert pipeline.spec.max_gpus == 2
    quota = ShrinkReason.QUOTA
    assert plan(state, Idle()).ops == (Shrink("p", 3, quota), Shrink("p", 1, quota))


class Counting(Idle):
    """Keeps accounts, and wants to be asked again."""

    def generate(self, draft: Draft) -> Outlook:
        return Outlook(credits={"p": 2.5}, again_s=7.0)


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
    [Greedy(), Churn(0), *map(policies.by_name, ("fair", "gap-ratio", "static"))],
    ids=lambda policy: policy.name,
)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_plans_of_random_histories_hold_and_are_the_same_each_time(
    policy: Policy, seed: int
) -> None:
    """plan() proves each by itself."""
    history = History(seed)
    for _ in range(40):
        history.happen()
        before = copy.deepcopy(history.state)
        first = plan(history.state, policy)
        assert history.state == before, "a plan leaves the state as it is"
        assert plan(before, policy) == first
        carry_out(history.state, policy)
        check_owners(history.state)


@pytest.mark.parametrize("policy", [Churn(0), policies.by_name("fair")], ids=lambda each: each.name)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_once_all_faults_are_mended_every_request_is_granted(policy: Policy, seed: int) -> None:
    """Nothing of what went before is left in the way: a hold and a wake or two for each request."""
    history = History(seed)
    for _ in range(40):
        history.happen()
        carry_out(history.state, policy)
    leaving = {k for k, each in history.state.pipelines.items() if each.phase == "leaving"}
    keys = {k for k, each in history.state.requests.items() if each.pipeline_id not in leaving}
    for _ in range(3 + 3 * len(keys)):
        history.mend()
        carry_out(history.state, policy)
    assert keys.isdisjoint(history.state.requests)
    assert leaving.isdisjoint(history.state.pipelines)
