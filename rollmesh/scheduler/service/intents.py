"""Ops under way: promised by a plan, carried out when the GPUs are clear in truth.

    SLEEP, WAKE   PLANNED -> SENT -> ACKED -> COMMITTED | FAILED
    GRANT         PLANNED -> COMMITTED | FAILED

Invariants: a pipeline has one resize at a time, of all that sleeps before what wakes, but nobody
waits for one that takes long (lateness.py); each names a newer epoch of its worker than any before,
and is said again with the same until it is answered or late; a WAKE is sent, and a GRANT committed,
when nobody stands on any of its GPUs; whom a lost worker had promised its GPUs waits again where he
stood in line. What fails is the pipeline's whose worker it is, and no other's. Driven by
scheduler.py; coordinators.py says when a pipeline fails.
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
from rollmesh.scheduler.service.book import HELD, Book
from rollmesh.scheduler.service.lately import remember
from rollmesh.scheduler.service.lateness import has_turn, limit_s
from rollmesh.scheduler.service.records import Intent, IntentKind, IntentPhase
from rollmesh.wire.scheduling import GENERATION_CLUSTER, ResizeWorkers, WorkerChange, WorkerPhase

_DONE = {IntentKind.SLEEP: WorkerPhase.ASLEEP, IntentKind.WAKE: WorkerPhase.AWAKE}
RECONCILE = "reconcile"
"""What a worker is put to sleep for that nobody knows the truth of."""
_NO_EVICTIONS = frozenset({RECONCILE, *ShrinkReason})


class Intents:
    """See the module."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._by_pipeline: dict[str, dict[int, Intent]] = {}
        for intent in book.intents.values():
            self._by_pipeline.setdefault(intent.pipeline_id, {})[intent.intent_id] = intent

    # plans

    def promise(self, op: Op) -> None:
        """Apply an op of a plan to the planner's state, and remember what is to be done."""
        book, state = self._book, self._book.state
        request = state.requests[op.key] if isinstance(op, Grant) else None
        apply(state, op)
        match op:
            case Shrink(pipeline_id, rank, for_):
                self._plan(IntentKind.SLEEP, pipeline_id, rank, for_)
            case Expand(pipeline_id, rank):
                self._plan(IntentKind.WAKE, pipeline_id, rank)
            case Grant(key):
                assert request
                book.mark("requests", key)
                book.mark("holds", request.pipeline_id, request.cluster)
                intent = self._new(IntentKind.GRANT, request.pipeline_id, request.cluster)
                intent.request = request
            case ReleaseCluster(pipeline_id, cluster):
                gpus = state.pipelines[pipeline_id].spec.clusters[cluster]
                book.clear(Owner(pipeline_id, cluster, FIXED), gpus)
                book.mark("holds", pipeline_id, cluster)

    def _plan(self, kind: IntentKind, pipeline_id: str, rank: int, for_: str = "") -> Intent:
        self._mark_worker(pipeline_id, rank)
        intent = self._new(kind, pipeline_id, GENERATION_CLUSTER)
        intent.rank, intent.for_ = rank, for_
        return intent

    def _new(self, kind: IntentKind, pipeline_id: str, cluster: str) -> Intent:
        book = self._book
        book.numbers.intent_id += 1
        intent = Intent(
            intent_id=book.numbers.intent_id,
            kind=kind,
            pipeline_id=pipeline_id,
            cluster=cluster,
            planned_s=book.now_s,
        )
        book.intents[intent.intent_id] = intent
        self._by_pipeline.setdefault(pipeline_id, {})[intent.intent_id] = intent
        book.mark("intents", intent.intent_id)
        return intent

    # views

    def of(self, pipeline_id: str) -> list[Intent]:
        """All of a pipeline's, the oldest first."""
        return list(self._by_pipeline.get(pipeline_id, {}).values())

    def of_worker(self, pipeline_id: str, rank: int) -> Intent | None:
        return next((each for each in self.of(pipeline_id) if each.rank == rank != FIXED), None)

    def is_promise(self, pipeline_id: str, cluster: str) -> bool:
        """Whether a fixed cluster's hold is not kept yet."""
        return any(
            i.kind is IntentKind.GRANT and i.cluster == cluster for i in self.of(pipeline_id)
        )

    # what can be done now is done

    def drive(self) -> None:
        """Commit grants, send resizes: whatever is clear."""
        book = self._book
        resizable: dict[str, None] = {}
        for intent in list(book.intents.values()):
            if intent.kind is not IntentKind.GRANT:
                resizable[intent.pipeline_id] = None
                continue
            gpus = book.state.pipelines[intent.pipeline_id].spec.clusters[intent.cluster]
            if book.is_clear(gpus):
                book.stand(Owner(intent.pipeline_id, intent.cluster, FIXED), gpus, HELD)
                self._end(intent, IntentPhase.COMMITTED)
                book.mark("holds", intent.pipeline_id, intent.cluster)
        for pipeline_id in resizable:
            self._dispatch(pipeline_id)

    def _dispatch(self, pipeline_id: str) -> None:
        """The next resize of a pipeline, if it is its turn and its coordinator is known."""
        intents = self.of(pipeline_id)
        is_resizing = any(has_turn(self._book, each) for each in intents)
        if is_resizing or not self._book.links[pipeline_id].is_known:
            return
        waits = [each for each in intents if each.phase is IntentPhase.PLANNED]
        sleeps = [each for each in waits if each.kind is IntentKind.SLEEP]
        wakes = [each for each in waits if each.kind is IntentKind.WAKE]
        clear = [each for each in wakes if self._book.is_clear(self._worker(each).gpus)]
        if resize := sleeps or clear:
            self._send(pipeline_id, resize)

    def _send(self, pipeline_id: str, intents: list[Intent]) -> None:
        book, settings = self._book, self._book.settings
        book.numbers.resize_id += 1
        for intent in intents:
            worker = self._worker(intent)
            worker.epoch += 1
            intent.epoch, intent.resize_id = worker.epoch, book.numbers.resize_id
            intent.phase = IntentPhase.SENT
            intent.until_s = book.now_s + limit_s(settings, intent.kind) + settings.slack_s
            owner, wakes = self._owner(intent), intent.kind is IntentKind.WAKE
            if all(book.standing.get(gpu, owner) == owner for gpu in worker.gpus):
                moves = WorkerPhase.WAKING if wakes else WorkerPhase.SLEEPING
                book.stand(owner, worker.gpus, moves.value)
            book.mark("intents", intent.intent_id)
            self._mark_worker(pipeline_id, intent.rank)
        book.num["resizes"] += 1
        self._say(intents)

    def repeat(self, pipeline_id: str) -> None:
        """Its coordinator has not heard it."""
        resizes: dict[int, list[Intent]] = {}
        for each in self.of(pipeline_id):
            if each.phase is IntentPhase.SENT:
                resizes.setdefault(each.resize_id, []).append(each)
        for intents in resizes.values():
            self._say(intents)

    def _say(self, intents: list[Intent]) -> None:
        book, first = self._book, intents[0]
        tenant = book.tenants[first.pipeline_id]
        told = sorted({*tenant.told, *(each.rank for each in intents)})
        if told != tenant.told:
            tenant.told = told
            book.mark("pipelines", first.pipeline_id)
        wakes = first.kind is IntentKind.WAKE
        resize = ResizeWorkers(
            pipeline_id=first.pipeline_id,
            resize_id=first.resize_id,
            changes=tuple(WorkerChange(each.rank, wakes, each.epoch) for each in intents),
            deadline_s=max(0.0, first.until_s - book.settings.slack_s - book.now_s),
            started_s=tenant.started_s,
            turn_s=book.settings.turn_s,
        )
        book.send(book.links[first.pipeline_id].route, resize)

    def reconcile(self, pipeline_id: str, ranks: list[int]) -> None:
        """Put to sleep what nobody knows the truth of: by an epoch newer than all that may still
        be on its way. Until then it is lost, wherever it may stand."""
        for rank in ranks:
            worker = self._book.state.pipelines[pipeline_id].workers[rank]
            owner = Owner(pipeline_id, GENERATION_CLUSTER, rank)
            if all(self._book.standing.get(gpu, owner) == owner for gpu in worker.gpus):
                self._lose(pipeline_id, worker)
        intents = [self._plan(IntentKind.SLEEP, pipeline_id, rank, RECONCILE) for rank in ranks]
        self._send(pipeline_id, intents)

    # ends

    def commit(self, intent: Intent) -> None:
        """Its coordinator says that it is done."""
        intent.phase = IntentPhase.ACKED
        self.settle(intent.pipeline_id, intent.rank, _DONE[intent.kind])
        tenant = self._book.tenants[intent.pipeline_id]
        tenant.unsure = [rank for rank in tenant.unsure if rank != intent.rank]
        if intent.for_ != RECONCILE:
            tenant.num_faults = 0
        if intent.kind is IntentKind.SLEEP and intent.for_ not in _NO_EVICTIONS:
            self._book.num["evictions"] += 1
        self._end(intent, IntentPhase.COMMITTED)

    def settle(self, pipeline_id: str, rank: int, phase: WorkerPhase) -> None:
        """The truth of a worker: it owns its GPUs and stands there, or does not."""
        book = self._book
        worker = book.state.pipelines[pipeline_id].workers[rank]
        owner = Owner(pipeline_id, GENERATION_CLUSTER, rank)
        book.state.move_worker(pipeline_id, rank, phase)
        self._mark_worker(pipeline_id, rank)
        if phase in RESTING_PHASES:
            book.clear(owner, worker.gpus)
        else:
            book.stand(owner, worker.gpus, phase.value)
        book.wants_plan = True

    def fail(self, pipeline_id: str, why: str, answered: int = 0) -> None:
        """Nobody knows how its workers are: they keep their GPUs, and nobody is promised these.

        What was not answered, as the resize of this number was, may yet be done, until the worker
        hears of a newer epoch.
        """
        book = self._book
        sent = [each for each in self.of(pipeline_id) if each.phase is IntentPhase.SENT]
        open_ = {each.rank for each in sent if each.resize_id != answered}
        tenant = book.tenants[pipeline_id]
        tenant.unsure = sorted({*tenant.unsure, *open_})
        for intent in self.of(pipeline_id):
            if intent.kind is IntentKind.GRANT or intent.phase is IntentPhase.PLANNED:
                self._call_off(intent, why)
            else:
                self._end(intent, IntentPhase.FAILED, why)
        for worker in book.state.pipelines[pipeline_id].workers:
            if worker.phase not in RESTING_PHASES:
                self._lose(pipeline_id, worker)

    def leave(self, pipeline: PipelineState, gpus: frozenset[int]) -> None:
        """A node is down: what its workers were about to do is not done, what was promised there
        is not given."""
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
        """What it stands on is nobody else's."""
        owner = Owner(pipeline_id, GENERATION_CLUSTER, worker.rank)
        for gpu in worker.gpus:
            promised = self._book.state.owners.get(gpu)
            if promised is not None and promised != owner:
                self._break(promised)
        self.settle(pipeline_id, worker.rank, WorkerPhase.LOST)

    def call_off(self, pipeline_id: str, why: str, rank: int | None = None) -> None:
        """Workers of it, or this one, that nobody has told to wake yet need not."""
        for intent in self.of(pipeline_id):
            is_wake = intent.kind is IntentKind.WAKE and intent.phase is IntentPhase.PLANNED
            if is_wake and rank in (None, intent.rank):
                self._call_off(intent, why)

    def drop_promise(self, pipeline_id: str, cluster: str) -> None:
        """It is not wanted any more; the hold that was promised goes with it."""
        for intent in self.of(pipeline_id):
            if intent.kind is IntentKind.GRANT and intent.cluster == cluster:
                self._end(intent, IntentPhase.FAILED, "withdrawn")

    def forget(self, pipeline_id: str, why: str) -> None:
        """All its workers are gone, whatever they were about to do."""
        pipeline = self._book.state.pipelines[pipeline_id]
        for intent in self.of(pipeline_id):
            self._end(intent, IntentPhase.FAILED, why)
        for worker in pipeline.workers:
            self.settle(pipeline_id, worker.rank, WorkerPhase.ASLEEP)

    def _break(self, owner: Owner) -> None:
        """It cannot have what it was promised."""
        for intent in self.of(owner.pipeline_id):
            if (intent.cluster, intent.rank) == (owner.cluster, owner.rank):
                self._call_off(intent, "who stands there is lost")

    def _call_off(self, intent: Intent, why: str) -> None:
        """Undo a promise that nothing was done for."""
        book, state = self._book, self._book.state
        pipeline_id = intent.pipeline_id
        if intent.kind is IntentKind.WAKE:
            state.move_worker(pipeline_id, intent.rank, WorkerPhase.ASLEEP)
            self._mark_worker(pipeline_id, intent.rank)
        elif intent.request is not None:
            apply(state, ReleaseCluster(pipeline_id, intent.cluster))
            book.mark("holds", pipeline_id, intent.cluster)
            waiting = [*state.requests.values(), intent.request]
            state.requests.clear()
            state.requests.update((each.key, each) for each in sorted(waiting, key=_seq))
            book.mark("requests", intent.request.key)
        self._end(intent, IntentPhase.FAILED, why)
        book.wants_plan = True

    def _end(self, intent: Intent, phase: IntentPhase, detail: str = "") -> None:
        intent.phase, intent.detail, intent.ended_s = phase, detail, self._book.now_s
        self._book.num[f"intents_{phase.value}"] += 1
        self._book.intents.pop(intent.intent_id)
        left = self._by_pipeline[intent.pipeline_id]
        del left[intent.intent_id]
        if not left:
            del self._by_pipeline[intent.pipeline_id]
        self._book.mark("intents", intent.intent_id)
        remember(self._book, intent)

    def _worker(self, intent: Intent) -> GenerationWorker:
        return self._book.state.pipelines[intent.pipeline_id].workers[intent.rank]

    def _owner(self, intent: Intent) -> Owner:
        return Owner(intent.pipeline_id, intent.cluster, intent.rank)

    def _mark_worker(self, pipeline_id: str, rank: int) -> None:
        self._book.mark("workers", pipeline_id, rank)
        self._book.mark("pipelines", pipeline_id)


def rests(book: Book, worker: GenerationWorker) -> bool:
    """It is asleep or not there yet, or was on a node that is down."""
    if worker.phase is not WorkerPhase.LOST:
        return worker.phase in RESTING_PHASES
    return is_down(book, worker)


def is_down(book: Book, worker: GenerationWorker) -> bool:
    """Whether its node is."""
    nodes = (book.state.node_of.get(gpu) for gpu in worker.gpus)
    return any(node is None or node.phase is NodePhase.DOWN for node in nodes)


def _seq(request: ClusterRequest) -> int:
    return request.seq
