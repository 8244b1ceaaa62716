"""What each op does to the state."""

from rollmesh.scheduler.planning.ops import Expand, Grant, Release, Shrink, apply, worker_name
from rollmesh.scheduler.planning.state import FIXED, Owner
from rollmesh.wire.scheduling import GENERATION_CLUSTER, GpuPriority, WorkerPhase
from tests.unit.scheduler.planning.fleets import TRAIN, add, ask, fleet, wake


def test_a_worker_owns_its_gpus_from_its_expand_to_its_shrink() -> None:
    state = fleet(4)
    pipeline = add(state, "p", generation=range(4), tp=2)
    state.now_s = 1.0
    apply(state, Expand("p", 1))
    worker = pipeline.workers[1]
    assert (worker.phase, worker.since_s) == (WorkerPhase.WAKING, 1.0)
    assert state.owners == dict.fromkeys((2, 3), Owner("p", GENERATION_CLUSTER, 1))
    state.now_s = 2.0
    wake(state, "p", 1)
    apply(state, Shrink("p", 1, "release"))
    assert (worker.phase, worker.since_s) == (WorkerPhase.SLEEPING, 2.0)
    assert state.owners == {}


def test_a_cluster_holds_its_gpus_from_its_grant_to_its_release() -> None:
    state = fleet(2)
    pipeline = add(state, "p", train=(0, 1))
    key = ask(state, "p", priority=GpuPriority.CRITIC_TRAINING)
    state.now_s = 4.0
    apply(state, Grant(key))
    assert state.requests == {}
    hold = pipeline.holds[TRAIN]
    assert (hold.key, hold.priority, hold.since_s) == (key, GpuPriority.CRITIC_TRAINING, 4.0)
    assert state.owners == dict.fromkeys((0, 1), Owner("p", TRAIN, FIXED))
    pipeline.releasing[TRAIN] = "release"
    apply(state, Release("p", TRAIN))
    assert (pipeline.holds, pipeline.releasing, state.owners) == ({}, {}, {})


def test_a_worker_is_called_by_its_pipeline_and_rank() -> None:
    assert worker_name("p", 3) == "p/3"
