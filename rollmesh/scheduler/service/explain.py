"""Why a pipeline waits, and until what: the state put into words, for people and for programs.

Owns the answer to ReadScheduler, which is a FleetView as JSON. Invariants: pure, and it only reads;
whoever waits is told which GPUs it misses, who has each of them since when, and what ends the wait;
times are spans as of now, for no clock of ours is the reader's. Driven by the service's process and
by its tests; what the verb `rollmesh scheduler explain` shows are the lines that stand here.
"""

from collections.abc import Iterator, Mapping

import msgspec

from rollmesh.scheduler.planning.state import (
    AWAKE_PHASES,
    FIXED,
    NodePhase,
    Owner,
    Pipeline,
    PipelinePhase,
    Request,
    State,
    Worker,
)
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    GpuPriority,
    PipelineSpec,
    RunClaim,
    WorkerPhase,
)

FOREVER = float("inf")


class UnderWay(msgspec.Struct, frozen=True, kw_only=True):
    """An op that was planned and is not done: the state counts it as done already."""

    pipeline_id: str
    cluster: str
    rank: int = FIXED
    """FIXED, or of the generation worker."""
    stage: str
    """Of its intent: planned, sent..."""
    since_s: float
    until_s: float = FOREVER
    """When its pipeline is quarantined if it has not answered."""


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What the service knows beside the state."""

    scheduler: str = ""
    """Its incarnation."""
    policy: str = ""
    reserve_after_s: float = FOREVER
    """A request that waited so long is not bypassed."""
    again_s: float = FOREVER
    """When time alone may change the plan."""
    under_way: tuple[UnderWay, ...] = ()
    driven: frozenset[str] = frozenset()
    """Pipelines that a run drives: its coordinator was heard a moment ago."""
    runs: Mapping[str, RunClaim] = {}
    """By pipeline, the run that has its name."""
    faults: Mapping[str, str] = {}
    """By pipeline, why it is quarantined, or anything else that is wrong with it."""
    troubles: tuple[str, ...] = ()
    """Of the service itself, newest last: plans that failed, say."""


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A machine."""

    name: str
    gpus: tuple[int, ...]
    labels: tuple[str, ...]
    phase: NodePhase


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """An engine."""

    rank: int
    gpus: tuple[int, ...]
    phase: WorkerPhase
    for_s: float | None
    """How long already; None: since it is known."""
    kv_tokens: int


class WaitView(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody waits for GPUs."""

    cluster: str
    priority: str
    for_s: float
    gpus: tuple[int, ...]
    missing: dict[int, str]
    """By GPU, who has it, or why nobody may."""
    until: str
    """What ends the wait."""


class PipelineView(msgspec.Struct, frozen=True, kw_only=True):
    """How a pipeline stands."""

    pipeline_id: str
    phase: PipelinePhase
    spec: PipelineSpec
    workers: tuple[WorkerView, ...]
    holds: dict[str, tuple[int, ...]]
    """By cluster."""
    waits: tuple[WaitView, ...]
    has_demand: bool
    remaining: int | None
    """Rollouts that are left; None: nobody knows."""
    credit_gpu_s: float
    is_driven: bool = False
    """A run drives it now."""
    run: RunClaim | None = None
    """The run that has its name."""
    fault: str = ""
    lines: tuple[str, ...] = ()
    """The same for people."""


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """How the fleet stands."""

    scheduler: str
    policy: str
    nodes: tuple[NodeView, ...]
    num_free: int
    """GPUs on nodes that are up and nobody's."""
    pipelines: tuple[PipelineView, ...]
    troubles: tuple[str, ...] = ()
    error: str = ""
    """Why there is nothing to see: no such pipeline."""


def view(state: State, known: Known, pipeline_id: str = "") -> FleetView:
    """Of one pipeline or ('') of all."""
    chosen = [each for each in state.pipelines.values() if pipeline_id in ("", each.pipeline_id)]
    names = ", ".join(state.pipelines) or "none is"
    up = [node for node in state.nodes.values() if node.phase is NodePhase.UP]
    return FleetView(
        scheduler=known.scheduler,
        policy=known.policy,
        nodes=tuple(
            NodeView(name=node.name, gpus=node.gpus, labels=node.labels, phase=node.phase)
            for node in state.nodes.values()
        ),
        num_free=sum(gpu not in state.owners for node in up for gpu in node.gpus),
        pipelines=tuple(_Words(state, known, each).view() for each in chosen),
        troubles=known.troubles,
        error="" if chosen or not pipeline_id else f"no pipeline {pipeline_id!r}; {names} known",
    )


class _Words:
    """Of one pipeline."""

    def __init__(self, state: State, known: Known, pipeline: Pipeline) -> None:
        self._state = state
        self._known = known
        self._pipeline = pipeline
        self._moves = {(op.pipeline_id, op.cluster, op.rank): op for op in known.under_way}

    def view(self) -> PipelineView:
        pipeline, now_s = self._pipeline, self._state.now_s
        waits = tuple(self._waits())
        partial = PipelineView(
            pipeline_id=pipeline.pipeline_id,
            phase=pipeline.phase,
            spec=pipeline.spec,
            workers=tuple(
                WorkerView(
                    rank=worker.rank,
                    gpus=worker.gpus,
                    phase=worker.phase,
                    for_s=None if worker.since_s == -FOREVER else now_s - worker.since_s,
                    kv_tokens=worker.kv_tokens,
                )
                for worker in pipeline.workers
            ),
            holds={name: pipeline.spec.clusters[name] for name in pipeline.holds},
            waits=waits,
            has_demand=pipeline.demand is not None,
            remaining=pipeline.remaining,
            credit_gpu_s=pipeline.credit_gpu_s,
            is_driven=pipeline.pipeline_id in self._known.driven,
            run=self._known.runs.get(pipeline.pipeline_id),
            fault=self._known.faults.get(pipeline.pipeline_id, ""),
        )
        return msgspec.structs.replace(partial, lines=tuple(self._lines(waits)))

    # who waits

    def _waits(self) -> Iterator[WaitView]:
        for request in self._state.requests.values():
            if request.pipeline_id == self._pipeline.pipeline_id:
                yield self._of_request(request)
        for cluster, hold in self._pipeline.holds.items():
            if move := self._moves.get((self._pipeline.pipeline_id, cluster, FIXED)):
                yield self._of_promise(cluster, hold.priority, hold.since_s, move)
        if self._pipeline.waiting_s is not None:
            yield self._of_generation(self._pipeline.waiting_s)

    def _of_request(self, request: Request) -> WaitView:
        gpus = self._pipeline.spec.clusters[request.cluster]
        waited_s = self._state.now_s - request.asked_s
        place = self._place(request)
        ahead = [each for each in self._state.requests.values() if self._place(each) < place]
        rivals = [each for each in ahead if set(self._gpus_of(each)) & set(gpus)]
        until = "their holders release them"
        if rivals:
            names = ", ".join(f"{each.pipeline_id} {each.cluster}" for each in rivals)
            until = f"{until}; before it comes {names}"
        left_s = self._known.reserve_after_s - waited_s
        if left_s <= 0:
            until = f"{until}; nothing new may bypass it"
        elif left_s < FOREVER:
            until = f"{until}; after {left_s:.1f} s more nothing may bypass it"
        return WaitView(
            cluster=request.cluster,
            priority=_priority(request.priority),
            for_s=waited_s,
            gpus=gpus,
            missing=self._missing(gpus),
            until=until if self._pipeline.phase is PipelinePhase.ADMITTED else self._unheld(),
        )

    def _of_promise(self, cluster: str, priority: int, since_s: float, move: UnderWay) -> WaitView:
        """It is planned, and others stand there still."""
        gpus = self._pipeline.spec.clusters[cluster]
        missing = {
            gpu: f"{op.pipeline_id} generation worker {op.rank} goes to sleep ({self._stage(op)})"
            for op in self._known.under_way
            if op.rank != FIXED
            for gpu in self._bundle(op)
            if gpu in gpus
        }
        return WaitView(
            cluster=cluster,
            priority=_priority(priority),
            for_s=self._state.now_s - since_s,
            gpus=gpus,
            missing=missing,
            until=f"they are clear: it is promised them ({move.stage})",
        )

    def _of_generation(self, waiting_s: float) -> WaitView:
        pipeline = self._pipeline
        gpus = pipeline.spec.generation
        until = "a worker's GPUs are free, or others have had more than their share"
        if pipeline.phase is not PipelinePhase.ADMITTED:
            until = self._unheld()
        elif (left_s := self._known.again_s - self._state.now_s) < FOREVER:
            until = f"{until}; looked at again in {max(0.0, left_s):.1f} s at the latest"
        return WaitView(
            cluster=GENERATION_CLUSTER,
            priority=_priority(GpuPriority.GENERATION),
            for_s=self._state.now_s - waiting_s,
            gpus=gpus,
            missing=self._missing(gpus),
            until=until,
        )

    def _unheld(self) -> str:
        """What a pipeline that is given nothing waits for."""
        told = {
            PipelinePhase.REGISTERED: "it is admitted: rollmesh scheduler admit",
            PipelinePhase.QUARANTINED: "its coordinator says again how its workers are",
            PipelinePhase.LEAVING: "never: it is leaving",
        }
        return told.get(self._pipeline.phase, "")

    # who has what

    def _missing(self, gpus: tuple[int, ...]) -> dict[int, str]:
        told = {gpu: self._holder(gpu) for gpu in gpus}
        return {gpu: holder for gpu, holder in told.items() if holder}

    def _holder(self, gpu: int) -> str:
        """Who has it, or why nobody may; '' where it is to be had."""
        if owner := self._state.owners.get(gpu):
            return self._named(owner)
        node = self._state.node_of.get(gpu)
        if node is None:
            return "of no node that has joined"
        return "" if node.phase is NodePhase.UP else f"its node {node.name} is {node.phase}"

    def _named(self, owner: Owner) -> str:
        pipeline = self._state.pipelines[owner.pipeline_id]
        if owner.rank == FIXED:
            since_s = pipeline.holds[owner.cluster].since_s
            return f"{owner.pipeline_id} {owner.cluster}, for {self._state.now_s - since_s:.1f} s"
        worker = pipeline.workers[owner.rank]
        fence = ", fenced until its coordinator tells" if worker.phase is WorkerPhase.LOST else ""
        move = self._moves.get((owner.pipeline_id, owner.cluster, owner.rank))
        stage = f", {self._stage(move)}" if move else ""
        return (
            f"{owner.pipeline_id} generation worker {worker.rank}, {worker.phase}"
            f"{self._for(worker)}{stage}{fence}"
        )

    def _for(self, worker: Worker) -> str:
        known = worker.since_s != -FOREVER
        return f" for {self._state.now_s - worker.since_s:.1f} s" if known else ""

    def _stage(self, op: UnderWay) -> str:
        now_s = self._state.now_s
        limit = f", at most {max(0.0, op.until_s - now_s):.1f} s more"
        return f"{op.stage} {now_s - op.since_s:.1f} s ago{limit if op.until_s < FOREVER else ''}"

    def _bundle(self, op: UnderWay) -> tuple[int, ...]:
        return self._state.pipelines[op.pipeline_id].workers[op.rank].gpus

    def _place(self, request: Request) -> tuple[bool, int, int]:
        """Where it stands in the line, as the planner has it (fixed.py)."""
        waited_s = self._state.now_s - request.asked_s
        is_old = waited_s >= self._known.reserve_after_s
        return not is_old, 0 if is_old else request.priority, request.seq

    def _gpus_of(self, request: Request) -> tuple[int, ...]:
        return self._state.pipelines[request.pipeline_id].spec.clusters[request.cluster]

    # lines

    def _lines(self, waits: tuple[WaitView, ...]) -> Iterator[str]:
        pipeline = self._pipeline
        name = pipeline.pipeline_id
        fault = self._known.faults.get(name, "")
        yield f"{name}: {pipeline.phase}{f': {fault}' if fault else ''}"
        for cluster, hold in pipeline.holds.items():
            if (name, cluster, FIXED) not in self._moves:
                held_s = self._state.now_s - hold.since_s
                yield f"has {cluster} on {_list(pipeline.spec.clusters[cluster])}, {held_s:.1f} s"
        yield self._generation_line()
        for wait in waits:
            yield f"waits for {wait.cluster} ({wait.priority}) since {wait.for_s:.1f} s"
            yield f"  until {wait.until}"
            yield from (f"  GPU {gpu}: {holder}" for gpu, holder in wait.missing.items())
            if not wait.missing:
                yield "  all of its GPUs are free: the next plan decides"
        if not waits:
            yield "waits for nothing"

    def _generation_line(self) -> str:
        pipeline = self._pipeline
        awake = [each.rank for each in pipeline.workers if each.phase in AWAKE_PHASES]
        num, of = len(awake), len(pipeline.workers)
        ranks = f" (ranks {' '.join(map(str, awake))})" if awake else ""
        if pipeline.demand is None:
            return f"wants no generation; {num} of {of} workers awake{ranks}"
        left = "an unknown number of" if pipeline.remaining is None else pipeline.remaining
        credit = pipeline.credit_gpu_s
        share = "owed" if credit >= 0 else "ahead of its share by"
        return (
            f"generates {left} rollouts more on {num} of {of} workers{ranks},"
            f" {share} {abs(credit):.1f} GPU seconds"
        )


def _priority(number: int) -> str:
    return GpuPriority(number).name.lower()


def _list(gpus: tuple[int, ...]) -> str:
    return f"GPU{'s' * (len(gpus) > 1)} {' '.join(map(str, gpus))}"
