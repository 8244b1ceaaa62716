"""Intents: planned operations, carried out once their GPUs are actually clear.

    SLEEP, WAKE   PLANNED -> SENT -> ACKED -> COMMITTED | FAILED
    GRANT         PLANNED -> COMMITTED | FAILED
    resize        SENT, in its turn -> ended;  after turn_s: SENT, overdue -> ended, or deadline

- A pipeline has one resize at a time, sleeps before wakes. It is promised nothing more while a
  resize has its turn; an overdue one blocks only the GPUs of its own engines.
- A resize names a newer epoch of each worker than any before, and is resent unchanged until
  answered or late.
- A WAKE is sent, and a GRANT committed, when none of its GPUs is in use. If a lost worker's GPUs
  were promised to a request, the request returns to its old place in the queue.
- A failure affects only the pipeline of the worker.
"""

from rollmesh.scheduler.planning.plan import (
    Expand,
    Grant,
    Op,
    ReleaseCluster,
    Shrink,
    ShrinkReason,
    apply,
)
from rollmesh.scheduler.planning.state import (
    FIXED,
    RESTING_PHASES,
    ClusterRequest,
    GenerationWorker,
    NodePhase,
    Owner,
    PipelineState,
)
from rollmesh.scheduler.service.state import (
    HELD,
    Intent,
    IntentKind,
    IntentPhase,
    SchedulerSettings,
    SchedulerState,
    record_ended,
)
from rollmesh.wire.scheduling import GENERATION_CLUSTER, ResizeWorkers, WorkerChange, WorkerPhase


def limit_s(settings: SchedulerSettings, kind: IntentKind) -> float:
    """Time allowed for a resize that wakes, or that puts to sleep."""
    if kind is IntentKind.WAKE:
        return settings.resize_deadline_s
    return min(settings.sleep_deadline_s, settings.resize_deadline_s)


def has_turn(state: SchedulerState, intent: Intent) -> bool:
    """Whether the resize is in progress and the next one of its pipeline waits for it."""
    if intent.phase is not IntentPhase.SENT:
        return False
    settings = state.settings
    left_s = limit_s(settings, intent.kind) + settings.slack_s - settings.turn_s
    return state.now_s < intent.until_s - left_s


def note_turns(state: SchedulerState) -> bool:
    """Update which pipelines are resizing; return whether one has stopped."""
    busy = {each.pipeline_id for each in state.intents.values() if has_turn(state, each)}
    is_over = False
    for name, pipeline in state.fleet.pipelines.items():
        is_over |= pipeline.is_resizing and name not in busy
        pipeline.is_resizing = name in busy
    return is_over


_DONE = {IntentKind.SLEEP: WorkerPhase.ASLEEP, IntentKind.WAKE: WorkerPhase.AWAKE}
RECONCILE = "reconcile"
"""Reason for putting a worker of unknown state to sleep."""
_NO_EVICTIONS = frozenset({RECONCILE, *ShrinkReason})


class Intents:
    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._by_pipeline: dict[str, dict[int, Intent]] = {}
        for intent in state.intents.values():
            self._by_pipeline.setdefault(intent.pipeline_id, {})[intent.intent_id] = intent

    # plans

    def promise(self, op: Op) -> None:
        """Apply an operation of a plan to the planner's state, and record its intent."""
        state, fleet = self._state, self._state.fleet
        request = fleet.requests[op.key] if isinstance(op, Grant) else None
        apply(fleet, op)
        match op:
            case Shrink(pipeline_id, rank, for_):
                self._plan(IntentKind.SLEEP, pipeline_id, rank, for_)
            case Expand(pipeline_id, rank):
                self._plan(IntentKind.WAKE, pipeline_id, rank)
            case Grant(key):
                assert request
                state.mark("requests", key)
                state.mark("holds", request.pipeline_id, request.cluster)
                intent = self._new(IntentKind.GRANT, request.pipeline_id, request.cluster)
                intent.request = request
            case ReleaseCluster(pipeline_id, cluster):
                gpus = fleet.pipelines[pipeline_id].spec.clusters[cluster]
                state.clear(Owner(pipeline_id, cluster, FIXED), gpus)
                state.mark("holds", pipeline_id, cluster)

    def _plan(self, kind: IntentKind, pipeline_id: str, rank: int, for_: str = "") -> Intent:
        self._mark_worker(pipeline_id, rank)
        intent = self._new(kind, pipeline_id, GENERATION_CLUSTER)
        intent.rank, intent.for_ = rank, for_
        return intent

    def _new(self, kind: IntentKind, pipeline_id: str, cluster: str) -> Intent:
        state = self._state
        state.numbers.intent_id += 1
        intent = Intent(
            intent_id=state.numbers.intent_id,
            kind=kind,
            pipeline_id=pipeline_id,
            cluster=cluster,
            planned_s=state.now_s,
        )
        state.intents[intent.intent_id] = intent
        self._by_pipeline.setdefault(pipeline_id, {})[intent.intent_id] = intent
        state.mark("intents", intent.intent_id)
        return intent

    # views

    def of(self, pipeline_id: str) -> list[Intent]:
        """All intents of a pipeline, oldest first."""
        return list(self._by_pipeline.get(pipeline_id, {}).values())

    def of_worker(self, pipeline_id: str, rank: int) -> Intent | None:
        return next((each for each in self.of(pipeline_id) if each.rank == rank != FIXED), None)

    def is_promise(self, pipeline_id: str, cluster: str) -> bool:
        """Whether a fixed cluster's hold is promised but not committed."""
        return any(
            i.kind is IntentKind.GRANT and i.cluster == cluster for i in self.of(pipeline_id)
        )

    # progress

    def drive(self) -> None:
        """Commit grants and send resizes whose GPUs are clear."""
        state = self._state
        resizable: dict[str, None] = {}
        for intent in list(state.intents.values()):
            if intent.kind is not IntentKind.GRANT:
                resizable[intent.pipeline_id] = None
                continue
            gpus = state.fleet.pipelines[intent.pipeline_id].spec.clusters[intent.cluster]
            if state.is_clear(gpus):
                state.occupy(Owner(intent.pipeline_id, intent.cluster, FIXED), gpus, HELD)
                self._end(intent, IntentPhase.COMMITTED)
                state.mark("holds", intent.pipeline_id, intent.cluster)
        for pipeline_id in resizable:
            self._dispatch(pipeline_id)

    def _dispatch(self, pipeline_id: str) -> None:
        """Send the next resize of a pipeline if it is its turn and its coordinator has reported."""
        intents = self.of(pipeline_id)
        is_resizing = any(has_turn(self._state, each) for each in intents)
        if is_resizing or not self._state.links[pipeline_id].is_known:
            return
        waits = [each for each in intents if each.phase is IntentPhase.PLANNED]
        sleeps = [each for each in waits if each.kind is IntentKind.SLEEP]
        wakes = [each for each in waits if each.kind is IntentKind.WAKE]
        clear = [each for each in wakes if self._state.is_clear(self._worker(each).gpus)]
        if resize := sleeps or clear:
            self._send(pipeline_id, resize)

    def _send(self, pipeline_id: str, intents: list[Intent]) -> None:
        state, settings = self._state, self._state.settings
        state.numbers.resize_id += 1
        for intent in intents:
            worker = self._worker(intent)
            worker.epoch += 1
            intent.epoch, intent.resize_id = worker.epoch, state.numbers.resize_id
            intent.phase = IntentPhase.SENT
            intent.until_s = state.now_s + limit_s(settings, intent.kind) + settings.slack_s
            owner, wakes = self._owner(intent), intent.kind is IntentKind.WAKE
            if all(state.occupants.get(gpu, owner) == owner for gpu in worker.gpus):
                moves = WorkerPhase.WAKING if wakes else WorkerPhase.SLEEPING
                state.occupy(owner, worker.gpus, moves.value)
            state.mark("intents", intent.intent_id)
            self._mark_worker(pipeline_id, intent.rank)
        state.counts["resizes"] += 1
        self._send_resize(intents)

    def resend(self, pipeline_id: str) -> None:
        """Repeat the orders: the coordinator does not know them."""
        resizes: dict[int, list[Intent]] = {}
        for each in self.of(pipeline_id):
            if each.phase is IntentPhase.SENT:
                resizes.setdefault(each.resize_id, []).append(each)
        for intents in resizes.values():
            self._send_resize(intents)

    def _send_resize(self, intents: list[Intent]) -> None:
        state, first = self._state, intents[0]
        record = state.pipeline_records[first.pipeline_id]
        ranks = sorted({*record.resized_ranks, *(each.rank for each in intents)})
        if ranks != record.resized_ranks:
            record.resized_ranks = ranks
            state.mark("pipelines", first.pipeline_id)
        wakes = first.kind is IntentKind.WAKE
        resize = ResizeWorkers(
            pipeline_id=first.pipeline_id,
            resize_id=first.resize_id,
            changes=tuple(WorkerChange(each.rank, wakes, each.epoch) for each in intents),
            deadline_s=max(0.0, first.until_s - state.settings.slack_s - state.now_s),
            started_s=record.started_s,
            turn_s=state.settings.turn_s,
        )
        state.send(state.links[first.pipeline_id].route, resize)

    def reconcile(self, pipeline_id: str, ranks: list[int]) -> None:
        """Put workers of unknown state to sleep, by an epoch newer than any order in flight. Until
        then they are LOST."""
        for rank in ranks:
            worker = self._state.fleet.pipelines[pipeline_id].workers[rank]
            owner = Owner(pipeline_id, GENERATION_CLUSTER, rank)
            if all(self._state.occupants.get(gpu, owner) == owner for gpu in worker.gpus):
                self._lose(pipeline_id, worker)
        intents = [self._plan(IntentKind.SLEEP, pipeline_id, rank, RECONCILE) for rank in ranks]
        self._send(pipeline_id, intents)

    # ends

    def commit(self, intent: Intent) -> None:
        """The coordinator reports that it is done."""
        intent.phase = IntentPhase.ACKED
        self.settle(intent.pipeline_id, intent.rank, _DONE[intent.kind])
        record = self._state.pipeline_records[intent.pipeline_id]
        record.unsure = [rank for rank in record.unsure if rank != intent.rank]
        if intent.for_ != RECONCILE:
            record.num_faults = 0
        if intent.kind is IntentKind.SLEEP and intent.for_ not in _NO_EVICTIONS:
            self._state.counts["evictions"] += 1
        self._end(intent, IntentPhase.COMMITTED)

    def settle(self, pipeline_id: str, rank: int, phase: WorkerPhase) -> None:
        """Set the reported phase of a worker, with ownership and occupancy of its GPUs."""
        state = self._state
        worker = state.fleet.pipelines[pipeline_id].workers[rank]
        owner = Owner(pipeline_id, GENERATION_CLUSTER, rank)
        state.fleet.move_worker(pipeline_id, rank, phase)
        self._mark_worker(pipeline_id, rank)
        if phase in RESTING_PHASES:
            state.clear(owner, worker.gpus)
        else:
            state.occupy(owner, worker.gpus, phase.value)
        state.wants_plan = True

    def fail(self, pipeline_id: str, why: str, answered: int = 0) -> None:
        """Mark all workers as LOST: they keep their GPUs, which are promised to no other.

        Resizes that were not answered, unlike the `answered` one, may still be carried out until
        the worker learns of a newer epoch.
        """
        state = self._state
        sent = [each for each in self.of(pipeline_id) if each.phase is IntentPhase.SENT]
        open_ = {each.rank for each in sent if each.resize_id != answered}
        record = state.pipeline_records[pipeline_id]
        record.unsure = sorted({*record.unsure, *open_})
        for intent in self.of(pipeline_id):
            if intent.kind is IntentKind.GRANT or intent.phase is IntentPhase.PLANNED:
                self._call_off(intent, why)
            else:
                self._end(intent, IntentPhase.FAILED, why)
        for worker in state.fleet.pipelines[pipeline_id].workers:
            if worker.phase not in RESTING_PHASES:
                self._lose(pipeline_id, worker)

    def leave(self, pipeline: PipelineState, gpus: frozenset[int]) -> None:
        """A node is down: cancel operations of its workers and promises on it."""
        name = pipeline.pipeline_id
        for intent in self.of(name):
            if intent.kind is IntentKind.GRANT:
                if not gpus.isdisjoint(pipeline.spec.clusters[intent.cluster]):
                    self._call_off(intent, "its node is down")
            elif gpus.isdisjoint(self._worker(intent).gpus):
                continue
            elif intent.phase is IntentPhase.PLANNED:
                self._call_off(intent, "its node is down")
            else:
                self._end(intent, IntentPhase.FAILED, "its node is down")
        for worker in pipeline.workers:
            if worker.phase not in RESTING_PHASES and not gpus.isdisjoint(worker.gpus):
                self._lose(name, worker)

    def _lose(self, pipeline_id: str, worker: GenerationWorker) -> None:
        """Mark a worker LOST and break the promises of its GPUs to others."""
        owner = Owner(pipeline_id, GENERATION_CLUSTER, worker.rank)
        for gpu in worker.gpus:
            promised = self._state.fleet.owners.get(gpu)
            if promised is not None and promised != owner:
                self._break(promised)
        self.settle(pipeline_id, worker.rank, WorkerPhase.LOST)

    def call_off(self, pipeline_id: str, why: str, rank: int | None = None) -> None:
        """Cancel wakes that were not sent yet, of this rank or all."""
        for intent in self.of(pipeline_id):
            is_wake = intent.kind is IntentKind.WAKE and intent.phase is IntentPhase.PLANNED
            if is_wake and rank in (None, intent.rank):
                self._call_off(intent, why)

    def drop_promise(self, pipeline_id: str, cluster: str) -> None:
        """Cancel a promised grant together with its hold."""
        for intent in self.of(pipeline_id):
            if intent.kind is IntentKind.GRANT and intent.cluster == cluster:
                self._end(intent, IntentPhase.FAILED, "withdrawn")

    def forget(self, pipeline_id: str, why: str) -> None:
        """All workers are gone, whatever was planned."""
        pipeline = self._state.fleet.pipelines[pipeline_id]
        for intent in self.of(pipeline_id):
            self._end(intent, IntentPhase.FAILED, why)
        for worker in pipeline.workers:
            self.settle(pipeline_id, worker.rank, WorkerPhase.ASLEEP)

    def _break(self, owner: Owner) -> None:
        """Cancel what the owner was promised."""
        for intent in self.of(owner.pipeline_id):
            if (intent.cluster, intent.rank) == (owner.cluster, owner.rank):
                self._call_off(intent, "the worker on its GPUs is lost")

    def _call_off(self, intent: Intent, why: str) -> None:
        """Undo a promise that no message was sent for."""
        state, fleet = self._state, self._state.fleet
        pipeline_id = intent.pipeline_id
        if intent.kind is IntentKind.WAKE:
            fleet.move_worker(pipeline_id, intent.rank, WorkerPhase.ASLEEP)
            self._mark_worker(pipeline_id, intent.rank)
        elif intent.request is not None:
            apply(fleet, ReleaseCluster(pipeline_id, intent.cluster))
            state.mark("holds", pipeline_id, intent.cluster)
            waiting = [*fleet.requests.values(), intent.request]
            fleet.requests.clear()
            fleet.requests.update((each.key, each) for each in sorted(waiting, key=_seq))
            state.mark("requests", intent.request.key)
        self._end(intent, IntentPhase.FAILED, why)
        state.wants_plan = True

    def _end(self, intent: Intent, phase: IntentPhase, detail: str = "") -> None:
        intent.phase, intent.detail, intent.ended_s = phase, detail, self._state.now_s
        self._state.counts[f"intents_{phase.value}"] += 1
        self._state.intents.pop(intent.intent_id)
        left = self._by_pipeline[intent.pipeline_id]
        del left[intent.intent_id]
        if not left:
            del self._by_pipeline[intent.pipeline_id]
        self._state.mark("intents", intent.intent_id)
        record_ended(self._state, intent)

    def _worker(self, intent: Intent) -> GenerationWorker:
        return self._state.fleet.pipelines[intent.pipeline_id].workers[intent.rank]

    def _owner(self, intent: Intent) -> Owner:
        return Owner(intent.pipeline_id, intent.cluster, intent.rank)

    def _mark_worker(self, pipeline_id: str, rank: int) -> None:
        self._state.mark("workers", pipeline_id, rank)
        self._state.mark("pipelines", pipeline_id)


def is_at_rest(state: SchedulerState, worker: GenerationWorker) -> bool:
    """Whether the worker is asleep or absent, or was on a node that is down."""
    if worker.phase is not WorkerPhase.LOST:
        return worker.phase in RESTING_PHASES
    return is_down(state, worker)


def is_down(state: SchedulerState, worker: GenerationWorker) -> bool:
    """Whether one of its nodes is DOWN."""
    nodes = (state.fleet.node_of.get(gpu) for gpu in worker.gpus)
    return any(node is None or node.phase is NodePhase.DOWN for node in nodes)


def _seq(request: ClusterRequest) -> int:
    return request.seq
