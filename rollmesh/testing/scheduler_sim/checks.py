"""Checks of the scheduler's state after each of its steps.

- The owner of a GPU is a hold or a worker that says so, and the other way round.
- A worker is awake only on GPUs of the fleet. Generation is granted while an engine is awake.
- What was evicted for a request goes to that one, unless it has left or was withdrawn.
"""

from rollmesh.scheduler.planning.state import (
    AWAKE_PHASES,
    FIXED,
    FleetState,
    NodePhase,
    Owner,
    PipelinePhase,
    PipelineState,
)
from rollmesh.wire.scheduling import GENERATION_CLUSTER, WorkerPhase

OWNING = frozenset({WorkerPhase.AWAKE, WorkerPhase.WAKING, WorkerPhase.LOST})


def look_at_owners(state: FleetState) -> None:
    """Assert that owners, holds and workers agree in a projected state."""
    expected: dict[int, Owner] = {}
    for pipeline_id, pipeline in state.pipelines.items():
        for cluster in pipeline.holds:
            for gpu in pipeline.spec.clusters[cluster]:
                _put(expected, gpu, Owner(pipeline_id, cluster, FIXED))
        for worker in pipeline.workers:
            if worker.phase in OWNING:
                for gpu in worker.gpus:
                    _put(expected, gpu, Owner(pipeline_id, GENERATION_CLUSTER, worker.rank))
    assert state.owners == expected, f"owners {state.owners}, and by holds and workers {expected}"
    known = {gpu for node in state.nodes.values() for gpu in node.gpus}
    assert state.owners.keys() <= known, f"GPUs {state.owners.keys() - known} are of no node"


def _put(expected: dict[int, Owner], gpu: int, owner: Owner) -> None:
    assert gpu not in expected, f"GPU {gpu} is {expected[gpu]}'s and {owner}'s"
    expected[gpu] = owner


class EvictionChecks:
    """Checks why workers were put to sleep: the state has the reason in the same step.

    A worker that goes to sleep was asked to by its own pipeline (it has no demand, releases or
    leaves), its node or its quota; else one of its GPUs is promised to another request.
    """

    def __init__(self, state: FleetState) -> None:
        self.num_evicted = 0
        self._awake = _awake(state)

    def look(self, state: FleetState) -> None:
        """Check after a step."""
        awake = _awake(state)
        for pipeline_id, rank in self._awake - awake:
            pipeline = state.pipelines.get(pipeline_id)
            if pipeline is None:
                continue
            worker = pipeline.workers[rank]
            is_evicted = worker.phase is WorkerPhase.SLEEPING and _wants_it(state, pipeline)
            if is_evicted and all(
                state.node_of[each].phase is NodePhase.UP for each in worker.gpus
            ):
                self.num_evicted += 1
                promised = [gpu for gpu in worker.gpus if gpu in state.owners]
                assert promised, f"{pipeline_id}/{rank} was evicted, and no request gets its GPUs"
        self._awake = awake


def _awake(state: FleetState) -> set[tuple[str, int]]:
    return {
        (pipeline_id, worker.rank)
        for pipeline_id, pipeline in state.pipelines.items()
        for worker in pipeline.workers
        if worker.phase is WorkerPhase.AWAKE
    }


def _wants_it(state: FleetState, pipeline: PipelineState) -> bool:
    is_admitted = pipeline.phase is PipelinePhase.ADMITTED
    most = pipeline.spec.max_gpus // pipeline.spec.tp
    num = sum(each.phase in AWAKE_PHASES for each in pipeline.workers)
    is_over = most > 0 and num >= most
    return is_admitted and pipeline.demand is not None and not pipeline.releasing and not is_over
