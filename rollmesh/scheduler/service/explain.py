"""Explanation of the fleet: why each pipeline waits and until when, for people and programs.

- Answers ReadScheduler with a FleetExplanation as JSON. Its lines are what `rollmesh scheduler
  explain` prints.
- A waiting pipeline sees which GPUs it misses, the owner of each and since when, and what ends the
  wait.
- Pure and read-only. Times are durations up to now, since clocks differ between machines.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from rollmesh.scheduler.planning.state import (
    AWAKE_PHASES,
    FIXED,
    ClusterRequest,
    FleetState,
    GenerationWorker,
    NodePhase,
    Owner,
    PipelinePhase,
    PipelineState,
)
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    GpuPriority,
    PipelineSpec,
    RunClaim,
    WorkerPhase,
)

FOREVER = float("inf")


class OpInProgress(msgspec.Struct, frozen=True, kw_only=True):
    """A planned operation that is not done; the planner's state already counts it as done."""

    pipeline_id: str
    cluster: str
    rank: int = FIXED
    """Rank of the generation worker, or FIXED."""
    stage: str
    """Phase of its intent: planned, sent..."""
    since_s: float
    until_s: float = FOREVER
    """Deadline after which its pipeline is quarantined."""


class ExplainContext(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of the service beside the planner's state, as of one moment."""

    scheduler: str = ""
    """Its incarnation."""
    policy: str = ""
    reserve_after_s: float = FOREVER
    """Wait after which a request is not bypassed."""
    again_s: float = FOREVER
    """When the plan may change without an event."""
    in_progress: tuple[OpInProgress, ...] = ()
    live_coordinators: frozenset[str] = frozenset()
    """Pipelines whose coordinator has sent a message recently."""
    runs: Mapping[str, RunClaim] = {}
    """By pipeline, the run that has its name."""
    faults: Mapping[str, str] = {}
    """By pipeline, why it is quarantined or otherwise faulty."""
    retry_s: Mapping[str, float] = {}
    """By faulty pipeline, the earliest end of quarantine."""
    lately: Mapping[str, tuple[str, ...]] = {}
    """By pipeline, results of its newest operations, newest first."""
    problems: tuple[str, ...] = ()
    """Problems of the service itself, newest last: failed plans, for example."""


class OwnerTexts:
    """Texts for the owners of GPUs, operations in progress, and nodes."""

    def __init__(self, fleet: FleetState, context: ExplainContext) -> None:
        self._fleet = fleet
        self._context = context
        self._moves = {(op.pipeline_id, op.cluster, op.rank): op for op in context.in_progress}

    def move(self, pipeline_id: str, cluster: str, rank: int = FIXED) -> OpInProgress | None:
        """The operation in progress, if any."""
        return self._moves.get((pipeline_id, cluster, rank))

    def missing(self, gpus: Iterable[int]) -> dict[int, str]:
        """By GPU, its owner, or why it cannot be used; available GPUs are left out."""
        texts = {gpu: self._holder(gpu) for gpu in gpus}
        return {gpu: holder for gpu, holder in texts.items() if holder}

    def leaving(self, gpus: Iterable[int], but: str = "") -> dict[int, str]:
        """By GPU, the engine that still has to go to sleep there; not of the pipeline `but`."""
        texts: dict[int, str] = {}
        for op in self._context.in_progress:
            if op.rank == FIXED or op.pipeline_id == but:
                continue
            engine = (
                f"{op.pipeline_id} generation worker {op.rank} goes to sleep ({self.stage(op)})"
            )
            texts.update((gpu, engine) for gpu in self._worker(op).gpus if gpu in gpus)
        return texts

    def stage(self, op: OpInProgress) -> str:
        """Stage of an operation, since when, and for how long at most."""
        now_s = self._fleet.now_s
        limit = f", at most {max(0.0, op.until_s - now_s):.1f} s more"
        return f"{op.stage} {now_s - op.since_s:.1f} s ago{limit if op.until_s < FOREVER else ''}"

    def returns(self, gpus: Iterable[int]) -> Iterator[str]:
        """Conditions under which their nodes can be used again."""
        nodes = (self._fleet.node_of.get(gpu) for gpu in gpus)
        for name, phase in dict.fromkeys((node.name, node.phase) for node in nodes if node):
            if phase is NodePhase.DOWN:
                yield f"node {name} is up again"
            elif phase is NodePhase.DRAINING:
                yield f"node {name} is used again (rollmesh scheduler drain {name} --undo)"

    def _holder(self, gpu: int) -> str:
        """'' if the GPU is available."""
        node = self._fleet.node_of.get(gpu)
        if node is None:
            return "on no node that has joined"
        lack = "" if node.phase is NodePhase.UP else f"its node {node.name} is {node.phase}"
        owner = self._fleet.owners.get(gpu)
        return "; ".join(filter(None, (self._named(owner) if owner else "", lack)))

    def _named(self, owner: Owner) -> str:
        pipeline = self._fleet.pipelines[owner.pipeline_id]
        if owner.rank == FIXED:
            since_s = pipeline.holds[owner.cluster].since_s
            return f"{owner.pipeline_id} {owner.cluster}, for {self._fleet.now_s - since_s:.1f} s"
        worker = pipeline.workers[owner.rank]
        fence = ", fenced until its coordinator reports" if worker.phase is WorkerPhase.LOST else ""
        move = self.move(*owner)
        stage = f", {self.stage(move)}" if move else ""
        return (
            f"{owner.pipeline_id} generation worker {worker.rank}, {worker.phase}"
            f"{self._for(worker)}{stage}{fence}"
        )

    def _for(self, worker: GenerationWorker) -> str:
        context = worker.since_s != -FOREVER
        return f" for {self._fleet.now_s - worker.since_s:.1f} s" if context else ""

    def _worker(self, op: OpInProgress) -> GenerationWorker:
        return self._fleet.pipelines[op.pipeline_id].workers[op.rank]


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    gpus: tuple[int, ...]
    labels: tuple[str, ...]
    phase: NodePhase


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    gpus: tuple[int, ...]
    phase: WorkerPhase
    for_s: float | None
    """Seconds in this phase; None if unknown."""
    kv_tokens: int


class WaitView(msgspec.Struct, frozen=True, kw_only=True):
    """One wait for GPUs."""

    cluster: str
    priority: str
    for_s: float
    gpus: tuple[int, ...]
    missing: dict[int, str]
    """By GPU, its owner, or why it cannot be used."""
    until: str
    """Condition that ends the wait."""
    is_promised: bool = False
    """Already planned; no other plan is needed."""


class PipelineView(msgspec.Struct, frozen=True, kw_only=True):
    pipeline_id: str
    phase: PipelinePhase
    spec: PipelineSpec
    workers: tuple[WorkerView, ...]
    holds: dict[str, tuple[int, ...]]
    """By cluster."""
    waits: tuple[WaitView, ...]
    has_demand: bool
    remaining: int | None
    """Rollouts left; None if unknown."""
    credit_gpu_s: float
    is_driven: bool = False
    """A live coordinator reports for it."""
    run: RunClaim | None = None
    """The run that has its name."""
    fault: str = ""
    lately: tuple[str, ...] = ()
    """Results of its newest operations, newest first."""
    lines: tuple[str, ...] = ()
    """This explanation as text."""


class FleetExplanation(msgspec.Struct, frozen=True, kw_only=True):
    scheduler: str
    policy: str
    nodes: tuple[NodeView, ...]
    num_free: int
    """Unowned GPUs on nodes that are UP."""
    pipelines: tuple[PipelineView, ...]
    troubles: tuple[str, ...] = ()
    error: str = ""
    """Set if there is no such pipeline."""


def explain_fleet(
    fleet: FleetState, context: ExplainContext, pipeline_id: str = ""
) -> FleetExplanation:
    """Explain one pipeline, or all ('')."""
    up = [node for node in fleet.nodes.values() if node.phase is NodePhase.UP]
    whole = FleetExplanation(
        scheduler=context.scheduler,
        policy=context.policy,
        nodes=tuple(
            NodeView(name=node.name, gpus=node.gpus, labels=node.labels, phase=node.phase)
            for node in fleet.nodes.values()
        ),
        num_free=sum(gpu not in fleet.owners for node in up for gpu in node.gpus),
        pipelines=tuple(
            _PipelineExplainer(fleet, context, each).view()
            for each in fleet.pipelines.values()
            if pipeline_id in ("", each.pipeline_id)
        ),
        troubles=context.problems,
    )
    return select_pipeline(whole, pipeline_id, tuple(fleet.pipelines)) if pipeline_id else whole


def select_pipeline(
    fleet: FleetExplanation, pipeline_id: str, names: tuple[str, ...] = ()
) -> FleetExplanation:
    """Keep one pipeline of an explanation; the error lists `names`, or those in the explanation."""
    chosen = tuple(each for each in fleet.pipelines if each.pipeline_id == pipeline_id)
    context = ", ".join(names or [each.pipeline_id for each in fleet.pipelines]) or "none is"
    error = "" if chosen else f"no pipeline {pipeline_id!r}; {context} known"
    return msgspec.structs.replace(fleet, pipelines=chosen, error=error)


class _PipelineExplainer:
    def __init__(self, fleet: FleetState, context: ExplainContext, pipeline: PipelineState) -> None:
        self._fleet = fleet
        self._context = context
        self._pipeline = pipeline
        self._owner_texts = OwnerTexts(fleet, context)

    def view(self) -> PipelineView:
        pipeline, now_s = self._pipeline, self._fleet.now_s
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
            is_driven=pipeline.pipeline_id in self._context.live_coordinators,
            run=self._context.runs.get(pipeline.pipeline_id),
            fault=self._context.faults.get(pipeline.pipeline_id, ""),
            lately=self._context.lately.get(pipeline.pipeline_id, ()),
        )
        return msgspec.structs.replace(partial, lines=tuple(self._lines(waits)))

    # waits

    def _waits(self) -> Iterator[WaitView]:
        for request in self._fleet.requests.values():
            if request.pipeline_id == self._pipeline.pipeline_id:
                yield self._of_request(request)
        for cluster, hold in self._pipeline.holds.items():
            if move := self._owner_texts.move(self._pipeline.pipeline_id, cluster):
                yield self._of_promise(cluster, hold.priority, hold.since_s, move)
        if self._pipeline.waiting_s is not None:
            yield self._of_generation(self._pipeline.waiting_s)
        elif wait := self._of_wakes():
            yield wait

    def _of_request(self, request: ClusterRequest) -> WaitView:
        gpus = self._pipeline.spec.clusters[request.cluster]
        waited_s = self._fleet.now_s - request.asked_s
        place = self._place(request)
        ahead = [each for each in self._fleet.requests.values() if self._place(each) < place]
        rivals = [each for each in ahead if set(self._gpus_of(each)) & set(gpus)]
        until = "; ".join(self._owner_texts.returns(gpus)) or "their owners release them"
        if rivals:
            names = ", ".join(f"{each.pipeline_id} {each.cluster}" for each in rivals)
            until = f"{until}; {names} first"
        left_s = self._context.reserve_after_s - waited_s
        if left_s <= 0:
            until = f"{until}; no new request may bypass it"
        elif left_s < FOREVER:
            until = f"{until}; after {left_s:.1f} s more no request may bypass it"
        return WaitView(
            cluster=request.cluster,
            priority=_priority(request.priority),
            for_s=waited_s,
            gpus=gpus,
            missing=self._owner_texts.missing(gpus),
            until=until if self._pipeline.phase is PipelinePhase.ADMITTED else self._unheld(),
        )

    def _of_promise(
        self, cluster: str, priority: int, since_s: float, move: OpInProgress
    ) -> WaitView:
        """A planned grant whose GPUs are still in use."""
        gpus = self._pipeline.spec.clusters[cluster]
        return WaitView(
            cluster=cluster,
            priority=_priority(priority),
            for_s=self._fleet.now_s - since_s,
            gpus=gpus,
            missing=self._owner_texts.leaving(gpus),
            until=f"they are clear: it is promised them ({move.stage})",
            is_promised=True,
        )

    def _of_wakes(self) -> WaitView | None:
        """Its first workers are waking and none is awake."""
        workers = self._pipeline.workers
        waking = [each for each in workers if each.phase is WorkerPhase.WAKING]
        if not waking or any(each.phase is WorkerPhase.AWAKE for each in workers):
            return None
        gpus = tuple(gpu for worker in waking for gpu in worker.gpus)
        name = self._pipeline.pipeline_id
        moves = [self._owner_texts.move(name, GENERATION_CLUSTER, each.rank) for each in waking]
        stages = ", ".join(dict.fromkeys(self._owner_texts.stage(move) for move in moves if move))
        return WaitView(
            cluster=GENERATION_CLUSTER,
            priority=_priority(GpuPriority.GENERATION),
            for_s=self._fleet.now_s - min(worker.since_s for worker in waking),
            gpus=gpus,
            missing=self._owner_texts.leaving(gpus, but=name),
            until=f"one of {_ranks(waking)} has woken ({stages})",
            is_promised=True,
        )

    def _of_generation(self, waiting_s: float) -> WaitView:
        pipeline = self._pipeline
        gpus = pipeline.spec.generation
        until = "a worker's GPUs are free, or other pipelines exceed their share"
        nodes = [self._fleet.node_of.get(gpu) for gpu in gpus]
        if pipeline.phase is not PipelinePhase.ADMITTED:
            until = self._unheld()
        elif not any(node and node.phase is NodePhase.UP for node in nodes):
            until = "; ".join(self._owner_texts.returns(gpus))
        elif pipeline.is_resizing:
            until = "its resize in progress has ended"
        elif (left_s := self._context.again_s - self._fleet.now_s) < FOREVER:
            until = f"{until}; planned again within {max(0.0, left_s):.1f} s"
        return WaitView(
            cluster=GENERATION_CLUSTER,
            priority=_priority(GpuPriority.GENERATION),
            for_s=self._fleet.now_s - waiting_s,
            gpus=gpus,
            missing=self._owner_texts.missing(gpus),
            until=until,
        )

    def _unheld(self) -> str:
        """Return the condition that a pipeline without GPUs waits for."""
        reasons = {
            PipelinePhase.REGISTERED: "it is admitted: rollmesh scheduler admit",
            PipelinePhase.QUARANTINED: "its coordinator reports all workers again",
            PipelinePhase.LEAVING: "never: the pipeline is leaving",
        }
        until = reasons.get(self._pipeline.phase, "")
        left_s = self._context.retry_s.get(self._pipeline.pipeline_id, 0.0) - self._fleet.now_s
        return f"{until}; in {left_s:.1f} s or later" if left_s > 0.0 else until

    def _place(self, request: ClusterRequest) -> tuple[bool, int, int]:
        """Place in the queue, as in planner.serve_requests."""
        waited_s = self._fleet.now_s - request.asked_s
        is_old = waited_s >= self._context.reserve_after_s
        return not is_old, 0 if is_old else request.priority, request.seq

    def _gpus_of(self, request: ClusterRequest) -> tuple[int, ...]:
        return self._fleet.pipelines[request.pipeline_id].spec.clusters[request.cluster]

    # lines

    def _lines(self, waits: tuple[WaitView, ...]) -> Iterator[str]:
        pipeline = self._pipeline
        name = pipeline.pipeline_id
        fault = self._context.faults.get(name, "")
        yield f"{name}: {pipeline.phase}{f': {fault}' if fault else ''}"
        if pipeline.workers and name not in self._context.live_coordinators:
            yield "no run uses it: its coordinator is not connected"
        for cluster, hold in pipeline.holds.items():
            if not self._owner_texts.move(name, cluster):
                held_s = self._fleet.now_s - hold.since_s
                yield f"has {cluster} on {_list(pipeline.spec.clusters[cluster])}, {held_s:.1f} s"
        yield self._generation_line()
        yield from self._absent_lines()
        for wait in waits:
            yield f"waits for {wait.cluster} ({wait.priority}) since {wait.for_s:.1f} s"
            yield f"  until {wait.until}"
            yield from (f"  GPU {gpu}: {holder}" for gpu, holder in wait.missing.items())
            is_open = not (wait.missing or wait.is_promised)
            if is_open and pipeline.phase is PipelinePhase.ADMITTED:
                yield "  all of its GPUs are free: the next plan decides"
        if pipeline.phase is PipelinePhase.LEAVING:
            given_up = "".join(f", and {each} is released" for each in pipeline.holds)
            yield f"is removed when its workers are asleep{given_up}"
        elif not waits and pipeline.phase is not PipelinePhase.ADMITTED:
            yield f"gets no GPU until {self._unheld()}"
        elif not waits:
            yield "waits for nothing"

    def _absent_lines(self) -> Iterator[str]:
        for worker in self._pipeline.workers:
            if worker.phase is WorkerPhase.ABSENT:
                absent_s = self._fleet.now_s - worker.since_s
                yield f"engine {worker.rank} has not come up yet ({absent_s:.0f} s)"

    def _generation_line(self) -> str:
        pipeline = self._pipeline
        serving = [each for each in pipeline.workers if each.phase is WorkerPhase.AWAKE]
        workers = f"{len(serving)} of {len(pipeline.workers)} workers"
        ranks = f" (ranks {' '.join(str(each.rank) for each in serving)})" if serving else ""
        awake = f"{workers}{ranks}{self._moves_line()}"
        if GENERATION_CLUSTER in pipeline.releasing:
            return f"releases generation; {workers} are still awake{self._moves_line()}"
        if pipeline.demand is None:
            soon_s = pipeline.demand_history.expected_s - self._fleet.now_s
            when = f", and is expected to in {soon_s:.1f} s" if 0.0 < soon_s < FOREVER else ""
            return f"wants no generation{when}; {workers} awake{ranks}{self._moves_line()}"
        left = "an unknown number of" if pipeline.remaining is None else pipeline.remaining
        credit = pipeline.credit_gpu_s
        share = "owed" if credit >= 0 else "ahead of its share by"
        return (
            f"generates {left} rollouts more on {awake}, {share} {abs(credit):.1f} GPU seconds"
            f"{self._quota_line()}"
        )

    def _moves_line(self) -> str:
        """Workers that are moving."""
        verbs = {WorkerPhase.WAKING: "wakes", WorkerPhase.SLEEPING: "goes to sleep"}
        text = ""
        for worker in self._pipeline.workers:
            name = self._pipeline.pipeline_id
            move = self._owner_texts.move(name, GENERATION_CLUSTER, worker.rank)
            if move and (verb := verbs.get(worker.phase)):
                text += f"; {worker.rank} {verb} ({self._owner_texts.stage(move)})"
        return text

    def _quota_line(self) -> str:
        spec = self._pipeline.spec
        num = sum(each.phase in AWAKE_PHASES for each in self._pipeline.workers)
        is_full = spec.max_gpus and (num + 1) * spec.tp > spec.max_gpus
        return f"; no more than max_gpus = {spec.max_gpus}" if is_full else ""


def _priority(number: int) -> str:
    return GpuPriority(number).name.lower()


def _ranks(workers: Sequence[GenerationWorker]) -> str:
    return f"worker{'s' * (len(workers) > 1)} {' '.join(str(each.rank) for each in workers)}"


def _list(gpus: tuple[int, ...]) -> str:
    return f"GPU{'s' * (len(gpus) > 1)} {' '.join(map(str, gpus))}"
