"""Fair policy: shares, quanta, evictions, and the engines that it wakes for a forecast demand."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.scheduler.planning.claims import read_claims, read_indexed_pools
from rollmesh.scheduler.planning.plan import Expand, PlanBuilder, Shrink
from rollmesh.scheduler.planning.planner import PolicyResult, plan
from rollmesh.scheduler.planning.policies.fair import (
    KEEP_S,
    Fair,
    FairSettings,
    forecast_demand,
    ideal_gpus,
)
from rollmesh.scheduler.planning.policies.gap_ratio import GapRatio
from rollmesh.scheduler.planning.shares import ShareBounds
from rollmesh.scheduler.planning.state import FleetState, NodePhase, PipelinePhase, StreamProgress
from rollmesh.wire.scheduling import GENERATION_CLUSTER
from tests.unit.scheduler.planning.exact_shares import exact_shares
from tests.unit.scheduler.planning.fleets import add, ask, carry_out, demand, fleet, settle, wake
from tests.unit.scheduler.planning.policies.generating_fleet import GeneratingFleet

QUICK = FairSettings(quantum_s=10.0, hold_s=2.0, switch_s=3.0)
MANY = 10**6
"""Rollouts that never run out."""


def sharing(
    state: FleetState, settings: FairSettings = QUICK, switch_s: float = 0.0
) -> GeneratingFleet:
    return GeneratingFleet(state, Fair(settings), switch_s)


def progress(state: FleetState, pipeline_id: str, target: int, completed: int) -> None:
    stream = StreamProgress(batch=0, target=target, completed=completed)
    state.pipelines[pipeline_id].progress = {"train": stream}


def num_awake(state: FleetState) -> dict[str, int]:
    return {name: len(GeneratingFleet(state, Fair()).awake(name)) for name in state.pipelines}


# the bound


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.sampled_from([1, 1, 2, 3, 8]), min_size=1, max_size=40),
    st.integers(1, 6),
    st.sampled_from([1, 2]),
)
def test_no_pipeline_is_owed_more_than_a_quantum_and_a_switch_of_a_bundle(
    weights: list[int], num_bundles: int, tp: int
) -> None:
    state = fleet(num_bundles * tp)
    for number, weight in enumerate(weights):
        add(state, f"p{number}", range(num_bundles * tp), tp=tp, weight=float(weight))
        demand(state, f"p{number}", MANY)
    whole = Fraction(num_bundles * tp, sum(weights))
    ideal = {f"p{number}": float(whole * weight) for number, weight in enumerate(weights)}
    run = sharing(state, switch_s=QUICK.switch_s)
    run.run(80.0, ideal)
    assert max(run.most_lag_s.values()) <= QUICK.quantum_s + QUICK.switch_s + 1e-6


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_ideal_is_max_min_over_the_gpus_that_each_can_use(data: st.DataObject) -> None:
    state = fleet(8, 8)
    for number in range(data.draw(st.integers(1, 4))):
        tp = data.draw(st.sampled_from([1, 2, 4]))
        bundles = data.draw(st.sets(st.integers(0, 16 // tp - 1), min_size=1, max_size=6))
        gpus = [gpu for each in sorted(bundles) for gpu in range(each * tp, each * tp + tp)]
        weight = float(data.draw(st.integers(1, 4)))
        add(state, f"p{number}", gpus, tp, weight=weight, rollouts_per_worker=4)
        demand(state, f"p{number}", data.draw(st.integers(1, 30)))
    state.nodes["b"].phase = data.draw(st.sampled_from([NodePhase.UP, NodePhase.DRAINING]))
    claims = read_claims(PlanBuilder(state))
    shares = [ShareBounds(c.pipeline.spec.weight, 0.0, c.num_wanted * c.tp) for c in claims]
    exact = exact_shares(shares, read_indexed_pools(claims))
    for one, other in zip(ideal_gpus(state, claims)[0], exact, strict=True):
        assert one == pytest.approx(float(other), abs=0.5)


def test_slices_follow_weights_where_pipelines_outnumber_bundles() -> None:
    state = fleet(1)
    for name, weight in (("a", 2.0), ("b", 1.0), ("c", 1.0)):
        add(state, name, [0], weight=weight)
        demand(state, name, MANY)
    run = sharing(state)
    run.run(400.0)
    assert run.had_gpu_s["a"] == pytest.approx(200.0, abs=10.0)
    assert run.had_gpu_s["b"] == pytest.approx(100.0, abs=10.0)


# known faults: each with the policy that has it


class CountsIdleGpus(Fair):
    """Fault W7: shares count all GPUs that are up, usable or not."""

    def generate(self, builder: PlanBuilder) -> PolicyResult:
        state, settings = builder.state, self.settings
        wanting = [each for each in state.pipelines.values() if each.demand]
        even = len(state.node_of) // len(wanting)
        for pipeline in wanting:
            num_has = builder.num_awake(pipeline)
            for worker in pipeline.workers:
                is_open = all(builder.is_open(gpu) for gpu in worker.gpus)
                if num_has < even and is_open and builder.can_expand(pipeline.pipeline_id, worker):
                    builder.expand(pipeline.pipeline_id, worker)
        return PolicyResult(again_s=state.now_s + settings.quantum_s)


class CapsWakes(Fair):
    """Fault W8: a plan with many wakes fails."""

    def generate(self, builder: PlanBuilder) -> PolicyResult:
        result = super().generate(builder)
        if len(builder.ops) > 1000:
            raise RuntimeError("too many activations")
        return result


class NeverSlices(Fair):
    """Fault W9: the pipeline with the only bundle keeps it."""

    def __init__(self) -> None:
        super().__init__(FairSettings(quantum_s=1e9, hold_s=1e9, switch_s=3.0))


class ForgetsUnknown(Fair):
    """Fault W11: ignores a demand without an estimate."""

    def generate(self, builder: PlanBuilder) -> PolicyResult:
        unknown = [each for each in builder.state.pipelines.values() if each.remaining is None]
        demands = [each.demand for each in unknown]
        for each in unknown:
            each.demand = None
        result = super().generate(builder)
        for each, was in zip(unknown, demands, strict=True):
            each.demand = was
        return result


def two_on_two_of_ten(policy: Fair) -> dict[str, int]:
    state = fleet(10)
    for name in ("a", "b"):
        add(state, name, [0, 1])
        demand(state, name, 100)
    wake(state, "a", 0, 1)
    GeneratingFleet(state, policy).run(60.0)
    return num_awake(state)


def test_gpus_that_no_pipeline_can_use_count_for_none() -> None:
    assert two_on_two_of_ten(Fair(QUICK)) == {"a": 1, "b": 1}
    assert two_on_two_of_ten(CountsIdleGpus(QUICK)) == {"a": 2, "b": 0}


def test_one_plan_wakes_every_worker_of_the_only_pipeline_once() -> None:
    state = fleet(1100)
    add(state, "a", range(1100))
    demand(state, "a", MANY)
    assert plan(state, Fair()).ops == tuple(Expand("a", rank) for rank in range(1100))
    with pytest.raises(RuntimeError, match="too many"):
        plan(state, CapsWakes())


def four_on_two(policy: Fair | GapRatio) -> list[float]:
    state = fleet(2)
    for name in "abcd":
        add(state, name, [0, 1])
        demand(state, name, 100)
    run = GeneratingFleet(state, policy)
    run.run(200.0)
    return list(run.had_gpu_s.values())


def test_pipelines_that_outnumber_the_bundles_all_get_time() -> None:
    assert four_on_two(Fair(QUICK)) == pytest.approx([100.0] * 4, abs=10.0)
    assert four_on_two(NeverSlices()) == [200.0, 200.0, 0.0, 0.0]
    assert four_on_two(GapRatio()) == [200.0, 200.0, 0.0, 0.0], "it has no clock, as documented"


def unknown_beside_known(policy: Fair) -> dict[str, int]:
    state = fleet(4)
    for name, estimate in (("a", 100), ("b", 0)):
        add(state, name, range(4))
        demand(state, name, estimate)
    wake(state, "a", 0, 1, 2, 3)
    GeneratingFleet(state, policy).run(60.0)
    return num_awake(state)


def test_a_demand_without_an_estimate_gets_the_floor() -> None:
    assert unknown_beside_known(Fair(QUICK)) == {"a": 3, "b": 1}
    assert unknown_beside_known(ForgetsUnknown(QUICK)) == {"a": 4, "b": 0}


def test_weights_decide_and_not_how_much_is_left() -> None:
    for weights, shares in (((1.0, 1.0), {"a": 4, "b": 4}), ((1.0, 3.0), {"a": 2, "b": 6})):
        state = fleet(8)
        for name, estimate, weight in zip("ab", (1024, 64), weights, strict=True):
            add(state, name, range(8), weight=weight)
            demand(state, name, estimate)
        other = fleet(8)
        for name, estimate in (("a", 1024), ("b", 64)):
            add(other, name, range(8))
            demand(other, name, estimate)
        GeneratingFleet(state, Fair(QUICK)).run(20.0)
        GeneratingFleet(other, GapRatio()).run(20.0)
        assert num_awake(state) == shares
        assert num_awake(other) == {"a": 7, "b": 1}, "as the known system does"


# what it gives, and when


def test_a_pipeline_with_no_worker_gets_a_bundle_when_the_hold_is_over() -> None:
    state = fleet(4)
    for name in ("a", "b"):
        add(state, name, range(4))
    demand(state, "a", MANY)
    run = sharing(state)
    run.run(1.0)
    demand(state, "b", MANY)
    run.run(1.9)
    assert run.awake("b") == set(), "a has just been woken"
    run.run(2.1)
    assert len(run.awake("b")) >= 1


def test_an_only_worker_has_its_quantum() -> None:
    state = fleet(1)
    for name in ("a", "b"):
        add(state, name, [0])
    demand(state, "a", MANY)
    run = sharing(state)
    run.run(1.0)
    demand(state, "b", MANY)
    run.run(9.9)
    assert run.awake("a") == {0}
    run.run(10.1)
    assert run.awake("b") == {0}


def test_a_worker_without_use_is_given_up_at_once() -> None:
    state = fleet(1)
    for name in ("a", "b"):
        add(state, name, [0])
    demand(state, "a", 4)
    run = sharing(state)
    run.run(1.0)
    progress(state, "a", target=4, completed=4)
    demand(state, "b")
    run.run(1.1)
    assert run.awake("b") == {0}


def test_in_the_tail_bundles_go_to_pipelines_that_can_fill_them() -> None:
    state = fleet(4)
    for name in ("a", "b"):
        add(state, name, range(4), rollouts_per_worker=4)
        demand(state, name, 64)
    run = sharing(state)
    run.run(5.0)
    assert num_awake(state) == {"a": 2, "b": 2}
    progress(state, "a", target=64, completed=61)
    run.run(20.0)
    assert num_awake(state) == {"a": 1, "b": 3}


def test_a_pipeline_with_workers_evicts_only_for_what_a_switch_costs() -> None:
    state = fleet(4)
    for name in ("a", "b"):
        add(state, name, range(4), rollouts_per_worker=1)
        demand(state, name, (MANY, 1)["ab".index(name)])
    run = sharing(state)
    run.run(20.0)
    assert num_awake(state) == {"a": 3, "b": 1}
    demand(state, "b", 2)
    run.run(22.9)
    assert num_awake(state) == {"a": 3, "b": 1}, "it is not owed the cost of a switch yet"
    run.run(23.1)
    assert num_awake(state) == {"a": 2, "b": 2}


def test_the_victim_loses_the_fewest_kv_tokens() -> None:
    state = fleet(4)
    for name in ("a", "b"):
        add(state, name, range(4))
    demand(state, "a", MANY)
    for worker, kv_tokens in zip(wake(state, "a", 0, 1, 2, 3), (9, 9, 2, 9), strict=True):
        worker.kv_tokens = kv_tokens
    state.now_s = 100.0
    demand(state, "b", 1)
    assert [op.rank for op in plan(state, Fair(QUICK)).ops if isinstance(op, Shrink)] == [2]


def test_a_minimum_precedes_weights_and_a_quota_limits_both() -> None:
    state = fleet(8)
    add(state, "a", range(8), weight=9.0)
    add(state, "b", range(8), min_gpus=4)
    add(state, "c", range(8), max_gpus=1, weight=9.0)
    for name in "abc":
        demand(state, name, MANY)
    run = sharing(state)
    run.run(30.0)
    assert num_awake(state) == {"a": 3, "b": 4, "c": 1}


def test_a_pipeline_that_is_not_preemptible_keeps_what_it_has() -> None:
    state = fleet(4)
    add(state, "a", range(4), is_preemptible=False)
    add(state, "b", range(4))
    demand(state, "a", MANY)
    run = sharing(state)
    run.run(5.0)
    demand(state, "b", MANY)
    run.run(60.0)
    assert num_awake(state) == {"a": 4, "b": 0}
    assert ideal_gpus(state, read_claims(PlanBuilder(state)))[0] == [4.0, 0.0]


def test_a_pipeline_that_can_move_elsewhere_makes_room() -> None:
    """b can use only GPU 0, which a has; c has a GPU that a could also use; GPU 3 is open."""
    state = fleet(4)
    add(state, "a", [0, 1])
    add(state, "c", [1, 2, 3], rollouts_per_worker=8)
    add(state, "b", [0])
    for name in "ac":
        demand(state, name, 8)
    wake(state, "a", 0)
    wake(state, "c", 0)
    state.now_s = 100.0
    state.pipelines["a"].progress = {"train": StreamProgress(batch=0, target=1, completed=0)}
    demand(state, "b", 8)
    run = sharing(state)
    run.run(140.0)
    assert (run.awake("a"), run.awake("b"), len(run.awake("c"))) == ({1}, {0}, 1)


def test_a_pipeline_without_rollouts_left_gets_nothing() -> None:
    state = fleet(2)
    add(state, "a", [0, 1])
    demand(state, "a", 4)
    progress(state, "a", target=4, completed=5)
    assert plan(state, Fair()).ops == ()


def test_no_worker_moves_where_all_have_their_share() -> None:
    state = fleet(8)
    for name in "abcd":
        add(state, name, range(8))
        demand(state, name, MANY)
    carry_out(state, Fair(QUICK))
    settle(state)
    for now_s in (5.0, 50.0, 500.0):
        state.now_s = now_s
        assert plan(state, Fair(QUICK)).ops == ()


def test_plans_are_deterministic() -> None:
    state = fleet(8)
    for number in range(12):
        add(state, f"p{number}", range(8), tp=(1, 2)[number % 2])
        demand(state, f"p{number}", MANY)
    assert plan(state, Fair()) == plan(state, Fair())


class SeesNothing(Fair):
    """Policy without a forecast."""

    def generate(self, builder: PlanBuilder) -> PolicyResult:
        pipelines = builder.state.pipelines.values()
        kept = [each.demand_history.marks for each in pipelines]
        for each in pipelines:
            each.demand_history.marks = {}
        result = super().generate(builder)
        for each, marks in zip(pipelines, kept, strict=True):
            each.demand_history.marks = marks
        return result


def away(state: FleetState, name: str, ended_s: float, until_s: float | None) -> None:
    """The demand ended at `ended_s`; the previous one came `until_s` after its end, if there was
    one."""
    demand_history = state.pipelines[name].demand_history
    if until_s is not None:
        demand_history.note_ended(0.0)
        demand_history.note_requested(8, until_s)
    demand_history.note_ended(ended_s)


def two(num_gpus: int = 4, until_s: float | None = 100.0) -> FleetState:
    """Two pipelines on the same GPUs: `b` generates on all of them, `a` ended its demand at
    1000."""
    state = fleet(num_gpus)
    for name in "ab":
        add(state, name, range(num_gpus), train=[0], rollouts_per_worker=1)
    wake(state, "b", *range(num_gpus))
    demand(state, "b", MANY)
    state.now_s = 1000.0
    away(state, "a", 1000.0, until_s)
    return state


def awake(state: FleetState, name: str) -> int:
    return len(GeneratingFleet(state, Fair()).awake(name))


@pytest.mark.parametrize("policy", [Fair(QUICK), SeesNothing(QUICK)], ids=["sees", "sees-nothing"])
def test_an_engine_is_awake_when_a_forecast_demand_arrives(policy: Fair) -> None:
    state = two()
    run = GeneratingFleet(state, policy, switch_s=1.0)
    run.run(1096.0)
    assert awake(state, "a") == 0, "it is too early"
    run.run(1100.0)
    assert (awake(state, "a") > 0) == (not isinstance(policy, SeesNothing))


def test_the_policy_reports_when_to_plan_for_a_forecast() -> None:
    state = two()
    assert plan(state, Fair(QUICK)).again_s == 1097.0
    assert forecast_demand(state, 3.0).rollouts == {}
    state.now_s = 1097.0
    assert forecast_demand(state, 3.0) == ({"a": 8}, 1103.0)


def test_engines_of_a_demand_that_does_not_arrive_are_released() -> None:
    state = two()
    run = GeneratingFleet(state, Fair(QUICK))
    run.run(1102.0)
    assert awake(state, "a") == 1, "who has not asked yet lacks nothing, so it evicts for one alone"
    run.run(1120.0)
    assert (awake(state, "a"), awake(state, "b")) == (0, 4)


def test_without_history_one_engine_is_kept_for_a_bounded_time() -> None:
    state = two(until_s=None)
    run = GeneratingFleet(state, Fair(QUICK))
    run.run(1050.0)
    assert (awake(state, "a"), awake(state, "b")) == (1, 3)
    run.run(1000.0 + KEEP_S + 20.0)
    assert (awake(state, "a"), awake(state, "b")) == (0, 4)


def test_no_forecast_is_used_where_it_would_leave_a_pipeline_less_than_a_bundle() -> None:
    for until_s in (None, 100.0):
        state = two(num_gpus=1, until_s=until_s)
        state.now_s = 1099.0
        assert forecast_demand(state, 3.0).rollouts.keys() == {"a"}
        assert plan(state, Fair(QUICK)).ops == ()


def test_a_pipeline_that_waits_leaves_or_is_not_admitted_is_not_forecast() -> None:
    state = two()
    state.now_s = 1099.0
    pipeline = state.pipelines["a"]
    assert forecast_demand(state, 3.0).rollouts
    ask(state, "a")
    assert forecast_demand(state, 3.0) == ({}, math.inf)
    state.requests.clear()
    for phase in (PipelinePhase.QUARANTINED, PipelinePhase.LEAVING, PipelinePhase.REGISTERED):
        pipeline.phase = phase
        assert not forecast_demand(state, 3.0).rollouts
    pipeline.phase = PipelinePhase.ADMITTED
    pipeline.releasing[GENERATION_CLUSTER] = "k"
    assert not forecast_demand(state, 3.0).rollouts


def test_an_idle_engine_without_a_forecast_use_is_evicted_first() -> None:
    state = fleet(3)
    for name in "abc":
        add(state, name, range(3), rollouts_per_worker=1)
    wake(state, "a", 0)
    wake(state, "b", 1)
    state.now_s = 1000.0
    away(state, "a", 1000.0, 5.0)
    away(state, "b", 1000.0, 500.0)
    state.now_s = 1003.0
    demand(state, "c", 2)
    ops = plan(state, Fair(QUICK)).ops
    assert [op.pipeline_id for op in ops if isinstance(op, Shrink)] == ["b"]
    assert sorted(op.rank for op in ops if isinstance(op, Expand)) == [1, 2]


def test_credit_is_counted_from_the_demand_on() -> None:
    state = two()
    state.now_s = 1098.0
    made = carry_out(state, Fair(QUICK))
    assert made.credits["a"] == 0.0
    assert {claim.pipeline_id for claim in read_claims(PlanBuilder(state))} == {"b"}
