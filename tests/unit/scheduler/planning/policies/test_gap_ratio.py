"""`gap-ratio` shares as the system it follows, without that system's faults."""

from collections.abc import Sequence

from rollmesh.scheduler.planning.claims import Claim
from rollmesh.scheduler.planning.plan import Expand, PlanBuilder, Shrink
from rollmesh.scheduler.planning.planner import plan
from rollmesh.scheduler.planning.policies.gap_ratio import GapRatio
from rollmesh.scheduler.planning.state import FleetState, StreamProgress
from rollmesh.wire.scheduling import WorkerPhase
from tests.unit.scheduler.planning.fleets import add, carry_out, demand, fleet, settle, wake


class CountsIdleGpus(GapRatio):
    """Fault W7: counts all GPUs, usable or not."""

    def count_gpus(self, builder: PlanBuilder, claims: Sequence[Claim]) -> int:
        return len(builder.state.node_of)


def progress(state: FleetState, pipeline_id: str, target: int, completed: int) -> None:
    stream = StreamProgress(batch=0, target=target, completed=completed)
    state.pipelines[pipeline_id].progress = {"train": stream}


def after(state: FleetState, policy: GapRatio | None = None) -> dict[str, list[int]]:
    """Awake ranks once a plan is carried out."""
    carry_out(state, policy or GapRatio())
    settle(state)
    return {
        name: [each.rank for each in pipeline.workers if each.phase is WorkerPhase.AWAKE]
        for name, pipeline in state.pipelines.items()
    }


def test_all_idle_gpus_go_to_the_only_pipeline() -> None:
    state = fleet(4)
    add(state, "a", range(4))
    demand(state, "a")
    assert after(state) == {"a": [0, 1, 2, 3]}


def test_an_estimate_is_enough_until_there_is_progress() -> None:
    state = fleet(4)
    for name, estimate in (("a", 30), ("b", 10)):
        add(state, name, range(4))
        demand(state, name, estimate)
    assert after(state) == {"a": [0, 2, 3], "b": [1]}


def test_progress_corrects_the_estimate_and_is_not_added_to_it() -> None:
    state = fleet(4)
    for name, estimate in (("a", 1000), ("b", 30)):
        add(state, name, range(4))
        demand(state, name, estimate)
    progress(state, "a", target=1000, completed=990)
    assert {name: len(ranks) for name, ranks in after(state).items()} == {"a": 1, "b": 3}


def test_no_demand_is_invented() -> None:
    state = fleet(4)
    add(state, "a", range(4))
    progress(state, "a", target=8, completed=0)
    assert after(state) == {"a": []}


def test_a_demand_without_an_estimate_gets_the_floor() -> None:
    state = fleet(4)
    for name, estimate in (("a", 100), ("b", 0)):
        add(state, name, range(4))
        demand(state, name, estimate)
    wake(state, "a", 0, 1, 2, 3)
    assert {name: len(ranks) for name, ranks in after(state).items()} == {"a": 3, "b": 1}


def test_a_pipeline_above_its_share_gives_way() -> None:
    state = fleet(4)
    for name in ("a", "b"):
        add(state, name, range(4))
        demand(state, name, 40)
    wake(state, "a", 0, 1, 2, 3)
    assert {name: len(ranks) for name, ranks in after(state).items()} == {"a": 2, "b": 2}


def test_nothing_is_given_to_a_pipeline_without_demand() -> None:
    state = fleet(4)
    for name in ("a", "b"):
        add(state, name, range(4))
    demand(state, "a", 40)
    wake(state, "a", 0, 1, 2, 3)
    assert plan(state, GapRatio()).ops == ()


def test_a_pipeline_without_generation_is_no_fault() -> None:
    state = fleet(4)
    add(state, "a", train=[0])
    add(state, "b", range(4))
    for name in ("a", "b"):
        demand(state, name)
    assert after(state) == {"a": [], "b": [0, 1, 2, 3]}


def test_a_pipeline_past_its_target_wants_nothing() -> None:
    state = fleet(2)
    for name in ("a", "b"):
        add(state, name, [0, 1])
        demand(state, name)
    wake(state, "a", 0, 1)
    progress(state, "a", target=8, completed=9)
    assert after(state) == {"a": [], "b": [0, 1]}


def test_open_bundles_go_first_then_those_of_the_pipeline_with_most_work_left() -> None:
    state = fleet(7)
    add(state, "a", [0, 1, 2])
    add(state, "b", [3, 4, 5])
    add(state, "c", [0, 3, 6])
    demand(state, "a", 100)
    demand(state, "b", 100)
    wake(state, "a", 0, 1, 2)
    wake(state, "b", 0, 1, 2)
    progress(state, "a", target=100, completed=60)
    progress(state, "b", target=100, completed=40)
    demand(state, "c", 100)
    ops = plan(state, GapRatio()).ops
    assert [op.rank for op in ops if isinstance(op, Expand)] == [2, 1, 0]
    assert [op.pipeline_id for op in ops if isinstance(op, Shrink)] == ["b", "a"]


def test_no_worker_moves_there_and_back_in_one_plan() -> None:
    state = fleet(8)
    for name, estimate in (("a", 10), ("b", 200), ("c", 90)):
        add(state, name, range(8))
        demand(state, name, estimate)
    wake(state, "a", *range(8))
    ops = plan(state, GapRatio()).ops
    moved = [(op.pipeline_id, op.rank) for op in ops if isinstance(op, Shrink | Expand)]
    assert len(moved) == len(set(moved)) == 14
    carry_out(state, GapRatio())
    settle(state)
    assert plan(state, GapRatio()).ops == (), "the next plan has nothing to correct"


def test_gpus_that_no_pipeline_can_use_count_for_none() -> None:
    for policy, expected in ((GapRatio(), 1), (CountsIdleGpus(), 0)):
        state = fleet(10)
        for name in ("a", "b"):
            add(state, name, [0, 1])
            demand(state, name, 100)
        wake(state, "a", 0, 1)
        assert len(after(state, policy)["b"]) == expected


def test_one_plan_wakes_every_worker_of_the_only_pipeline_once() -> None:
    state = fleet(1100)
    add(state, "a", range(1100))
    demand(state, "a", 5000)
    assert plan(state, GapRatio()).ops == tuple(Expand("a", rank) for rank in range(1100))
