"""Why a pipeline waits, and until what: the state put into words, for people and for programs.

Owns the answer to ReadScheduler, which is a FleetView as JSON. Invariants: pure, and it only reads;
whoever waits is told which GPUs it misses, who has each of them since when, and what ends the wait;
times are spans as of now, for no clock of ours is the reader's. Driven by the service's process and
by its tests; what the verb `rollmesh scheduler explain` shows are the lines that stand here.
"""

from collections.abc import Iterator, Sequence

import msgspec

from rollmesh.scheduler.planning.state import (
    AWAKE_PHASES,
    ClusterRequest,
    FleetState,
    GenerationWorker,
    NodePhase,
    PipelinePhase,
    PipelineState,
)
from rollmesh.scheduler.service.known import FOREVER, Known, UnderWay
from rollmesh.scheduler.service.occupants import Occupants
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    GpuPriority,
    PipelineSpec,
    RunClaim,
    WorkerPhase,
)


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
    is_promised: bool = False
    """No plan is needed for it any more."""


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
    lately: tuple[str, ...] = ()
    """What has come of its newest ops, the newest first."""
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


def view(state: FleetState, known: Known, pipeline_id: str = "") -> FleetView:
    """Of one pipeline or ('') of all."""
    up = [node for node in state.nodes.values() if node.phase is NodePhase.UP]
    whole = FleetView(
        scheduler=known.scheduler,
        policy=known.policy,
        nodes=tuple(
            NodeView(name=node.name, gpus=node.gpus, labels=node.labels, phase=node.phase)
            for node in state.nodes.values()
        ),
        num_free=sum(gpu not in state.owners for node in up for gpu in node.gpus),
        pipelines=tuple(
            _Words(state, known, each).view()
            for each in state.pipelines.values()
            if pipeline_id in ("", each.pipeline_id)
        ),
        troubles=known.troubles,
    )
    return only(whole, pipeline_id, tuple(state.pipelines)) if pipeline_id else whole


def only(fleet: FleetView, pipeline_id: str, names: tuple[str, ...] = ()) -> FleetView:
    """Of that one alone, of whom it tells; an error with the `names` that there are if it is none
    of these."""
    chosen = tuple(each for each in fleet.pipelines if each.pipeline_id == pipeline_id)
    known = ", ".join(names or [each.pipeline_id for each in fleet.pipelines]) or "none is"
    error = "" if chosen else f"no pipeline {pipeline_id!r}; {known} known"
    return msgspec.structs.replace(fleet, pipelines=chosen, error=error)


class _Words:
    """Of one pipeline."""

    def __init__(self, state: FleetState, known: Known, pipeline: PipelineState) -> None:
        self._state = state
        self._known = known
        self._pipeline = pipeline
        self._occupants = Occupants(state, known)

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
            lately=self._known.lately.get(pipeline.pipeline_id, ()),
        )
        return msgspec.structs.replace(partial, lines=tuple(self._lines(waits)))

    # who waits

    def _waits(self) -> Iterator[WaitView]:
        for request in self._state.requests.values():
            if request.pipeline_id == self._pipeline.pipeline_id:
                yield self._of_request(request)
        for cluster, hold in self._pipeline.holds.items():
            if move := self._occupants.move(self._pipeline.pipeline_id, cluster):
                yield self._of_promise(cluster, hold.priority, hold.since_s, move)
        if self._pipeline.waiting_s is not None:
            yield self._of_generation(self._pipeline.waiting_s)
        elif wait := self._of_wakes():
            yield wait

    def _of_request(self, request: ClusterRequest) -> WaitView:
        gpus = self._pipeline.spec.clusters[request.cluster]
        waited_s = self._state.now_s - request.asked_s
        place = self._place(request)
        ahead = [each for each in self._state.requests.values() if self._place(each) < place]
        rivals = [each for each in ahead if set(self._gpus_of(each)) & set(gpus)]
        until = "; ".join(self._occupants.returns(gpus)) or "their holders release them"
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
            missing=self._occupants.missing(gpus),
            until=until if self._pipeline.phase is PipelinePhase.ADMITTED else self._unheld(),
        )

    def _of_promise(self, cluster: str, priority: int, since_s: float, move: UnderWay) -> WaitView:
        """It is planned, and others stand there still."""
        gpus = self._pipeline.spec.clusters[cluster]
        return WaitView(
            cluster=cluster,
            priority=_priority(priority),
            for_s=self._state.now_s - since_s,
            gpus=gpus,
            missing=self._occupants.leaving(gpus),
            until=f"they are clear: it is promised them ({move.stage})",
            is_promised=True,
        )

    def _of_wakes(self) -> WaitView | None:
        """It has been promised its first workers, and none serves yet."""
        workers = self._pipeline.workers
        waking = [each for each in workers if each.phase is WorkerPhase.WAKING]
        if not waking or any(each.phase is WorkerPhase.AWAKE for each in workers):
            return None
        gpus = tuple(gpu for worker in waking for gpu in worker.gpus)
        name = self._pipeline.pipeline_id
        moves = [self._occupants.move(name, GENERATION_CLUSTER, each.rank) for each in waking]
        stages = ", ".join(dict.fromkeys(self._occupants.stage(move) for move in moves if move))
        return WaitView(
            cluster=GENERATION_CLUSTER,
            priority=_priority(GpuPriority.GENERATION),
            for_s=self._state.now_s - min(worker.since_s for worker in waking),
            gpus=gpus,
            missing=self._occupants.leaving(gpus, but=name),
            until=f"one of {_ranks(waking)} has woken ({stages})",
            is_promised=True,
        )

    def _of_generation(self, waiting_s: float) -> WaitView:
        pipeline = self._pipeline
        gpus = pipeline.spec.generation
        until = "a worker's GPUs are free, or others have had more than their share"
        nodes = [self._state.node_of.get(gpu) for gpu in gpus]
        if pipeline.phase is not PipelinePhase.ADMITTED:
            until = self._unheld()
        elif not any(node and node.phase is NodePhase.UP for node in nodes):
            until = "; ".join(self._occupants.returns(gpus))
        elif pipeline.is_resizing:
            until = "its resize that is under way has ended"
        elif (left_s := self._known.again_s - self._state.now_s) < FOREVER:
            until = f"{until}; looked at again in {max(0.0, left_s):.1f} s at the latest"
        return WaitView(
            cluster=GENERATION_CLUSTER,
            priority=_priority(GpuPriority.GENERATION),
            for_s=self._state.now_s - waiting_s,
            gpus=gpus,
            missing=self._occupants.missing(gpus),
            until=until,
        )

    def _unheld(self) -> str:
        """What a pipeline that is given nothing waits for."""
        told = {
            PipelinePhase.REGISTERED: "it is admitted: rollmesh scheduler admit",
            PipelinePhase.QUARANTINED: "its coordinator says again how its workers are",
            PipelinePhase.LEAVING: "never: it is leaving",
        }
        until = told.get(self._pipeline.phase, "")
        left_s = self._known.retry_s.get(self._pipeline.pipeline_id, 0.0) - self._state.now_s
        return f"{until}; in {left_s:.1f} s at the earliest" if left_s > 0.0 else until

    def _place(self, request: ClusterRequest) -> tuple[bool, int, int]:
        """Where it stands in the line, as the planner has it (fixed.py)."""
        waited_s = self._state.now_s - request.asked_s
        is_old = waited_s >= self._known.reserve_after_s
        return not is_old, 0 if is_old else request.priority, request.seq

    def _gpus_of(self, request: ClusterRequest) -> tuple[int, ...]:
        return self._state.pipelines[request.pipeline_id].spec.clusters[request.cluster]

    # lines

    def _lines(self, waits: tuple[WaitView, ...]) -> Iterator[str]:
        pipeline = self._pipeline
        name = pipeline.pipeline_id
        fault = self._known.faults.get(name, "")
        yield f"{name}: {pipeline.phase}{f': {fault}' if fault else ''}"
        if pipeline.workers and name not in self._known.driven:
            yield "no run drives it: its coordinator is not heard"
        for cluster, hold in pipeline.holds.items():
            if not self._occupants.move(name, cluster):
                held_s = self._state.now_s - hold.since_s
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
            given_up = "".join(f", and {each} is given up" for each in pipeline.holds)
            yield f"is forgotten when its workers are asleep{given_up}"
        elif not waits and pipeline.phase is not PipelinePhase.ADMITTED:
            yield f"gets no GPU until {self._unheld()}"
        elif not waits:
            yield "waits for nothing"

    def _absent_lines(self) -> Iterator[str]:
        for worker in self._pipeline.workers:
            if worker.phase is WorkerPhase.ABSENT:
                absent_s = self._state.now_s - worker.since_s
                yield f"engine {worker.rank} has not come up yet ({absent_s:.0f} s)"

    def _generation_line(self) -> str:
        pipeline = self._pipeline
        serving = [each for each in pipeline.workers if each.phase is WorkerPhase.AWAKE]
        workers = f"{len(serving)} of {len(pipeline.workers)} workers"
        ranks = f" (ranks {' '.join(str(each.rank) for each in serving)})" if serving else ""
        told = f"{workers}{ranks}{self._moves_line()}"
        if GENERATION_CLUSTER in pipeline.releasing:
            return f"gives generation up; {workers} are still awake{self._moves_line()}"
        if pipeline.demand is None:
            soon_s = pipeline.demand_history.expected_s - self._state.now_s
            when = f", and is expected to in {soon_s:.1f} s" if 0.0 < soon_s < FOREVER else ""
            return f"wants no generation{when}; {workers} awake{ranks}{self._moves_line()}"
        left = "an unknown number of" if pipeline.remaining is None else pipeline.remaining
        credit = pipeline.credit_gpu_s
        share = "owed" if credit >= 0 else "ahead of its share by"
        return (
            f"generates {left} rollouts more on {told}, {share} {abs(credit):.1f} GPU seconds"
            f"{self._quota_line()}"
        )

    def _moves_line(self) -> str:
        """Its workers that are on their way."""
        verbs = {WorkerPhase.WAKING: "wakes", WorkerPhase.SLEEPING: "goes to sleep"}
        told = ""
        for worker in self._pipeline.workers:
            name = self._pipeline.pipeline_id
            move = self._occupants.move(name, GENERATION_CLUSTER, worker.rank)
            if move and (verb := verbs.get(worker.phase)):
                told += f"; {worker.rank} {verb} ({self._occupants.stage(move)})"
        return told

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
