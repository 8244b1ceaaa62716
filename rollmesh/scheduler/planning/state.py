"""What the planner knows: nodes, pipelines, who asks for GPUs, and whose each GPU is.

Invariants: a GPU is owned by whom it is promised to. A worker that goes to sleep owns nothing from
then on, one that wakes owns its GPUs though another may stand there for a moment: who really does
is the service's to know, which waits for it. A LOST worker owns its GPUs, but for those that are
promised to somebody already, until somebody tells the truth of it. On a node that is DOWN whatever
was not asleep is lost, and what was held stays held until it is given up: nothing new starts there,
so it costs nobody anything. `now_s` is part of the state, nothing here reads a clock. Changed by
its own methods, by ops.apply and by the service's machine; read by everybody.

    worker   ASLEEP -> WAKING -> AWAKE -> SLEEPING -> ASLEEP;  any -> LOST -> ASLEEP, AWAKE
             ASLEEP -> ABSENT (its engine has not come up yet) -> ASLEEP, AWAKE
    pipeline REGISTERED -> ADMITTED <-> QUARANTINED;  any -> LEAVING -> forgotten
    node     UP -> DRAINING -> UP;  UP, DRAINING -> DOWN -> UP
"""

import enum
from typing import NamedTuple

import msgspec

from rollmesh.scheduler.planning.habits import Habits
from rollmesh.scheduler.planning.index import Index
from rollmesh.scheduler.planning.water import Water
from rollmesh.wire.scheduling import GENERATION_CLUSTER, PipelineSpec, WorkerPhase

FIXED = -1
"""The rank of an owner that is not a generation worker."""
MAX_NODE_GPUS = 1024
"""A node that claims more is a mistake."""
AWAKE_PHASES = frozenset({WorkerPhase.AWAKE, WorkerPhase.WAKING})
OWNING_PHASES = AWAKE_PHASES | {WorkerPhase.LOST}
RESTING_PHASES = frozenset({WorkerPhase.ASLEEP, WorkerPhase.ABSENT})
"""Of those that stand on no GPU."""


class Owner(NamedTuple):
    """Whose a GPU is."""

    pipeline_id: str
    cluster: str
    rank: int
    """FIXED, or of the generation worker."""


class NodePhase(enum.StrEnum):
    """See the module."""

    UP = "up"
    DRAINING = "draining"
    DOWN = "down"


class Node(msgspec.Struct, kw_only=True):
    """A machine with GPUs."""

    name: str
    gpus: tuple[int, ...]
    """Numbers that are the fleet's; a node that comes back has the same."""
    labels: tuple[str, ...] = ()
    phase: NodePhase = NodePhase.UP


class Worker(msgspec.Struct, kw_only=True):
    """One engine of a pipeline: the unit that wakes and sleeps."""

    rank: int
    gpus: tuple[int, ...]
    phase: WorkerPhase = WorkerPhase.ASLEEP
    epoch: int = 0
    """Grows with each resize that names it: an older one is refused by its coordinator."""
    since_s: float = float("-inf")
    """When it entered its phase."""
    kv_tokens: int = 0
    """What its sleep would lose."""


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs that a fixed cluster has, or has been promised."""

    key: str
    """Of the ask."""
    cluster: str
    priority: int
    since_s: float


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A fixed cluster waits for all of its GPUs."""

    key: str
    pipeline_id: str
    cluster: str
    priority: int
    seq: int
    """In the order in which they were asked."""
    asked_s: float


class Demand(msgspec.Struct, kw_only=True):
    """A pipeline wants to generate: opened when it asks, closed when it releases, when all streams
    of its progress are retired, or when it leaves."""

    key: str
    estimate: int
    """Rollouts that are to come, as it said when it asked; 0: unknown."""
    opened_s: float


class Progress(msgspec.Struct, kw_only=True):
    """Of one stream of rollouts."""

    batch: int
    target: int
    completed: int
    is_retired: bool = False

    @property
    def remaining(self) -> int:
        return 0 if self.is_retired else max(0, self.target - self.completed)


class PipelinePhase(enum.StrEnum):
    """See the module."""

    REGISTERED = "registered"
    ADMITTED = "admitted"
    QUARANTINED = "quarantined"
    LEAVING = "leaving"


class Pipeline(msgspec.Struct, kw_only=True):
    """One tenant of the fleet."""

    spec: PipelineSpec
    workers: list[Worker]
    phase: PipelinePhase = PipelinePhase.REGISTERED
    holds: dict[str, Hold] = {}
    """By cluster."""
    releasing: dict[str, str] = {}
    """By cluster that is given up and not taken back yet, the key of the ask: the next plan takes a
    fixed one back, and puts all workers of the generation cluster to sleep."""
    demand: Demand | None = None
    progress: dict[str, Progress] = {}
    """By stream."""
    credit_gpu_s: float = 0.0
    """GPU seconds of generation that it should have had and has not (negative: has had too much),
    as the policy counts: what it has in `State.credited_s`."""
    is_busy: bool = False
    """A resize of it is under way: it is promised nothing more before that has ended, for it could
    not take it, and who was evicted for it would have been for nothing."""
    num_awake: int = 0
    """Of its workers, those that serve or will: counted by State.move_worker."""
    num_lost: int = 0
    """The same of those that nobody knows the truth of."""
    habits: Habits = msgspec.field(default_factory=Habits)
    """By which the policy foresees its next demand."""
    waiting_s: float | None = None
    """Since when it has demand and no worker that is awake or wakes."""

    @property
    def pipeline_id(self) -> str:
        return self.spec.pipeline_id

    @property
    def keeps_workers(self) -> bool:
        """Others get none of its awake ones: it is not preemptible, and wants them still. Two that
        kept what they have no demand for could wait for each other for ever."""
        return self.demand is not None and not self.spec.is_preemptible

    @property
    def remaining(self) -> int | None:
        """Rollouts that are left, None if nobody knows: what progress says where there is some, for
        it corrects the estimate and is never added to it."""
        if self.progress:
            return sum(each.remaining for each in self.progress.values())
        return (self.demand.estimate or None) if self.demand else 0


class State(msgspec.Struct, kw_only=True):
    """See the module."""

    now_s: float = 0.0
    nodes: dict[str, Node] = {}
    pipelines: dict[str, Pipeline] = {}
    """In the order of their registration."""
    requests: dict[str, Request] = {}
    """By key, in the order of `seq`."""
    owners: dict[int, Owner] = {}
    """By GPU; who is not in it is free."""
    credited_s: float = 0.0
    """Until when credits are counted."""
    node_of: dict[int, Node] = {}
    """By GPU, of all nodes."""
    water: Water | None = None
    """What the last plan's shares were made of, where they go on from: of a large fleet."""
    index: Index = msgspec.field(default_factory=Index)
    """Derived from the rest."""

    # nodes

    def add_node(self, node: Node) -> None:
        """A new one, or one that is back: it has the GPUs that it had, and what is lost there stays
        so until its coordinator is heard."""
        self.nodes[node.name] = node
        self.node_of.update(dict.fromkeys(node.gpus, node))

    def drain_node(self, name: str) -> None:
        """Nothing new starts there, and the next plan puts its workers to sleep."""
        self.nodes[name].phase = NodePhase.DRAINING

    def lose_node(self, name: str) -> None:
        """It is dead, or cannot be heard, which nobody can tell apart."""
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

    def add_pipeline(self, spec: PipelineSpec) -> Pipeline:
        """Register it; its workers are asleep. The spec was checked by placement.check."""
        starts = range(0, len(spec.generation), spec.tp)
        bundles = [spec.generation[start : start + spec.tp] for start in starts]
        workers = [Worker(rank=rank, gpus=gpus) for rank, gpus in enumerate(bundles)]
        self.pipelines[spec.pipeline_id] = Pipeline(spec=spec, workers=workers)
        self.index.add(spec.pipeline_id, spec.generation)
        return self.pipelines[spec.pipeline_id]

    def remove_pipeline(self, pipeline_id: str) -> None:
        """Forget it, with all that it has and asks for."""
        spec = self.pipelines.pop(pipeline_id).spec
        self.index.remove(pipeline_id, spec.generation)
        for gpu in {*spec.generation, *(gpu for gpus in spec.clusters.values() for gpu in gpus)}:
            if gpu in self.owners and self.owners[gpu].pipeline_id == pipeline_id:
                del self.owners[gpu]
        for key in [k for k, each in self.requests.items() if each.pipeline_id == pipeline_id]:
            del self.requests[key]

    def move_worker(self, pipeline_id: str, rank: int, phase: WorkerPhase) -> None:
        """It enters the phase now, and owns its GPUs or nothing as the phase has it.

        Not for one that serves on GPUs that are promised to another: it is SLEEPING here, and is
        told so again.
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
        self.note_waiting(pipeline)

    def note_waiting(self, pipeline: Pipeline) -> None:
        """Since when it waits for a worker, if it does: to be said when its demand has changed."""
        if pipeline.demand is None or pipeline.num_awake:
            pipeline.waiting_s = None
        elif pipeline.waiting_s is None:
            pipeline.waiting_s = self.now_s

    def count_workers(self, pipeline: Pipeline) -> None:
        """To be said when phases were put in by hand, of what was kept elsewhere."""
        pipeline.num_awake = pipeline.num_lost = 0
        for worker in pipeline.workers:
            self._count(pipeline, worker.phase, 1)

    def _count(self, pipeline: Pipeline, phase: WorkerPhase, change: int) -> None:
        if phase in AWAKE_PHASES:
            pipeline.num_awake += change
        elif phase is WorkerPhase.LOST:
            pipeline.num_lost += change

    # views

    def gpus_of(self, request: Request) -> tuple[int, ...]:
        return self.pipelines[request.pipeline_id].spec.clusters[request.cluster]

    def worker_of(self, owner: Owner) -> Worker | None:
        """The generation worker that this is, if it is one."""
        return (
            None if owner.rank == FIXED else self.pipelines[owner.pipeline_id].workers[owner.rank]
        )

    def gives_way(self, pipeline_id: str, to: str) -> bool:
        """Whether generation of the one makes room for the other: for its own clusters always."""
        return pipeline_id == to or not self.pipelines[pipeline_id].keeps_workers
