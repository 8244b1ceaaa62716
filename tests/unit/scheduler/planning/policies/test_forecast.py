"""An engine is awake when a predictable demand comes, at little cost to the others."""

import math

import pytest

from rollmesh.scheduler.planning.claims import read_claims
from rollmesh.scheduler.planning.plan import Expand, PlanBuilder, Shrink
from rollmesh.scheduler.planning.planner import PolicyResult, plan
from rollmesh.scheduler.planning.policies.fair import KEEP_S, Fair, FairSettings, forecast_demand
from rollmesh.scheduler.planning.state import FleetState, PipelinePhase
from rollmesh.wire.scheduling import GENERATION_CLUSTER
from tests.unit.scheduler.planning.fleets import add, ask, carry_out, demand, fleet, wake
from tests.unit.scheduler.planning.policies.generating_fleet import GeneratingFleet

QUICK = FairSettings(quantum_s=10.0, hold_s=2.0, switch_s=3.0)
MANY = 10**6


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
def test_an_engine_is_awake_when_a_foreseen_signal_comes(policy: Fair) -> None:
    state = two()
    run = GeneratingFleet(state, policy, switch_s=1.0)
    run.run(1096.0)
    assert awake(state, "a") == 0, "it is too early"
    run.run(1100.0)
    assert (awake(state, "a") > 0) == (not isinstance(policy, SeesNothing))


def test_the_policy_reports_when_to_plan_for_it() -> None:
    state = two()
    assert plan(state, Fair(QUICK)).again_s == 1097.0
    assert forecast_demand(state, 3.0).rollouts == {}
    state.now_s = 1097.0
    assert forecast_demand(state, 3.0) == ({"a": 8}, 1103.0)


def test_engines_of_a_demand_that_does_not_come_are_given_back() -> None:
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
