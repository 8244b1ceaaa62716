"""Plan: its operations, their effect on the state, and the builder that policies add them to.

- An operation is applied only to a state in which it is valid; invariants.py proves this first.
- A Shrink names its beneficiary, whose Expand or Grant is in the same plan.
- PlanBuilder leaves the state unchanged. A worker moves at most once in a plan, and not while it is
  already moving. A rollback leaves no trace. Operations that the `can_` methods allow pass
  invariants.py.
"""

import enum

import msgspec

from rollmesh.scheduler.planning.shares import FairShares
from rollmesh.scheduler.planning.state import (
    FIXED,
    FleetState,
    GenerationWorker,
    GpuHold,
    NodePhase,
    Owner,
    PipelinePhase,
    PipelineState,
)
from rollmesh.wire.scheduling import GENERATION_CLUSTER, WorkerPhase


class ShrinkReason(enum.StrEnum):
    """Reasons to put a worker to sleep that are not another owner's need for its GPUs."""

    RELEASE = "release"
    """Its pipeline has released generation."""
    DRAIN = "drain"
    """Its node is draining."""
    LEAVE = "leave"
    """Its pipeline is leaving."""
    QUOTA = "quota"
    """Its pipeline exceeds `max_gpus`."""


class Shrink(msgspec.Struct, frozen=True):
    """Put a generation worker to sleep."""

    pipeline_id: str
    rank: int
    for_: str
    """Key of the request, or `pipeline/rank` of the worker, that gets its GPUs; or a
    ShrinkReason."""


class Expand(msgspec.Struct, frozen=True):
    """Wake a generation worker once its GPUs are clear."""

    pipeline_id: str
    rank: int


class Grant(msgspec.Struct, frozen=True):
    """Give a fixed cluster the GPUs it requested once they are clear."""

    key: str


class ReleaseCluster(msgspec.Struct, frozen=True):
    """Take back the GPUs that a fixed cluster has released."""

    pipeline_id: str
    cluster: str


Op = Shrink | Expand | Grant | ReleaseCluster


class GpuPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Operations to carry out now."""

    ops: tuple[Op, ...] = ()
    """In an order in which they can be applied: releases, shrinks, grants, expands."""
    credits: dict[str, float] = {}
    """`credit_gpu_s` of each pipeline at `now_s`."""
    again_s: float = float("inf")
    """When the plan may change without an event: the end of a slice, a hold or a reservation."""
    fair_shares: FairShares | None = None
    """Next value of `FleetState.fair_shares`."""


def worker_name(pipeline_id: str, rank: int) -> str:
    """Name of a worker in Shrink.for_."""
    return f"{pipeline_id}/{rank}"


def apply(state: FleetState, op: Op) -> None:
    """Apply an operation to the state."""
    match op:
        case Shrink(pipeline_id, rank, _):
            state.move_worker(pipeline_id, rank, WorkerPhase.SLEEPING)
        case Expand(pipeline_id, rank):
            state.move_worker(pipeline_id, rank, WorkerPhase.WAKING)
        case Grant(key):
            request = state.requests.pop(key)
            pipeline = state.pipelines[request.pipeline_id]
            pipeline.holds[request.cluster] = GpuHold(
                key=key, cluster=request.cluster, priority=request.priority, since_s=state.now_s
            )
            owner = Owner(request.pipeline_id, request.cluster, FIXED)
            state.owners.update(dict.fromkeys(state.gpus_of(request), owner))
        case ReleaseCluster(pipeline_id, cluster):
            pipeline = state.pipelines[pipeline_id]
            del pipeline.holds[cluster]
            pipeline.releasing.pop(cluster, None)
            for gpu in pipeline.spec.clusters[cluster]:
                del state.owners[gpu]


# Looked up once: an enum lookup is slow, and a plan needs thousands.
_ADMITTED, _QUARANTINED = PipelinePhase.ADMITTED, PipelinePhase.QUARANTINED
_AWAKE, _ASLEEP = WorkerPhase.AWAKE, WorkerPhase.ASLEEP


class GpuReservation(msgspec.Struct, frozen=True):
    """Reservation of a fixed cluster's GPUs, not all of which are available now."""

    key: str
    is_settling: bool
    """All GPUs become available once waking workers are awake; nothing else starts there until
    then."""
    awaited: frozenset[str] = frozenset()
    """Pipelines that the request waits for; they may still take what they need to finish."""

    def allows(self, pipeline_id: str, gives_way: bool) -> bool:
        return not self.is_settling and (gives_way or pipeline_id in self.awaited)


class PlanBuilder:
    def __init__(self, state: FleetState) -> None:
        self.state = state
        self.ops: list[Op] = []
        self.owners = state.owners.copy()
        """By GPU, with the operations so far; a copy, because lookups are far more frequent than
        copies. Changed by operations only."""
        self.free = state.node_of.keys() - self.owners.keys()
        """Unowned GPUs of any node. Changed by operations only."""
        self._moved: dict[tuple[str, int], bool] = {}
        """Workers moved by an operation; True if waking."""
        self._num_awake: dict[str, int] = {}
        """Awake workers by pipeline, for those that were looked up or moved."""
        self.reserved: dict[int, list[GpuReservation]] = {}
        """By GPU; all reservations must allow what starts there."""
        self.up: set[int] = set()
        """GPUs of nodes that are UP."""
        for node in state.nodes.values():
            if node.phase is NodePhase.UP:
                self.up.update(node.gpus)

    # views, with the operations so far

    def owner(self, gpu: int) -> Owner | None:
        return self.owners.get(gpu)

    def is_open(self, gpu: int) -> bool:
        """Whether something new may start on the GPU: it is free and its node is UP."""
        return gpu in self.up and gpu not in self.owners

    def may_start(self, pipeline_id: str, gpu: int, gives_way: bool) -> bool:
        """Whether reservations leave the GPU to the pipeline; `gives_way`: it can be preempted at
        any time."""
        return gpu not in self.reserved or all(
            each.allows(pipeline_id, gives_way) for each in self.reserved[gpu]
        )

    def num_awake(self, pipeline: PipelineState) -> int:
        """Workers of the pipeline that are awake or waking."""
        pipeline_id = pipeline.spec.pipeline_id
        if pipeline_id not in self._num_awake:
            self._num_awake[pipeline_id] = pipeline.num_awake
        return self._num_awake[pipeline_id]

    def can_shrink(self, pipeline_id: str, worker: GenerationWorker) -> bool:
        """Whether the worker is awake, not moved by this plan, and not in a quarantined
        pipeline."""
        if worker.phase is not _AWAKE:
            return False
        if self.state.pipelines[pipeline_id].phase is _QUARANTINED:
            return False
        owner = Owner(pipeline_id, GENERATION_CLUSTER, worker.rank)
        owners = self.owners
        for gpu in worker.gpus:  # noqa: SIM110 - hot path
            if owners.get(gpu) != owner:
                return False
        return True

    def can_evict(self, pipeline_id: str, worker: GenerationWorker, to: str) -> bool:
        """Whether the worker can shrink for the pipeline `to`."""
        return self.can_shrink(pipeline_id, worker) and self.state.gives_way(pipeline_id, to)

    def can_expand(self, pipeline_id: str, worker: GenerationWorker) -> bool:
        """Whether the worker is asleep and may wake once its GPUs are free: checks nodes, quota and
        reservations, not the current owners."""
        if worker.phase is not _ASLEEP or (pipeline_id, worker.rank) in self._moved:
            return False
        pipeline = self.state.pipelines[pipeline_id]
        if pipeline.phase is not _ADMITTED or pipeline.is_resizing or self._has_enough(pipeline):
            return False
        if not self.up.issuperset(worker.gpus):
            return False
        gives_way = pipeline.spec.is_preemptible
        return not self.reserved or all(
            self.may_start(pipeline_id, gpu, gives_way) for gpu in worker.gpus
        )

    def _has_enough(self, pipeline: PipelineState) -> bool:
        if GENERATION_CLUSTER in pipeline.releasing:
            return True
        spec = pipeline.spec
        return 0 < spec.max_gpus < (self.num_awake(pipeline) + 1) * spec.tp

    # ops

    def shrink(self, pipeline_id: str, worker: GenerationWorker, for_: str) -> None:
        """Put a worker to sleep; `can_shrink` holds."""
        self.ops.append(Shrink(pipeline_id, worker.rank, for_))
        self._move(pipeline_id, worker, None)

    def expand(self, pipeline_id: str, worker: GenerationWorker) -> None:
        """Wake a worker on free GPUs; `can_expand` holds."""
        self.ops.append(Expand(pipeline_id, worker.rank))
        self._move(pipeline_id, worker, Owner(pipeline_id, GENERATION_CLUSTER, worker.rank))

    def grant(self, key: str) -> None:
        request = self.state.requests[key]
        owner = Owner(request.pipeline_id, request.cluster, FIXED)
        self.ops.append(Grant(key))
        self._give(self.state.gpus_of(request), owner)

    def release(self, pipeline_id: str, cluster: str) -> None:
        gpus = self.state.pipelines[pipeline_id].spec.clusters[cluster]
        self.ops.append(ReleaseCluster(pipeline_id, cluster))
        self._give(gpus, None)

    def reserve(self, gpus: tuple[int, ...], reservation: GpuReservation) -> None:
        """Reserve GPUs for the rest of this plan; not an operation."""
        for gpu in gpus:
            self.reserved.setdefault(gpu, []).append(reservation)

    def mark(self) -> int:
        """Position to which `rollback` can return."""
        return len(self.ops)

    def rollback(self, mark: int) -> None:
        """Undo all operations since the mark."""
        while len(self.ops) > mark:
            self._undo(self.ops.pop())

    def _move(self, pipeline_id: str, worker: GenerationWorker, owner: Owner | None) -> None:
        """Count and apply a wake (`owner` given) or a sleep (None)."""
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
            case ReleaseCluster(pipeline_id, cluster):
                owner = Owner(pipeline_id, cluster, FIXED)
                gpus = state.pipelines[pipeline_id].spec.clusters[cluster]
        self._give(gpus, owner)
