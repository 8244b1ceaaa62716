"""Planner state: nodes, pipelines, open requests, the owner of each GPU, and an index of these.

- A promised GPU belongs to the owner it is promised to. A worker that starts to sleep owns nothing
  from then on; a worker that starts to wake owns its GPUs, even while another process still uses
  them. Actual use is tracked by the service, which waits for it to end.
- A LOST worker keeps its GPUs, except those already promised to another owner, until its
  coordinator reports it.
- On a DOWN node every worker that was not asleep is LOST, and holds stay until they are released.
  Nothing starts there.
- `now_s` is part of the state; no code here reads a clock.

    worker   ASLEEP -> WAKING -> AWAKE -> SLEEPING -> ASLEEP;  any -> LOST -> ASLEEP, AWAKE
             ASLEEP -> ABSENT (its engine has not started yet) -> ASLEEP, AWAKE
    pipeline REGISTERED -> ADMITTED <-> QUARANTINED;  any -> LEAVING -> removed
    node     UP -> DRAINING -> UP;  UP, DRAINING -> DOWN -> UP
"""

import enum
import math
from typing import NamedTuple

import msgspec

from rollmesh.scheduler.planning.shares import FairShares, GpuPool
from rollmesh.wire.scheduling import GENERATION_CLUSTER, PipelineSpec, WorkerPhase

FIXED = -1
"""Rank of an owner that is a fixed cluster."""
MAX_NODE_GPUS = 1024
"""Upper bound on the GPUs of a node; more is a configuration mistake."""
AWAKE_PHASES = frozenset({WorkerPhase.AWAKE, WorkerPhase.WAKING})
OWNING_PHASES = AWAKE_PHASES | {WorkerPhase.LOST}
RESTING_PHASES = frozenset({WorkerPhase.ASLEEP, WorkerPhase.ABSENT})
"""Phases in which a worker uses no GPU."""


class Owner(NamedTuple):
    """Owner of a GPU: a fixed cluster or a generation worker."""

    pipeline_id: str
    cluster: str
    rank: int
    """Rank of the generation worker, or FIXED."""


class NodePhase(enum.StrEnum):
    UP = "up"
    DRAINING = "draining"
    DOWN = "down"


class GpuNode(msgspec.Struct, kw_only=True):
    name: str
    gpus: tuple[int, ...]
    """Fleet-wide GPU numbers; a node that rejoins keeps them."""
    labels: tuple[str, ...] = ()
    phase: NodePhase = NodePhase.UP


class GenerationWorker(msgspec.Struct, kw_only=True):
    """One engine of a pipeline: the unit that wakes and sleeps."""

    rank: int
    gpus: tuple[int, ...]
    phase: WorkerPhase = WorkerPhase.ASLEEP
    epoch: int = 0
    """Incremented by each resize of the worker; the coordinator refuses older epochs."""
    since_s: float = float("-inf")
    """When the worker entered its phase."""
    kv_tokens: int = 0
    """KV-cache tokens that would be lost if the worker slept."""


class GpuHold(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs that a fixed cluster holds or has been promised."""

    key: str
    """Key of the request."""
    cluster: str
    priority: int
    since_s: float


class ClusterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A fixed cluster waiting for all of its GPUs."""

    key: str
    pipeline_id: str
    cluster: str
    priority: int
    seq: int
    """Order of arrival."""
    asked_s: float


class Demand(msgspec.Struct, kw_only=True):
    """A pipeline's wish to generate. Closed when the pipeline releases generation, when all streams
    of its progress are retired, or when the pipeline leaves."""

    key: str
    estimate: int
    """Rollouts still to come, as stated by the request; 0: unknown."""
    opened_s: float


_ENDED = "ended"


class DemandHistory(msgspec.Struct, kw_only=True):
    """Predicts a pipeline's next demand from its earlier steps.

    A mark is an event of each step: demand ends, a cluster is granted for a phase. The next demand
    is expected as long after the newest mark as it came after the same mark in the previous step. A
    mark that was not seen before predicts nothing, and there are no marks while there is demand.

        ended > granted, granted... > requested > (generates) > ended...
    """

    marks: dict[str, float] = {}
    """Marks since the demand ended, with the time each was first seen; newest last."""
    until_s: dict[str, float] = {}
    """Seconds from each mark to the demand that followed it in the previous step."""
    estimate: int = 0
    """Rollouts stated by the last demand; 0: unknown."""

    def note_ended(self, now_s: float) -> None:
        """Record that the demand was closed."""
        self.marks[_ENDED] = now_s

    def note_granted(self, cluster: str, priority: int, now_s: float) -> None:
        """Record that a phase began; ignored while there is demand."""
        if self.marks:
            self.marks.setdefault(f"{cluster}/{priority}", now_s)

    def note_requested(self, estimate: int, now_s: float) -> None:
        """Record a new demand."""
        for name, marked_s in self.marks.items():
            self.until_s[name] = now_s - marked_s
        self.marks, self.estimate = {}, estimate

    def reset(self) -> None:
        """Forget the marks: the run that would request generation is gone."""
        self.marks = {}

    @property
    def newest_mark_s(self) -> float | None:
        return next(reversed(self.marks.values())) if self.marks else None

    @property
    def expected_s(self) -> float:
        """When the next demand is expected; inf if unknown."""
        if not self.marks:
            return math.inf
        name, marked_s = next(reversed(self.marks.items()))
        return marked_s + self.until_s.get(name, math.inf)


class StreamProgress(msgspec.Struct, kw_only=True):
    """Progress of one stream of rollouts."""

    batch: int
    target: int
    completed: int
    is_retired: bool = False

    @property
    def remaining(self) -> int:
        return 0 if self.is_retired else max(0, self.target - self.completed)


class PipelinePhase(enum.StrEnum):
    REGISTERED = "registered"
    ADMITTED = "admitted"
    QUARANTINED = "quarantined"
    LEAVING = "leaving"


class PipelineState(msgspec.Struct, kw_only=True):
    """One tenant of the fleet."""

    spec: PipelineSpec
    workers: list[GenerationWorker]
    phase: PipelinePhase = PipelinePhase.REGISTERED
    holds: dict[str, GpuHold] = {}
    """By cluster."""
    releasing: dict[str, str] = {}
    """Request key of each cluster that was given up and not taken back yet. The next plan releases
    a fixed cluster, and puts all workers of the generation cluster to sleep."""
    demand: Demand | None = None
    progress: dict[str, StreamProgress] = {}
    """By stream."""
    credit_gpu_s: float = 0.0
    """GPU seconds of generation owed to the pipeline; negative if it had more than its share.
    Current as of `FleetState.credited_s`."""
    is_resizing: bool = False
    """A resize is in progress. Until it ends the pipeline is promised nothing, since it could not
    use it and the eviction would be in vain."""
    num_awake: int = 0
    """Workers that are awake or waking; maintained by FleetState.move_worker."""
    num_lost: int = 0
    """Workers that are LOST; maintained by FleetState.move_worker."""
    demand_history: DemandHistory = msgspec.field(default_factory=DemandHistory)
    waiting_s: float | None = None
    """Since when the pipeline has demand but no worker that is awake or waking."""

    @property
    def pipeline_id(self) -> str:
        return self.spec.pipeline_id

    @property
    def keeps_workers(self) -> bool:
        """Whether other pipelines cannot preempt its awake workers: it is not preemptible and still
        has demand. Without demand it must give way, or two such pipelines could wait for each other
        forever."""
        return self.demand is not None and not self.spec.is_preemptible

    @property
    def remaining(self) -> int | None:
        """Rollouts left; None if unknown. Progress reports replace the estimate and are never added
        to it."""
        if self.progress:
            return sum(each.remaining for each in self.progress.values())
        return (self.demand.estimate or None) if self.demand else 0


class GpuCell(NamedTuple):
    """GPUs with the same users."""

    gpus: tuple[int, ...]
    users: tuple[str, ...]


class UsableBundles(NamedTuple):
    """Workers of a pipeline that could be awake."""

    pipeline: PipelineState
    bundles: list[GenerationWorker]


class ClaimedGpus(NamedTuple):
    """GPUs that a claim can use."""

    bundles: list[GenerationWorker]
    gpus: frozenset[int]


class Availability:
    """Where generation was possible at the last plan."""

    def __init__(self) -> None:
        self.closed: set[int] = set()
        """GPUs where no pipeline can generate."""
        self.exclusive: dict[int, str] = {}
        """GPUs where only one pipeline can generate, by its id."""
        self.usable: dict[str, UsableBundles] = {}
        self.claimed: dict[str, ClaimedGpus] = {}
        """By pipeline, the claim that `pools` was computed from."""
        self.pools: dict[int, GpuPool] = {}
        """By first GPU; replaced, never modified."""
        self.pools_of_cell: dict[int, tuple[int, ...]] = {}
        """Pools by the first GPU of their cell."""


class FleetIndex:
    """Derived data that is costly to compute, kept between plans.

    - A state with an empty index gives the same plan, and indexes compare equal.
    - `users` and the cells change when a pipeline is added or removed. `availability` is compared
      with that of the last plan and recomputed where it differs.
    """

    def __init__(self) -> None:
        self.users: dict[int, dict[str, None]] = {}
        """By GPU, the pipelines that may generate there, in order of registration."""
        self.availability = Availability()
        self._cells: dict[int, GpuCell] | None = None
        self._cells_of: dict[str, list[int]] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FleetIndex)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def add(self, pipeline_id: str, gpus: tuple[int, ...]) -> None:
        """Add a pipeline that may generate on these GPUs."""
        for gpu in gpus:
            self.users.setdefault(gpu, {})[pipeline_id] = None
        self._forget()

    def remove(self, pipeline_id: str, gpus: tuple[int, ...]) -> None:
        for gpu in gpus:
            self.users[gpu].pop(pipeline_id, None)
            if not self.users[gpu]:
                del self.users[gpu]
        self.availability.usable.pop(pipeline_id, None)
        self._forget()

    def cells(self) -> dict[int, GpuCell]:
        """Cells by their first GPU, in its order."""
        if self._cells is None:
            self._cells, self._cells_of = self._find_cells()
        return self._cells

    def cells_of(self, pipeline_id: str) -> list[int]:
        """First GPUs of the cells where the pipeline may generate."""
        self.cells()
        return self._cells_of.get(pipeline_id, [])

    def update_availability(self, closed: set[int], exclusive: dict[int, str]) -> Availability:
        """Forget the usable bundles of pipelines where availability has changed."""
        availability = self.availability
        changed = closed ^ availability.closed
        changed.update(gpu for gpu, _ in exclusive.items() ^ availability.exclusive.items())
        for gpu in changed:
            for pipeline_id in self.users.get(gpu, ()):
                availability.usable.pop(pipeline_id, None)
        availability.closed, availability.exclusive = closed, exclusive
        return availability

    def _forget(self) -> None:
        self._cells = None
        self.availability.claimed, self.availability.pools, self.availability.pools_of_cell = (
            {},
            {},
            {},
        )

    def _find_cells(self) -> tuple[dict[int, GpuCell], dict[str, list[int]]]:
        gpus_of: dict[tuple[str, ...], list[int]] = {}
        for gpu in sorted(self.users):
            gpus_of.setdefault(tuple(self.users[gpu]), []).append(gpu)
        cells_of: dict[str, list[int]] = {}
        cells = {}
        for users, gpus in gpus_of.items():
            cells[gpus[0]] = GpuCell(tuple(gpus), users)
            for pipeline_id in users:
                cells_of.setdefault(pipeline_id, []).append(gpus[0])
        return cells, cells_of


class FleetState(msgspec.Struct, kw_only=True):
    now_s: float = 0.0
    nodes: dict[str, GpuNode] = {}
    pipelines: dict[str, PipelineState] = {}
    """In order of registration."""
    requests: dict[str, ClusterRequest] = {}
    """By key, in order of `seq`."""
    owners: dict[int, Owner] = {}
    """By GPU; a GPU without an entry is free."""
    credited_s: float = 0.0
    """Time up to which credits are counted."""
    node_of: dict[int, GpuNode] = {}
    """Node of each GPU."""
    fair_shares: FairShares | None = None
    """Shares of the last plan, from which the next continues; only in large fleets."""
    index: FleetIndex = msgspec.field(default_factory=FleetIndex)
    """Derived from the other fields."""

    # nodes

    def add_node(self, node: GpuNode) -> None:
        """Add a node, or bring one back with the same GPUs. Workers lost there stay LOST until
        their coordinator reports them."""
        self.nodes[node.name] = node
        self.node_of.update(dict.fromkeys(node.gpus, node))

    def drain_node(self, name: str) -> None:
        """Start nothing new on the node; the next plan puts its workers to sleep."""
        self.nodes[name].phase = NodePhase.DRAINING

    def lose_node(self, name: str) -> None:
        """Mark a node DOWN: it is dead or unreachable; the scheduler cannot distinguish these."""
        node = self.nodes[name]
        node.phase = NodePhase.DOWN
        there = frozenset(node.gpus)
        for pipeline_id, pipeline in self.pipelines.items():
            if there.isdisjoint(pipeline.spec.generation):
                continue
            for worker in pipeline.workers:
                if worker.phase not in RESTING_PHASES and not there.isdisjoint(worker.gpus):
                    self.move_worker(pipeline_id, worker.rank, WorkerPhase.LOST)

    # pipelines

    def add_pipeline(self, spec: PipelineSpec) -> PipelineState:
        """Register a pipeline with all workers asleep. The caller has checked the spec with
        placement.check."""
        starts = range(0, len(spec.generation), spec.tp)
        bundles = [spec.generation[start : start + spec.tp] for start in starts]
        workers = [GenerationWorker(rank=rank, gpus=gpus) for rank, gpus in enumerate(bundles)]
        self.pipelines[spec.pipeline_id] = PipelineState(spec=spec, workers=workers)
        self.index.add(spec.pipeline_id, spec.generation)
        return self.pipelines[spec.pipeline_id]

    def remove_pipeline(self, pipeline_id: str) -> None:
        """Remove a pipeline with its GPUs and requests."""
        spec = self.pipelines.pop(pipeline_id).spec
        self.index.remove(pipeline_id, spec.generation)
        for gpu in {*spec.generation, *(gpu for gpus in spec.clusters.values() for gpu in gpus)}:
            if gpu in self.owners and self.owners[gpu].pipeline_id == pipeline_id:
                del self.owners[gpu]
        for key in [k for k, each in self.requests.items() if each.pipeline_id == pipeline_id]:
            del self.requests[key]

    def move_worker(self, pipeline_id: str, rank: int, phase: WorkerPhase) -> None:
        """Move a worker to a phase now, and update the ownership of its GPUs.

        Not for a worker that reports AWAKE on GPUs promised to another owner: it stays SLEEPING
        here and is ordered to sleep again.
        """
        pipeline = self.pipelines[pipeline_id]
        worker = pipeline.workers[rank]
        if worker.phase is not phase:
            self._count(pipeline, worker.phase, -1)
            self._count(pipeline, phase, 1)
            worker.phase, worker.since_s = phase, self.now_s
        owner = Owner(pipeline_id, GENERATION_CLUSTER, rank)
        for gpu in worker.gpus:
            if phase in OWNING_PHASES:
                self.owners.setdefault(gpu, owner)
            elif self.owners.get(gpu) == owner:
                del self.owners[gpu]
        self.update_waiting(pipeline)

    def update_waiting(self, pipeline: PipelineState) -> None:
        """Update `waiting_s` after the demand or the number of awake workers changed."""
        if pipeline.demand is None or pipeline.num_awake:
            pipeline.waiting_s = None
        elif pipeline.waiting_s is None:
            pipeline.waiting_s = self.now_s

    def recount_workers(self, pipeline: PipelineState) -> None:
        """Recount `num_awake` and `num_lost` after phases were set directly."""
        pipeline.num_awake = pipeline.num_lost = 0
        for worker in pipeline.workers:
            self._count(pipeline, worker.phase, 1)

    def _count(self, pipeline: PipelineState, phase: WorkerPhase, change: int) -> None:
        if phase in AWAKE_PHASES:
            pipeline.num_awake += change
        elif phase is WorkerPhase.LOST:
            pipeline.num_lost += change

    # views

    def gpus_of(self, request: ClusterRequest) -> tuple[int, ...]:
        return self.pipelines[request.pipeline_id].spec.clusters[request.cluster]

    def worker_of(self, owner: Owner) -> GenerationWorker | None:
        """Return the generation worker that is this owner; None for a fixed cluster."""
        return (
            None if owner.rank == FIXED else self.pipelines[owner.pipeline_id].workers[owner.rank]
        )

    def gives_way(self, pipeline_id: str, to: str) -> bool:
        """Whether generation of `pipeline_id` can be preempted for `to`; always for its own
        clusters."""
        return pipeline_id == to or not self.pipelines[pipeline_id].keeps_workers
