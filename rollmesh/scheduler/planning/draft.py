"""A plan in the making: ops upon a state that stays as it is, and can be taken back.

Owns what differs from the state, and what fixed requests reserve. Invariants: a worker is moved at
most once in a plan, and none that already is on its way; what is rolled back leaves nothing; what
`can_` allows, invariants.py finds nothing against. Driven by plan.py and by policies.
"""

import msgspec

from rollmesh.scheduler.planning.ops import Expand, Grant, Op, Release, Shrink
from rollmesh.scheduler.planning.state import (
    FIXED,
    NodePhase,
    Owner,
    Pipeline,
    PipelinePhase,
    State,
    Worker,
)
from rollmesh.wire.scheduling import GENERATION_CLUSTER, WorkerPhase

# Looked up once: a plan asks thousands of times, and a look-up in an enum is not for nothing.
_ADMITTED, _QUARANTINED = PipelinePhase.ADMITTED, PipelinePhase.QUARANTINED
_AWAKE, _ASLEEP = WorkerPhase.AWAKE, WorkerPhase.ASLEEP


class Reservation(msgspec.Struct, frozen=True):
    """A fixed request's claim to its GPUs, of which it cannot have all now."""

    key: str
    is_settling: bool
    """It gets them all as soon as workers that wake have come to rest: nobody else starts there."""
    awaited: frozenset[str] = frozenset()
    """Pipelines that it waits for, which may take what they need to come to their end."""

    def allows(self, pipeline_id: str, gives_way: bool) -> bool:
        return not self.is_settling and (gives_way or pipeline_id in self.awaited)


class Draft:
    """See the module."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.ops: list[Op] = []
        self.owners = state.owners.copy()
        """By GPU, as State has them, with the ops so far: a copy, for it is asked far more often
        than it is made. Changed by ops alone."""
        self.free = state.node_of.keys() - self.owners.keys()
        """GPUs that are nobody's, of any node. Changed by ops alone."""
        self._moved: dict[tuple[str, int], bool] = {}
        """Workers that an op moves: whether it wakes."""
        self._num_awake: dict[str, int] = {}
        """Of pipelines that were asked about, or moved."""
        self.reserved: dict[int, list[Reservation]] = {}
        """By GPU; all must allow what starts there."""
        self.up: set[int] = set()
        """GPUs of nodes that take work."""
        for node in state.nodes.values():
            if node.phase is NodePhase.UP:
                self.up.update(node.gpus)

    # what is so, with the ops so far

    def owner(self, gpu: int) -> Owner | None:
        return self.owners.get(gpu)

    def is_open(self, gpu: int) -> bool:
        """Whether something new may start there: it is free, on a node that takes work."""
        return gpu in self.up and gpu not in self.owners

    def may_start(self, pipeline_id: str, gpu: int, gives_way: bool) -> bool:
        """Whether reservations leave the GPU to it; `gives_way`: it is taken back at any time."""
        return gpu not in self.reserved or all(
            each.allows(pipeline_id, gives_way) for each in self.reserved[gpu]
        )

    def num_awake(self, pipeline: Pipeline) -> int:
        """Its workers that serve, or will."""
        pipeline_id = pipeline.spec.pipeline_id
        if pipeline_id not in self._num_awake:
            self._num_awake[pipeline_id] = pipeline.num_awake
        return self._num_awake[pipeline_id]

    def can_shrink(self, pipeline_id: str, worker: Worker) -> bool:
        """Whether it serves and stands still: not on its way, not moved by this plan, not of a
        pipeline in quarantine."""
        if worker.phase is not _AWAKE:
            return False
        if self.state.pipelines[pipeline_id].phase is _QUARANTINED:
            return False
        owner = Owner(pipeline_id, GENERATION_CLUSTER, worker.rank)
        owners = self.owners
        for gpu in worker.gpus:  # noqa: SIM110 - a plan asks thousands of times
            if owners.get(gpu) != owner:
                return False
        return True

    def can_evict(self, pipeline_id: str, worker: Worker, to: str) -> bool:
        """Whether it can shrink, and may for the pipeline `to`."""
        return self.can_shrink(pipeline_id, worker) and self.state.gives_way(pipeline_id, to)

    def can_expand(self, pipeline_id: str, worker: Worker) -> bool:
        """Whether it sleeps and stands still, and may wake once nobody is on its GPUs: nodes,
        quota and reservations are for it. Whose they are now is not asked."""
        if worker.phase is not _ASLEEP or (pipeline_id, worker.rank) in self._moved:
            return False
        pipeline = self.state.pipelines[pipeline_id]
        if pipeline.phase is not _ADMITTED or pipeline.is_busy or self._has_enough(pipeline):
            return False
        if not self.up.issuperset(worker.gpus):
            return False
        gives_way = pipeline.spec.is_preemptible
        return not self.reserved or all(
            self.may_start(pipeline_id, gpu, gives_way) for gpu in worker.gpus
        )

    def _has_enough(self, pipeline: Pipeline) -> bool:
        if GENERATION_CLUSTER in pipeline.releasing:
            return True
        spec = pipeline.spec
        return 0 < spec.max_gpus < (self.num_awake(pipeline) + 1) * spec.tp

    # ops

    def shrink(self, pipeline_id: str, worker: Worker, for_: str) -> None:
        """One that can."""
        self.ops.append(Shrink(pipeline_id, worker.rank, for_))
        self._move(pipeline_id, worker, None)

    def expand(self, pipeline_id: str, worker: Worker) -> None:
        """One that can, on GPUs that nobody has."""
        self.ops.append(Expand(pipeline_id, worker.rank))
        self._move(pipeline_id, worker, Owner(pipeline_id, GENERATION_CLUSTER, worker.rank))

    def grant(self, key: str) -> None:
        request = self.state.requests[key]
        owner = Owner(request.pipeline_id, request.cluster, FIXED)
        self.ops.append(Grant(key))
        self._give(self.state.gpus_of(request), owner)

    def release(self, pipeline_id: str, cluster: str) -> None:
        gpus = self.state.pipelines[pipeline_id].spec.clusters[cluster]
        self.ops.append(Release(pipeline_id, cluster))
        self._give(gpus, None)

    def reserve(self, gpus: tuple[int, ...], reservation: Reservation) -> None:
        """Not an op: it holds for the rest of this plan."""
        for gpu in gpus:
            self.reserved.setdefault(gpu, []).append(reservation)

    def mark(self) -> int:
        """Where `rollback` may come back to."""
        return len(self.ops)

    def rollback(self, mark: int) -> None:
        """Take back all ops since."""
        while len(self.ops) > mark:
            self._undo(self.ops.pop())

    def _move(self, pipeline_id: str, worker: Worker, owner: Owner | None) -> None:
        """It wakes as the owner of its GPUs, or goes to sleep and leaves them to nobody."""
        target = (pipeline_id, worker.rank)
        assert target not in self._moved
        self._moved[target] = owner is not None
        self._count(pipeline_id, -1 if owner is None else 1)
        self._give(worker.gpus, owner)

    def _give(self, gpus: tuple[int, ...], owner: Owner | None) -> None:
        if owner is None:
            for gpu in gpus:
                del self.owners[gpu]
            self.free.update(gpus)
        else:
            self.owners.update(dict.fromkeys(gpus, owner))
            self.free.difference_update(gpus)

    def _count(self, pipeline_id: str, change: int) -> None:
        num_awake = self.num_awake(self.state.pipelines[pipeline_id])
        self._num_awake[pipeline_id] = num_awake + change

    def _undo(self, op: Op) -> None:
        state, owner = self.state, None
        match op:
            case Shrink(pipeline_id, rank) | Expand(pipeline_id, rank):
                was_awake = isinstance(op, Shrink)
                owner = Owner(pipeline_id, GENERATION_CLUSTER, rank) if was_awake else None
                gpus = state.pipelines[pipeline_id].workers[rank].gpus
                del self._moved[pipeline_id, rank]
                self._count(pipeline_id, 1 if was_awake else -1)
            case Grant(key):
                gpus = state.gpus_of(state.requests[key])
            case Release(pipeline_id, cluster):
                owner = Owner(pipeline_id, cluster, FIXED)
                gpus = state.pipelines[pipeline_id].spec.clusters[cluster]
        self._give(gpus, owner)
