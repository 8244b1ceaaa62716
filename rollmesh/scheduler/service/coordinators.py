"""Coordinator reports: they complete resizes, trigger repeats, or quarantine a pipeline.

    pipeline   ADMITTED -> QUARANTINED   a resize failed or is late, an engine is lost or is awake
                                         where it must not be; its coordinator is silent
               QUARANTINED -> ADMITTED   its coordinator reports all workers, and none is lost

- An engine that its coordinator has never seen is ABSENT, which is no fault for `join_s`: it is not
  woken, and the others work meanwhile. Where it was awake before, it is lost.
- A quarantined pipeline keeps the GPUs that its workers may be using; other pipelines continue.
- A report is trusted for workers whose newest epoch the coordinator knows, or that it was never
  ordered to resize. Workers of unknown state are put to sleep before the pipeline is readmitted.
"""

from rollmesh.scheduler.planning.state import (
    RESTING_PHASES,
    GenerationWorker,
    Owner,
    PipelinePhase,
    PipelineState,
)
from rollmesh.scheduler.service.intents import Intents, has_turn, is_down
from rollmesh.scheduler.service.state import IntentKind, IntentPhase, SchedulerState
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    CoordinatorHello,
    SchedulerHello,
    WorkerPhase,
    WorkersResized,
    WorkerTruth,
)

_SETTLED = frozenset({WorkerPhase.ASLEEP, WorkerPhase.AWAKE})
LIVE_S = 3.0
"""A coordinator is live if it sent a message this recently; it sends one each second."""
_DONE = {IntentKind.SLEEP: WorkerPhase.ASLEEP, IntentKind.WAKE: WorkerPhase.AWAKE}

MAX_STARTED_S = 1e11
"""Above any unix time of the next thousand years, and small enough that adding a second counts."""


class CoordinatorTracker:
    def __init__(self, state: SchedulerState, intents: Intents) -> None:
        self._state = state
        self._intents = intents

    # reports

    def on_hello(self, route: bytes, hello: CoordinatorHello) -> None:
        """Handle a full report of a coordinator."""
        state = self._state
        if not 0.0 <= hello.started_s <= MAX_STARTED_S:  # also nan: no later one could exceed it
            why = f"started_s = {hello.started_s} is not a valid time; set this machine's clock"
            state.send(route, SchedulerHello(state.incarnation, error=why))
            return
        pipeline = state.fleet.pipelines.get(hello.pipeline_id)
        if pipeline is None:
            state.send(route, SchedulerHello(state.incarnation))
            return
        record, link = state.pipeline_records[hello.pipeline_id], state.links[hello.pipeline_id]
        if hello.started_s < record.started_s:
            # An older process, or a clock that went back. While the newest process is live, this
            # one must not continue.
            newest_s = 0.0 if has_live_coordinator(state, hello.pipeline_id) else record.started_s
            state.send(route, SchedulerHello(state.incarnation, newest_s=newest_s))
            return
        state.send(route, SchedulerHello(state.incarnation, newest_s=hello.started_s))
        if hello.started_s > record.started_s:
            record.started_s, record.resized_ranks, record.unsure = hello.started_s, [], []
            state.mark("pipelines", hello.pipeline_id)
            for worker in pipeline.workers:
                if worker.phase is WorkerPhase.ABSENT:  # known from the previous coordinator only
                    self._intents.settle(hello.pipeline_id, worker.rank, WorkerPhase.ASLEEP)
        if not link.is_known:
            link.is_known = True
            if pipeline.demand or self._intents.of(hello.pipeline_id):
                state.wants_plan = True
        link.route, link.last_seen_s = route, state.now_s
        self._on_truths(pipeline, hello.workers)

    def on_resized(self, resized: WorkersResized) -> None:
        """Handle the result of one resize."""
        state, name = self._state, resized.pipeline_id
        truths = {truth.rank: truth for truth in resized.workers}
        sent = [each for each in self._intents.of(name) if each.resize_id == resized.resize_id]
        for intent in sent:
            truth = truths.get(intent.rank)
            if truth and (truth.phase, truth.epoch) == (_DONE[intent.kind], intent.epoch):
                self._intents.commit(intent)
            elif intent.intent_id in state.intents:
                detail = truth.detail if truth else ""
                why = resized.error or detail or "its coordinator reports that it is not done"
                what = f"worker {intent.rank} cannot {intent.kind.value}: {why}"
                self.quarantine(name, what, answered=resized.resize_id)
                return

    def live_coordinators(self) -> frozenset[str]:
        """Pipelines with a live coordinator."""
        return frozenset(
            name for name in self._state.links if has_live_coordinator(self._state, name)
        )

    def _on_truths(self, pipeline: PipelineState, truths: tuple[WorkerTruth, ...]) -> None:
        name, faults = pipeline.pipeline_id, []
        needs_resend_any = is_doubtful = False
        for truth in truths:
            if not 0 <= truth.rank < len(pipeline.workers):
                continue
            worker = pipeline.workers[truth.rank]
            worker.kv_tokens = truth.kv_tokens
            if (
                truth.epoch > worker.epoch
                and truth.rank not in self._state.pipeline_records[name].resized_ranks
            ):
                worker.epoch = truth.epoch  # of an earlier incarnation: it refuses older ones
                self._state.mark("workers", name, worker.rank)
            if self._is_sent(name, truth.rank):
                fault, needs_resend = self._check_resize(name, truth)
                needs_resend_any |= needs_resend
                faults.append(fault)
            elif self._is_trusted(name, worker, truth):
                faults.append(self._check_worker(name, worker, truth))
            else:
                is_doubtful = True
        faults.append(self._doubt(name, is_doubtful))
        fault = next(filter(None, faults), "")
        if fault and not self._is_out(pipeline):
            self.quarantine(name, fault)
        elif needs_resend_any:
            self._intents.resend(name)
        if self._is_out(pipeline):
            self._let_in(pipeline, {truth.rank: truth for truth in truths})

    def _doubt(self, name: str, is_doubtful: bool) -> str:
        """Allow mismatching reports for a moment: old ones may be in flight."""
        state, link = self._state, self._state.links[name]
        if not is_doubtful:
            link.doubt_s = None
        elif link.doubt_s is None:
            link.doubt_s = state.now_s
        elif state.now_s - link.doubt_s > state.settings.slack_s:
            return "its coordinator does not know the orders it was sent"
        return ""

    def _check_resize(self, name: str, truth: WorkerTruth) -> tuple[str, bool]:
        """Check a worker with a sent resize: return the fault, if any, and whether to resend."""
        intent = self._intents.of_worker(name, truth.rank)
        assert intent
        if truth.epoch != intent.epoch:
            return "", True
        if truth.phase is _DONE[intent.kind]:
            self._intents.commit(intent)
        elif truth.phase is WorkerPhase.LOST:
            return self._lost(truth), False
        return "", truth.phase in _SETTLED

    def _check_worker(self, name: str, worker: GenerationWorker, truth: WorkerTruth) -> str:
        """Check a worker without a sent resize: return the fault or ''."""
        if is_down(self._state, worker):
            return ""
        if truth.phase is WorkerPhase.ABSENT:
            return self._absent(name, worker, truth)
        if truth.phase is WorkerPhase.LOST:
            return self._lost(truth)
        if worker.phase is WorkerPhase.LOST:
            if truth.phase in _SETTLED and not self._state.pipeline_records[name].why:
                self._intents.settle(name, worker.rank, truth.phase)  # its node is back
            return ""
        if worker.phase is WorkerPhase.ABSENT and truth.phase in _SETTLED:
            self._intents.settle(name, worker.rank, WorkerPhase.ASLEEP)
        if truth.phase is WorkerPhase.AWAKE and worker.phase in (
            WorkerPhase.ASLEEP,
            WorkerPhase.WAKING,
        ):
            return self._on_stray(name, worker)
        if truth.phase is WorkerPhase.ASLEEP and worker.phase in (
            WorkerPhase.AWAKE,
            WorkerPhase.SLEEPING,
        ):
            if intent := self._intents.of_worker(name, worker.rank):
                self._intents.commit(intent)
            else:
                self._intents.settle(name, worker.rank, WorkerPhase.ASLEEP)
        return ""

    def _on_stray(self, name: str, worker: GenerationWorker) -> str:
        """An awake worker that was not woken is accepted where no other uses or owns the GPUs."""
        state, owner = self._state, Owner(name, GENERATION_CLUSTER, worker.rank)
        is_planned = self._intents.of_worker(name, worker.rank) is not None
        is_nobodys = all(state.fleet.owners.get(gpu, owner) == owner for gpu in worker.gpus)
        if state.is_clear(worker.gpus):
            if is_nobodys and not is_planned:
                self._intents.settle(name, worker.rank, WorkerPhase.AWAKE)
                return ""
            state.occupy(owner, worker.gpus, WorkerPhase.LOST.value)
        return f"worker {worker.rank} is awake on GPUs that it was not given"

    def _absent(self, name: str, worker: GenerationWorker, truth: WorkerTruth) -> str:
        """Check an engine that its coordinator has never seen."""
        # Not a sent wake: this one was promised before its absence was known.
        self._intents.call_off(name, "its engine has not come up yet", worker.rank)
        if worker.phase is WorkerPhase.ASLEEP:
            self._intents.settle(name, worker.rank, WorkerPhase.ABSENT)
        if worker.phase is WorkerPhase.LOST:
            return ""
        if worker.phase is not WorkerPhase.ABSENT:
            return self._lost(truth)
        if not self._is_overdue(worker):
            return ""
        still_s = self._state.now_s - worker.since_s
        return f"engine {worker.rank} has not come up within {still_s:.0f} s: {truth.detail}"

    def _is_overdue(self, worker: GenerationWorker) -> bool:
        return self._state.now_s > worker.since_s + self._state.settings.join_s

    def _lost(self, truth: WorkerTruth) -> str:
        return f"worker {truth.rank} is lost: {truth.detail or 'unknown reason'}"

    def _is_sent(self, name: str, rank: int) -> bool:
        intent = self._intents.of_worker(name, rank)
        return intent is not None and intent.phase is IntentPhase.SENT

    def _is_trusted(self, name: str, worker: GenerationWorker, truth: WorkerTruth) -> bool:
        return (
            truth.epoch == worker.epoch
            or worker.rank not in self._state.pipeline_records[name].resized_ranks
        )

    # quarantine

    def quarantine(self, name: str, why: str, answered: int = 0) -> None:
        """Quarantine a pipeline: its GPUs are fenced, and promises of them to others are broken.
        `answered` is the id of the resize that reported failure, if any."""
        state, record = self._state, self._state.pipeline_records[name]
        settings, pipeline = state.settings, self._state.fleet.pipelines[name]
        record.why = why
        record.num_faults += 1
        wait_s = settings.retry_s * 2 ** min(record.num_faults - 1, 16)
        state.links[name].retry_s = state.now_s + min(settings.max_retry_s, wait_s)
        if pipeline.phase is PipelinePhase.ADMITTED:
            pipeline.phase = PipelinePhase.QUARANTINED
        self._intents.fail(name, why, answered)
        state.mark("pipelines", name)
        state.wants_plan = True
        state.log("pipeline.quarantined", name, why)

    def _is_out(self, pipeline: PipelineState) -> bool:
        """Whether the pipeline has a fault."""
        return bool(self._state.pipeline_records[pipeline.pipeline_id].why)

    def _let_in(self, pipeline: PipelineState, truths: dict[int, WorkerTruth]) -> None:
        """Readmit the pipeline once the state of each worker is known."""
        state, name = self._state, pipeline.pipeline_id
        here = self._here(pipeline)
        resting = [worker for worker in here if not self._is_sent(name, worker.rank)]
        settled = [w for w in resting if truths.get(w.rank, _UNKNOWN).phase in _SETTLED]
        if len(settled) < len(here):
            self._free(name, settled, truths)
            return
        unknown = [w.rank for w in here if not self._is_good(name, w, truths[w.rank])]
        if unknown:
            self._intents.reconcile(name, unknown)
            return
        if state.now_s < state.links[name].retry_s:
            return
        for worker in here:
            if worker.phase is not truths[worker.rank].phase:
                self._intents.settle(name, worker.rank, truths[worker.rank].phase)
        state.pipeline_records[name].why = ""
        if pipeline.phase is PipelinePhase.QUARANTINED:
            pipeline.phase = PipelinePhase.ADMITTED
        state.mark("pipelines", name)
        state.log("pipeline.readmitted", name, "all of its workers are known", is_warning=False)
        state.wants_plan = True

    def _free(
        self, name: str, settled: list[GenerationWorker], truths: dict[int, WorkerTruth]
    ) -> None:
        """While other engines are lost or moving, put the settled ones to sleep so that their GPUs
        can be used."""
        asleep = [
            worker
            for worker in settled
            if truths[worker.rank].phase is WorkerPhase.ASLEEP
            and self._is_good(name, worker, truths[worker.rank])
        ]
        for worker in asleep:
            if worker.phase is WorkerPhase.LOST:
                self._intents.settle(name, worker.rank, WorkerPhase.ASLEEP)
        awake = [worker.rank for worker in settled if worker not in asleep]
        if awake and not any(has_turn(self._state, each) for each in self._intents.of(name)):
            self._intents.reconcile(name, awake)

    def _is_good(self, name: str, worker: GenerationWorker, truth: WorkerTruth) -> bool:
        """Whether the report can be trusted and the worker is not awake where it must not be."""
        is_unsure = worker.rank in self._state.pipeline_records[name].unsure
        if is_unsure or not self._is_trusted(name, worker, truth):
            return False
        is_stray = truth.phase is WorkerPhase.AWAKE and worker.phase is WorkerPhase.ASLEEP
        return not is_stray

    def _here(self, pipeline: PipelineState) -> list[GenerationWorker]:
        """Workers, without those on nodes that are down or that still have time to start."""
        return [
            each
            for each in pipeline.workers
            if not is_down(self._state, each)
            and (each.phase is not WorkerPhase.ABSENT or self._is_overdue(each))
        ]

    # time

    def on_tick(self) -> None:
        """Quarantine pipelines with late resizes or silent coordinators."""
        self.fence_silent()
        state = self._state
        late = {i.pipeline_id: i for i in state.intents.values() if state.now_s >= i.until_s}
        for name, intent in late.items():
            what = f"worker {intent.rank} did not {intent.kind.value}"
            self.quarantine(name, f"{what} within {state.now_s - intent.planned_s:.0f} s")

    def fence_silent(self) -> None:
        """Quarantine pipelines that have or want workers and whose coordinator is silent."""
        state = self._state
        silent_s = state.now_s - state.settings.coordinator_grace_s
        for name, link in state.links.items():
            if link.last_seen_s >= silent_s or state.pipeline_records[name].why:
                continue
            pipeline = state.fleet.pipelines[name]
            wants = pipeline.demand is not None and pipeline.phase is PipelinePhase.ADMITTED
            if wants or any(each.phase not in RESTING_PHASES for each in pipeline.workers):
                link.is_known = False
                still_s = state.now_s - link.last_seen_s
                self.quarantine(name, f"its coordinator is silent for {still_s:.0f} s")


def has_live_coordinator(state: SchedulerState, name: str) -> bool:
    """Whether the pipeline's coordinator is or may be live. After a restart, one known from the
    journal counts for LIVE_S."""
    link, record = state.links[name], state.pipeline_records[name]
    was_there = record.is_wired and record.started_s > 0.0
    return (bool(link.route) or was_there) and link.last_seen_s > state.now_s - LIVE_S


_UNKNOWN = WorkerTruth(-1, WorkerPhase.LOST, 0)
