"""What coordinators say of their engines, and what follows: done, said again, or quarantine.

    pipeline   ADMITTED -> QUARANTINED   a resize failed or is late, an engine is lost, or is awake
                                         where it must not be; its coordinator is silent
               QUARANTINED -> ADMITTED   its coordinator tells of all its workers, and none is lost

An engine that its coordinator has never seen is ABSENT, which is no fault for `join_s`: it is not
woken, and the others work meanwhile. Where it was awake before, it is lost.

Invariants: a pipeline in quarantine keeps the GPUs that its workers may be on, and the others go
on; what a coordinator says is believed of workers whose newest epoch it knows, or that it was never
told of; what it does not know the truth of, it is made to put to sleep before it is let in again.
Driven by scheduler.py.
"""

from rollmesh.scheduler.planning.state import (
    RESTING_PHASES,
    GenerationWorker,
    Owner,
    PipelinePhase,
    PipelineState,
)
from rollmesh.scheduler.service.book import Book
from rollmesh.scheduler.service.intents import Intents, is_down
from rollmesh.scheduler.service.lateness import has_turn
from rollmesh.scheduler.service.records import IntentKind, IntentPhase
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    CoordinatorHello,
    SchedulerHello,
    WorkerPhase,
    WorkersResized,
    WorkerTruth,
)

_SETTLED = frozenset({WorkerPhase.ASLEEP, WorkerPhase.AWAKE})
DRIVEN_S = 3.0
"""A coordinator lives that was heard so shortly ago: it beats each second."""
_DONE = {IntentKind.SLEEP: WorkerPhase.ASLEEP, IntentKind.WAKE: WorkerPhase.AWAKE}

MAX_STARTED_S = 1e11
"""Above any unix time of the next thousand years, and small enough that adding a second counts."""


class Coordinators:
    """See the module."""

    def __init__(self, book: Book, intents: Intents) -> None:
        self._book = book
        self._intents = intents

    # what they say

    def on_hello(self, route: bytes, hello: CoordinatorHello) -> None:
        """All of the truth."""
        book = self._book
        if not 0.0 <= hello.started_s <= MAX_STARTED_S:  # also nan: no later one could exceed it
            why = f"started_s = {hello.started_s} is no time; set this machine's clock"
            book.send(route, SchedulerHello(book.incarnation, error=why))
            return
        pipeline = book.state.pipelines.get(hello.pipeline_id)
        if pipeline is None:
            book.send(route, SchedulerHello(book.incarnation))
            return
        tenant, link = book.tenants[hello.pipeline_id], book.links[hello.pipeline_id]
        if hello.started_s < tenant.started_s:
            # Of a process that was before, or its clock went back. While the newest one is heard
            # it is the former, and must not go above that.
            newest_s = 0.0 if is_driven(book, hello.pipeline_id) else tenant.started_s
            book.send(route, SchedulerHello(book.incarnation, newest_s=newest_s))
            return
        book.send(route, SchedulerHello(book.incarnation, newest_s=hello.started_s))
        if hello.started_s > tenant.started_s:
            tenant.started_s, tenant.told, tenant.unsure = hello.started_s, [], []
            book.mark("pipelines", hello.pipeline_id)
            for worker in pipeline.workers:
                if worker.phase is WorkerPhase.ABSENT:  # as far as the life before knew
                    self._intents.settle(hello.pipeline_id, worker.rank, WorkerPhase.ASLEEP)
        if not link.is_known:
            link.is_known = True
            if pipeline.demand or self._intents.of(hello.pipeline_id):
                book.wants_plan = True
        link.route, link.heard_s = route, book.now_s
        self._hear(pipeline, hello.workers)

    def on_resized(self, resized: WorkersResized) -> None:
        """One resize is done, or is not."""
        book, name = self._book, resized.pipeline_id
        truths = {truth.rank: truth for truth in resized.workers}
        sent = [each for each in self._intents.of(name) if each.resize_id == resized.resize_id]
        for intent in sent:
            truth = truths.get(intent.rank)
            if truth and (truth.phase, truth.epoch) == (_DONE[intent.kind], intent.epoch):
                self._intents.commit(intent)
            elif intent.intent_id in book.intents:
                detail = truth.detail if truth else ""
                why = resized.error or detail or "its coordinator says that it is not done"
                what = f"worker {intent.rank} cannot {intent.kind.value}: {why}"
                self.quarantine(name, what, answered=resized.resize_id)
                return

    def driven(self) -> frozenset[str]:
        """Pipelines whose coordinator lives."""
        return frozenset(name for name in self._book.links if is_driven(self._book, name))

    def _hear(self, pipeline: PipelineState, truths: tuple[WorkerTruth, ...]) -> None:
        name, faults = pipeline.pipeline_id, []
        is_unheard = is_doubtful = False
        for truth in truths:
            if not 0 <= truth.rank < len(pipeline.workers):
                continue
            worker = pipeline.workers[truth.rank]
            worker.kv_tokens = truth.kv_tokens
            if truth.epoch > worker.epoch and truth.rank not in self._book.tenants[name].told:
                worker.epoch = truth.epoch  # of a life before: it refuses what is older
                self._book.mark("workers", name, worker.rank)
            if self._is_sent(name, truth.rank):
                fault, says_nothing = self._hear_of_resize(name, truth)
                is_unheard |= says_nothing
                faults.append(fault)
            elif self._is_trusted(name, worker, truth):
                faults.append(self._hear_of(name, worker, truth))
            else:
                is_doubtful = True
        faults.append(self._doubt(name, is_doubtful))
        fault = next(filter(None, faults), "")
        if fault and not self._is_out(pipeline):
            self.quarantine(name, fault)
        elif is_unheard:
            self._intents.repeat(name)
        if self._is_out(pipeline):
            self._let_in(pipeline, {truth.rank: truth for truth in truths})

    def _doubt(self, name: str, is_doubtful: bool) -> str:
        """Old news may still be on its way, but not for long."""
        book, link = self._book, self._book.links[name]
        if not is_doubtful:
            link.doubt_s = None
        elif link.doubt_s is None:
            link.doubt_s = book.now_s
        elif book.now_s - link.doubt_s > book.settings.slack_s:
            return "its coordinator does not know what it was told"
        return ""

    def _hear_of_resize(self, name: str, truth: WorkerTruth) -> tuple[str, bool]:
        """Of a worker that was told to move: what is wrong, and whether it has to be told again."""
        intent = self._intents.of_worker(name, truth.rank)
        assert intent
        if truth.epoch != intent.epoch:
            return "", True
        if truth.phase is _DONE[intent.kind]:
            self._intents.commit(intent)
        elif truth.phase is WorkerPhase.LOST:
            return self._lost(truth), False
        return "", truth.phase in _SETTLED

    def _hear_of(self, name: str, worker: GenerationWorker, truth: WorkerTruth) -> str:
        """Of a worker that nobody has told to move: what is wrong, or ''."""
        if is_down(self._book, worker):
            return ""
        if truth.phase is WorkerPhase.ABSENT:
            return self._absent(name, worker, truth)
        if truth.phase is WorkerPhase.LOST:
            return self._lost(truth)
        if worker.phase is WorkerPhase.LOST:
            if truth.phase in _SETTLED and not self._book.tenants[name].why:
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
        """It is awake and was not woken: it may be, where nobody else is or will be."""
        book, owner = self._book, Owner(name, GENERATION_CLUSTER, worker.rank)
        is_planned = self._intents.of_worker(name, worker.rank) is not None
        is_nobodys = all(book.state.owners.get(gpu, owner) == owner for gpu in worker.gpus)
        if book.is_clear(worker.gpus):
            if is_nobodys and not is_planned:
                self._intents.settle(name, worker.rank, WorkerPhase.AWAKE)
                return ""
            book.stand(owner, worker.gpus, WorkerPhase.LOST.value)
        return f"worker {worker.rank} is awake on GPUs that it was not given"

    def _absent(self, name: str, worker: GenerationWorker, truth: WorkerTruth) -> str:
        """Of one that its coordinator has never seen."""
        # A wake that was sent is not looked at here: this one was promised before that was known.
        self._intents.call_off(name, "its engine has not come up yet", worker.rank)
        if worker.phase is WorkerPhase.ASLEEP:
            self._intents.settle(name, worker.rank, WorkerPhase.ABSENT)
        if worker.phase is WorkerPhase.LOST:
            return ""
        if worker.phase is not WorkerPhase.ABSENT:
            return self._lost(truth)
        if not self._is_overdue(worker):
            return ""
        still_s = self._book.now_s - worker.since_s
        return f"engine {worker.rank} has not come up within {still_s:.0f} s: {truth.detail}"

    def _is_overdue(self, worker: GenerationWorker) -> bool:
        return self._book.now_s > worker.since_s + self._book.settings.join_s

    def _lost(self, truth: WorkerTruth) -> str:
        return f"worker {truth.rank} is lost: {truth.detail or 'nobody knows why'}"

    def _is_sent(self, name: str, rank: int) -> bool:
        intent = self._intents.of_worker(name, rank)
        return intent is not None and intent.phase is IntentPhase.SENT

    def _is_trusted(self, name: str, worker: GenerationWorker, truth: WorkerTruth) -> bool:
        return truth.epoch == worker.epoch or worker.rank not in self._book.tenants[name].told

    # out and in

    def quarantine(self, name: str, why: str, answered: int = 0) -> None:
        """Fence its GPUs; what others had been promised there they wait for anew. `answered` is the
        number of the resize that has failed, if it was said so."""
        book, tenant = self._book, self._book.tenants[name]
        settings, pipeline = book.settings, self._book.state.pipelines[name]
        tenant.why = why
        tenant.num_faults += 1
        wait_s = settings.retry_s * 2 ** min(tenant.num_faults - 1, 16)
        book.links[name].retry_s = book.now_s + min(settings.max_retry_s, wait_s)
        if pipeline.phase is PipelinePhase.ADMITTED:
            pipeline.phase = PipelinePhase.QUARANTINED
        self._intents.fail(name, why, answered)
        book.mark("pipelines", name)
        book.wants_plan = True
        book.note("pipeline.quarantined", name, why)

    def _is_out(self, pipeline: PipelineState) -> bool:
        """Something is wrong with it."""
        return bool(self._book.tenants[pipeline.pipeline_id].why)

    def _let_in(self, pipeline: PipelineState, truths: dict[int, WorkerTruth]) -> None:
        """Once it is known of each worker how it is, or that it sleeps."""
        book, name = self._book, pipeline.pipeline_id
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
        if book.now_s < book.links[name].retry_s:
            return
        for worker in here:
            if worker.phase is not truths[worker.rank].phase:
                self._intents.settle(name, worker.rank, truths[worker.rank].phase)
        book.tenants[name].why = ""
        if pipeline.phase is PipelinePhase.QUARANTINED:
            pipeline.phase = PipelinePhase.ADMITTED
        book.mark("pipelines", name)
        book.note("pipeline.readmitted", name, "its coordinator is well", is_warning=False)
        book.wants_plan = True

    def _free(
        self, name: str, settled: list[GenerationWorker], truths: dict[int, WorkerTruth]
    ) -> None:
        """Others of its engines are lost, or on their way: these sleep meanwhile, and who wants
        their GPUs has them."""
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
        if awake and not any(has_turn(self._book, each) for each in self._intents.of(name)):
            self._intents.reconcile(name, awake)

    def _is_good(self, name: str, worker: GenerationWorker, truth: WorkerTruth) -> bool:
        """It can be believed, and is nowhere where it must not be."""
        is_unsure = worker.rank in self._book.tenants[name].unsure
        if is_unsure or not self._is_trusted(name, worker, truth):
            return False
        is_stray = truth.phase is WorkerPhase.AWAKE and worker.phase is WorkerPhase.ASLEEP
        return not is_stray

    def _here(self, pipeline: PipelineState) -> list[GenerationWorker]:
        """Its workers, but for those on nodes that are down, or that have time yet to come up."""
        return [
            each
            for each in pipeline.workers
            if not is_down(self._book, each)
            and (each.phase is not WorkerPhase.ABSENT or self._is_overdue(each))
        ]

    # time

    def on_tick(self) -> None:
        """Resizes that are late, coordinators that are silent."""
        self.fence_silent()
        book = self._book
        late = {i.pipeline_id: i for i in book.intents.values() if book.now_s >= i.until_s}
        for name, intent in late.items():
            what = f"worker {intent.rank} did not {intent.kind.value}"
            self.quarantine(name, f"{what} within {book.now_s - intent.planned_s:.0f} s")

    def fence_silent(self) -> None:
        """Pipelines that have workers, or want some, and whose coordinator is not heard."""
        book = self._book
        silent_s = book.now_s - book.settings.coordinator_grace_s
        for name, link in book.links.items():
            if link.heard_s >= silent_s or book.tenants[name].why:
                continue
            pipeline = book.state.pipelines[name]
            wants = pipeline.demand is not None and pipeline.phase is PipelinePhase.ADMITTED
            if wants or any(each.phase not in RESTING_PHASES for each in pipeline.workers):
                link.is_known = False
                still_s = book.now_s - link.heard_s
                self.quarantine(name, f"its coordinator is silent for {still_s:.0f} s")


def is_driven(book: Book, name: str) -> bool:
    """Whether the pipeline's coordinator lives, or may: as this life of ours begins, one that was
    there before has not been heard yet."""
    link, tenant = book.links[name], book.tenants[name]
    was_there = tenant.is_wired and tenant.started_s > 0.0
    return (bool(link.route) or was_there) and link.heard_s > book.now_s - DRIVEN_S


_UNKNOWN = WorkerTruth(-1, WorkerPhase.LOST, 0)
