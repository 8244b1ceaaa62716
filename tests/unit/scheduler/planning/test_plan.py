"""The cycle of the planner: what must go, fixed clusters, generation."""

from rollmesh.scheduler.planning.ops import Expand, Grant, Release, Shrink, ShrinkReason
from rollmesh.scheduler.planning.plan import plan
from rollmesh.wire.scheduling import GENERATION_CLUSTER
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
    wake,
)


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


def test_generation_that_is_given_up_goes_to_sleep_whole() -> None:
    state = fleet(2)
    pipeline = add(state, "p", generation=(0, 1))
    wake(state, "p", 0, 1)
    pipeline.releasing[GENERATION_CLUSTER] = "release"
    shrinks = (Shrink("p", 0, ShrinkReason.RELEASE), Shrink("p", 1, ShrinkReason.RELEASE))
    assert plan(state, Idle()).ops == shrinks
