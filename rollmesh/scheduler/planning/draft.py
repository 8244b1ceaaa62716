"""A plan in the making: ops upon a state that stays as it is, and can be taken back.

Owns what differs from the state. Invariants: a worker is moved at most once in a plan, and none
that already is on its way; what is rolled back leaves nothing. Driven by plan.py and by policies.
"""

from rollmesh.scheduler.planning.ops import Expand, Grant, Op, Release, Shrink
from rollmesh.scheduler.planning.state import (
    AWAKE_PHASES,
    FIXED,
    NodePhase,
    Owner,
    Pipeline,
    State,
    Worker,
)
from rollmesh.wire.scheduling import GENERATION_CLUSTER, WorkerPhase


class Draft:
    """See the module."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.ops: list[Op] = []
        self._owners: dict[int, Owner | None] = {}
        """Of GPUs whose owner is another than in the state."""
        self._moved: dict[tuple[str, int], bool] = {}
        """Workers that an op moves: whether it wakes."""
        self._undo: list[tuple[Op, list[tuple[int, Owner | None]]]] = []

    # what is so, with the ops so far

    def owner(self, gpu: int) -> Owner | None:
        return self._owners[gpu] if gpu in self._owners else self.state.owners.get(gpu)

    def is_open(self, gpu: int) -> bool:
        """Whether something new may start there: it is free, on a node that takes work."""
        node = self.state.node_of.get(gpu)
        return self.owner(gpu) is None and node is not None and node.phase is NodePhase.UP

    def is_awake(self, pipeline_id: str, worker: Worker) -> bool:
        """Whether it serves, or will."""
        return self._moved.get((pipeline_id, worker.rank), worker.phase in AWAKE_PHASES)

    def num_awake(self, pipeline: Pipeline) -> int:
        return sum(self.is_awake(pipeline.pipeline_id, each) for each in pipeline.workers)

    def can_shrink(self, pipeline_id: str, worker: Worker) -> bool:
        """Whether it serves and stands still: not on its way, not moved by this plan."""
        is_still = (pipeline_id, worker.rank) not in self._moved
        return is_still and worker.phase is WorkerPhase.AWAKE

    def can_expand(self, pipeline_id: str, worker: Worker) -> bool:
        """The same of one that sleeps; its GPUs may be somebody's."""
        is_still = (pipeline_id, worker.rank) not in self._moved
        return is_still and worker.phase is WorkerPhase.ASLEEP

    # ops

    def shrink(self, pipeline_id: str, worker: Worker, for_: str) -> None:
        assert self.can_shrink(pipeline_id, worker)
        self._moved[pipeline_id, worker.rank] = False
        self._do(Shrink(pipeline_id, worker.rank, for_), worker.gpus, None)

    def expand(self, pipeline_id: str, worker: Worker) -> None:
        assert self.can_expand(pipeline_id, worker)
        self._moved[pipeline_id, worker.rank] = True
        owner = Owner(pipeline_id, GENERATION_CLUSTER, worker.rank)
        self._do(Expand(pipeline_id, worker.rank), worker.gpus, owner)

    def grant(self, key: str) -> None:
        request = self.state.requests[key]
        gpus = self.state.pipelines[request.pipeline_id].spec.clusters[request.cluster]
        self._do(Grant(key), gpus, Owner(request.pipeline_id, request.cluster, FIXED))

    def release(self, pipeline_id: str, cluster: str) -> None:
        gpus = self.state.pipelines[pipeline_id].spec.clusters[cluster]
        self._do(Release(pipeline_id, cluster), gpus, None)

    def mark(self) -> int:
        """Where `rollback` may come back to."""
        return len(self.ops)

    def rollback(self, mark: int) -> None:
        """Take back all ops since."""
        while len(self.ops) > mark:
            op, before = self._undo.pop()
            self.ops.pop()
            self._owners.update(before)
            if isinstance(op, Shrink | Expand):
                del self._moved[op.pipeline_id, op.rank]

    def _do(self, op: Op, gpus: tuple[int, ...], owner: Owner | None) -> None:
        self._undo.append((op, [(gpu, self.owner(gpu)) for gpu in gpus]))
        self.ops.append(op)
        self._owners.update(dict.fromkeys(gpus, owner))
