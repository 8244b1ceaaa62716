"""What a draft allows, and that what is rolled back leaves nothing."""

import pytest

from rollmesh.scheduler.planning.draft import Draft, Reservation
from rollmesh.scheduler.planning.ops import Expand, Grant, Release, Shrink
from rollmesh.scheduler.planning.state import FIXED, NodePhase, Owner, PipelinePhase, State
from rollmesh.wire.scheduling import GENERATION_CLUSTER, WorkerPhase
from tests.unit.scheduler.planning.fleets import TRAIN, Idle, add, ask, carry_out, fleet, wake


def stage() -> State:
    """p generates on 0, sleeps on 1; q trains on 2."""
    state = fleet(4)
    add(state, "p", generation=(0, 1), train=(1, 3))
    wake(state, "p", 0)
    add(state, "q", train=(2,))
    ask(state, "q")
    carry_out(state, Idle())
    return state


def view(draft: Draft) -> tuple[object, ...]:
    pipeline = draft.state.pipelines["p"]
    can = [
        (draft.can_shrink("p", worker), draft.can_expand("p", worker))
        for worker in pipeline.workers
    ]
    return [draft.owner(gpu) for gpu in range(4)], can, draft.num_awake(pipeline), draft.ops[:]


def test_ops_change_what_the_draft_sees_and_not_the_state() -> None:
    state = stage()
    draft = Draft(state)
    sleeper, waker = state.pipelines["p"].workers
    key = ask(state, "p")
    draft.shrink("p", sleeper, "p/1")
    draft.release("q", TRAIN)
    draft.expand("p", waker)
    assert draft.ops == [Shrink("p", 0, "p/1"), Release("q", TRAIN), Expand("p", 1)]
    owner = Owner("p", GENERATION_CLUSTER, 1)
    assert [draft.owner(gpu) for gpu in range(3)] == [None, owner, None]
    assert [draft.is_open(gpu) for gpu in range(3)] == [True, False, True]
    assert draft.num_awake(state.pipelines["p"]) == 1
    assert set(state.owners) == {0, 2}
    other = Draft(state)
    other.grant(key)
    assert other.owner(1) == other.owner(3) == Owner("p", TRAIN, FIXED)


def test_what_is_rolled_back_leaves_nothing() -> None:
    state = stage()
    key = ask(state, "p")
    sleeper, waker = state.pipelines["p"].workers
    draft = Draft(state)
    before = view(draft)
    mark = draft.mark()
    draft.shrink("p", sleeper, "p/1")
    middle, after_one = draft.mark(), view(draft)
    draft.expand("p", waker)
    draft.release("q", TRAIN)
    draft.rollback(middle)
    assert view(draft) == after_one
    draft.rollback(mark)
    draft.grant(key)
    assert draft.ops == [Grant(key)]
    draft.rollback(mark)
    assert view(draft) == before


def test_a_worker_moves_once_in_a_plan() -> None:
    state = stage()
    draft = Draft(state)
    sleeper, waker = state.pipelines["p"].workers
    draft.shrink("p", sleeper, "p/1")
    draft.expand("p", waker)
    for worker in (sleeper, waker):
        assert not draft.can_shrink("p", worker)
        assert not draft.can_expand("p", worker)
    with pytest.raises(AssertionError):
        draft.expand("p", sleeper)


@pytest.mark.parametrize(
    "phase", sorted(set(WorkerPhase) - {WorkerPhase.AWAKE, WorkerPhase.ASLEEP})
)
def test_a_worker_that_is_on_its_way_or_lost_stands_still(phase: WorkerPhase) -> None:
    state = stage()
    state.move_worker("p", 0, phase)
    worker = state.pipelines["p"].workers[0]
    draft = Draft(state)
    assert not draft.can_shrink("p", worker)
    assert not draft.can_expand("p", worker)


def test_a_worker_whose_gpus_are_promised_to_another_is_not_shrunk_for_a_third() -> None:
    state = stage()
    state.owners[0] = Owner("q", TRAIN, FIXED)
    assert not Draft(state).can_shrink("p", state.pipelines["p"].workers[0])


@pytest.mark.parametrize("phase", sorted(set(NodePhase) - {NodePhase.UP}))
def test_nothing_starts_on_a_node_that_is_not_up(phase: NodePhase) -> None:
    state = stage()
    worker = state.pipelines["p"].workers[1]
    assert Draft(state).can_expand("p", worker)
    assert Draft(state).is_open(1)
    state.nodes["a"].phase = phase
    assert not Draft(state).can_expand("p", worker)
    assert not Draft(state).is_open(1)


@pytest.mark.parametrize("phase", sorted(set(PipelinePhase) - {PipelinePhase.ADMITTED}))
def test_nothing_of_a_pipeline_starts_that_is_not_admitted(phase: PipelinePhase) -> None:
    state = stage()
    state.pipelines["p"].phase = phase
    assert not Draft(state).can_expand("p", state.pipelines["p"].workers[1])


def test_generation_that_is_being_given_up_does_not_start() -> None:
    state = stage()
    state.pipelines["p"].releasing[GENERATION_CLUSTER] = "release"
    assert not Draft(state).can_expand("p", state.pipelines["p"].workers[1])


def test_the_quota_counts_what_the_plan_has_done_already() -> None:
    state = fleet(6)
    pipeline = add(state, "p", generation=range(6), tp=2, max_gpus=5)
    wake(state, "p", 0)
    draft = Draft(state)
    sleeper, second, third = pipeline.workers
    draft.expand("p", second)
    assert not draft.can_expand("p", third)
    draft.shrink("p", sleeper, "p/2")
    assert draft.can_expand("p", third)
    draft.rollback(0)
    assert draft.can_expand("p", third)


def test_of_two_reservations_each_must_allow() -> None:
    draft = Draft(fleet(1))
    draft.reserve((0,), Reservation("a", is_settling=False, awaited=frozenset({"p", "q"})))
    draft.reserve((0,), Reservation("b", is_settling=False, awaited=frozenset({"p"})))
    assert draft.may_start("p", 0, gives_way=False)
    assert not draft.may_start("q", 0, gives_way=False)
    assert draft.may_start("q", 0, gives_way=True)
    draft.reserve((0,), Reservation("c", is_settling=True))
    assert not draft.may_start("p", 0, gives_way=True)
