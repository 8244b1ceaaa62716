"""`static` partitions the fleet once, and moves no worker for load."""

from rollmesh.scheduler.planning.planner import plan
from rollmesh.scheduler.planning.policies.static import Static, partition
from tests.unit.scheduler.planning.fleets import add, carry_out, demand, fleet, settle


def test_each_pipeline_has_its_training_gpus_and_no_gpu_has_two_owners() -> None:
    state = fleet(4)
    add(state, "a", range(4), train=[2, 3])
    add(state, "b", range(4), train=[0, 1])
    assert partition(state) == {"a": {2, 3}, "b": {0, 1}}


def test_the_rest_is_dealt_in_turn() -> None:
    state = fleet(8)
    add(state, "a", range(8), tp=2)
    add(state, "b", range(8))
    add(state, "c", range(4))
    assert partition(state) == {"a": {0, 2}, "b": {2, 6, 7}, "c": {3}}


def test_a_pipeline_wakes_only_its_own_part_while_it_has_demand() -> None:
    state = fleet(4)
    for name in ("a", "b"):
        add(state, name, range(4))
    demand(state, "a", 1000)
    made = carry_out(state, Static())
    settle(state)
    assert len(made.ops) == 2
    state.now_s = 1000.0
    assert plan(state, Static()).ops == ()
    demand(state, "b", 1)
    assert len(plan(state, Static()).ops) == 1, "it can fill no more than one"


def test_a_later_pipeline_gets_its_part_from_the_earlier_owner() -> None:
    state = fleet(4)
    add(state, "a", range(4))
    demand(state, "a", 1000)
    carry_out(state, Static())
    settle(state)
    add(state, "b", range(4))
    demand(state, "b", 1000)
    carry_out(state, Static())
    settle(state)
    awake = {name: partition(state)[name] for name in ("a", "b")}
    assert awake == {"a": {0, 2}, "b": {1, 3}}
    assert {gpu: owner.pipeline_id for gpu, owner in state.owners.items()} == {
        0: "a", 1: "b", 2: "a", 3: "b",
    }  # fmt: skip
