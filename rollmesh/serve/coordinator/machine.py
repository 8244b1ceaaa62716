"""Coordinator machine: carries out the scheduler's resizes at the pipeline's engines.

    resize   received -> queued -> in its turn -> answered;  deadline -> answered as failed
                                    |      ^    newer ones name all of its engines -> also
                                    v      |
                                   overdue, since its turn is over

- Resizes are carried out one after another. One that has used its turn no longer delays the next,
  which may move other engines meanwhile.
- A resize with an older epoch than its engine knows is refused; a repeated one is answered again.
  If a newer resize names some of its engines, it continues with the others.
- Reports go to the scheduler each second, and at once when they change or the scheduler is another.
  While there is none, nothing changes and leases are renewed.
- Pure; it needs a tick at least every tenth of a second. worker.py draws the steps of an engine.
"""

from collections import deque
from collections.abc import Sequence

import msgspec

from rollmesh.serve.coordinator.worker import (
    SCHEDULER,
    CoordinatorAction,
    CoordinatorEvent,
    CoordinatorSettings,
    EngineOpDone,
    EngineWorker,
    WorkerStep,
)
from rollmesh.wire.fleet import (
    EnginePhase,
    EngineRow,
    FleetAnswered,
    ReadFleet,
    SleepEngine,
    WakeEngine,
)
from rollmesh.wire.machine import ROUTER, Received, Send
from rollmesh.wire.scheduling import (
    CoordinatorHello,
    ResizeWorkers,
    SchedulerHello,
    WorkersResized,
    WorkerTruth,
)


class _LastRequest:
    """The last request about one engine."""

    def __init__(self) -> None:
        self.ask_id = 0
        self.is_out = False
        self.at_s = float("-inf")
        self.leased_s = float("-inf")


class FleetTableView:
    """The pipeline's fleet table, and the requests that correct it.

    - A row counts only in a table read after the last request about its engine.
    - An engine that is to be out is ASLEEP in the table under a renewed lease; one that is to be in
      is woken there. Whatever the router has forgotten is sent again.
    """

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._rows: dict[str, EngineRow] = {}
        self._as_of = 0
        """Newest request that the table reflects."""
        self._router = ""
        self._asked = {url: _LastRequest() for url in settings.urls}
        self._num_asks = 0
        self._read_s = float("-inf")

    @property
    def is_read(self) -> bool:
        """Whether the router has sent the table."""
        return self._as_of > 0

    def take(self, answer: FleetAnswered, router: str) -> None:
        """Store a table that came with an answer."""
        if answer.ask_id < self._as_of and router == self._router:
            return
        self._as_of, self._router = answer.ask_id, router
        self._rows = {row.url: row for row in answer.engines}

    def row(self, url: str) -> EngineRow | None:
        """Row of an engine; None if missing or older than our last request."""
        return self._rows.get(url) if self._as_of >= self._asked[url].ask_id else None

    def is_removed(self, url: str) -> bool:
        """Whether the operator removed the engine: the table lacks it after a request to put it to
        sleep, by which it would have joined."""
        asked, row = self._asked[url], self._rows.get(url)
        is_answered = 0 < asked.ask_id <= self._as_of and asked.is_out
        return is_answered and (row is None or row.phase is EnginePhase.GONE)

    def update(
        self, workers: Sequence[EngineWorker], is_hasty: bool, now_s: float
    ) -> list[CoordinatorAction]:
        """Read the table and send corrections to the router."""
        actions: list[CoordinatorAction] = []
        for worker in workers if self.is_read else ():
            actions += self._update_row(worker, now_s)
        every_s = self._settings.hasty_s if is_hasty else self._settings.read_s
        if not actions and now_s >= self._read_s + every_s:
            self._read_s = now_s
            actions.append(Send(ROUTER, ReadFleet(self._next_ask())))
        return actions

    def _update_row(self, worker: EngineWorker, now_s: float) -> list[CoordinatorAction]:
        asked, row = self._asked[worker.url], self._rows.get(worker.url)
        is_known = row is not None and row.phase is not EnginePhase.GONE
        if is_known and not worker.is_settled:
            return []  # it may serve
        is_out = worker.is_out or not is_known
        is_asleep = row is not None and row.phase is EnginePhase.ASLEEP
        is_due = is_out and now_s >= asked.leased_s + self._settings.lease_s / 3
        if is_out == is_asleep and self._as_of >= asked.ask_id and not is_due:
            return []
        if is_out == asked.is_out and now_s < asked.at_s + self._settings.repeat_s:
            return []
        asked.ask_id, asked.is_out, asked.at_s = self._next_ask(), is_out, now_s
        if not is_out:
            asked.leased_s = float("-inf")
            wake = WakeEngine(asked.ask_id, worker.url, worker.policy_version, worker.adapter)
            return [Send(ROUTER, wake)]
        asked.leased_s = now_s
        return [Send(ROUTER, SleepEngine(asked.ask_id, worker.url, self._settings.lease_s))]

    def _next_ask(self) -> int:
        self._num_asks += 1
        return self._num_asks


MAX_ANSWERS = 64
"""Resizes remembered to be answered again."""


def _is_of(ask: ResizeWorkers, known: ResizeWorkers) -> bool:
    """Whether it is that resize repeated, or the rest of it; a scheduler that lost its journal
    restarts its numbers."""
    return ask.resize_id == known.resize_id and set(ask.changes) <= set(known.changes)


class _Resize(msgspec.Struct):
    """A resize without an answer."""

    ask: ResizeWorkers
    ranks: set[int]
    """Its engines that no newer resize has named."""
    until_s: float
    turn_ends_s: float | None = None
    """None while it is queued."""


def _is_in_turn(resize: _Resize, now_s: float) -> bool:
    return resize.turn_ends_s is not None and now_s < resize.turn_ends_s


class Coordinator:
    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self.workers = [EngineWorker(rank, url, settings) for rank, url in enumerate(settings.urls)]
        self._table = FleetTableView(settings)
        self._queue: list[_Resize] = []
        """Resizes in progress, then those that wait."""
        self._answered: deque[tuple[ResizeWorkers, str]] = deque(maxlen=MAX_ANSWERS)
        """Resizes with their errors, '' if successful; oldest first."""
        self._num_calls = 0
        self._began_s: float | None = None
        self._reported: tuple[WorkerTruth, ...] = ()
        self._reported_s = float("-inf")
        self._scheduler = ""
        self._started_s = settings.started_s
        self._is_confirmed = False
        """A scheduler has accepted this process as the newest of its pipeline."""

    def truths(self) -> tuple[WorkerTruth, ...]:
        """State of the engines by rank."""
        return tuple(worker.truth() for worker in self.workers)

    @property
    def has_reported(self) -> bool:
        """Whether the state of the engines is known, as far as possible, and was reported."""
        return bool(self._reported)

    def step(self, event: CoordinatorEvent, now_s: float) -> list[CoordinatorAction]:
        """Handle one event; late or unknown ones change nothing."""
        if self._began_s is None:
            self._began_s = now_s
        actions: list[CoordinatorAction] = []
        match event:
            case EngineOpDone():
                self._on_done(event, now_s)
            case Received(message=FleetAnswered() as answer):
                self._table.take(answer, event.router)
            case Received(message=SchedulerHello() as hello):
                self._on_scheduler(hello)
            case Received(message=ResizeWorkers() as ask):
                actions += self._on_resize(ask, now_s)
        return [*actions, *self._update(now_s)]

    def _on_scheduler(self, hello: SchedulerHello) -> None:
        """Report at once to a new scheduler, and to one that takes this process for an older one
        because the clock went back."""
        if hello.scheduler != self._scheduler:
            self._scheduler, self._reported_s = hello.scheduler, float("-inf")
        if hello.newest_s > self._started_s and not self._is_confirmed:
            # Above it, by an amount unique to this process.
            self._started_s = hello.newest_s + 1.0 + self._settings.started_s % 1.0
            self._reported_s = float("-inf")
        # A hello about another start time, perhaps to an earlier process, confirms nothing.
        self._is_confirmed = self._is_confirmed or hello.newest_s == self._started_s

    # resizes

    def _on_resize(self, ask: ResizeWorkers, now_s: float) -> list[CoordinatorAction]:
        if ask.pipeline_id != self._settings.pipeline_id:
            return []
        if ask.started_s not in (0.0, self._started_s):
            return []  # it was meant for an earlier process
        for known, error in self._answered:
            if _is_of(ask, known):
                return [self._answer(ask, error)]
        if any(_is_of(ask, each.ask) for each in self._queue):
            return []
        if error := self._refusal(ask):
            return [self._answer(ask, error)]
        ranks, why = {change.rank for change in ask.changes}, f"overtaken by resize {ask.resize_id}"
        for each in self._queue:
            each.ranks -= ranks
        for change in ask.changes:
            self.workers[change.rank].epoch = change.epoch
        overtaken = [each for each in self._queue if not each.ranks]
        actions: list[CoordinatorAction] = [self._end(each, why) for each in overtaken]
        self._queue.append(_Resize(ask, ranks, now_s + ask.deadline_s))
        return actions

    def _refusal(self, ask: ResizeWorkers) -> str:
        for change in ask.changes:
            if not 0 <= change.rank < len(self.workers):
                return f"no worker {change.rank}; there are {len(self.workers)}"
            known = self.workers[change.rank].epoch
            if change.epoch < known:
                return f"worker {change.rank} knows epoch {known}, this is {change.epoch}"
        return ""

    def _update_queue(self, now_s: float) -> list[CoordinatorAction]:
        """Begin queued resizes whose turn has come; end those that are done or late."""
        actions: list[CoordinatorAction] = []
        for each in list(self._queue):
            if each.turn_ends_s is None:
                if any(_is_in_turn(other, now_s) for other in self._queue):
                    break
                self._begin(each, now_s)
            if all(self.workers[rank].is_as_wanted for rank in each.ranks):
                actions.append(self._end(each, ""))
            elif now_s >= each.until_s:
                actions.append(self._give_up(each))
        return actions

    def _begin(self, resize: _Resize, now_s: float) -> None:
        resize.turn_ends_s = now_s + resize.ask.turn_s
        for change in resize.ask.changes:
            if change.rank in resize.ranks:
                self.workers[change.rank].want(change.wakes)

    def _give_up(self, resize: _Resize) -> Send:
        late = [w for w in self.workers if w.rank in resize.ranks and not w.is_as_wanted]
        for worker in late:
            worker.give_up(f"{worker.step.value}: took too long")
        return self._end(resize, "; ".join(f"worker {w.rank}: {w.detail}" for w in late))

    def _end(self, resize: _Resize, error: str) -> Send:
        self._queue = [each for each in self._queue if each is not resize]
        self._answered.append((resize.ask, error))
        return self._answer(resize.ask, error)

    def _answer(self, ask: ResizeWorkers, error: str) -> Send:
        truths = self.truths()
        ranks = {change.rank for change in ask.changes}
        named = tuple(truth for truth in truths if truth.rank in ranks)
        return Send(SCHEDULER, WorkersResized(ask.pipeline_id, ask.resize_id, named, error))

    # engines

    def _on_done(self, done: EngineOpDone, now_s: float) -> None:
        for worker in self.workers:
            if worker.url == done.url:
                worker.on_done(done, self._table.row(worker.url), now_s)

    def _update(self, now_s: float) -> list[CoordinatorAction]:
        for worker in self.workers:
            is_removed = self._table.is_removed(worker.url)
            worker.update(self._table.row(worker.url), now_s, is_removed=is_removed)
        actions = self._update_queue(now_s)
        waits = any(w.step in (WorkerStep.LEAVING, WorkerStep.JOINING) for w in self.workers)
        actions += self._table.update(self.workers, waits, now_s)
        if self._table.is_read:
            actions += self._calls(now_s)
        return [*self._hello(now_s), *actions]

    def _calls(self, now_s: float) -> list[CoordinatorAction]:
        calls: list[CoordinatorAction] = []
        for worker in self.workers:
            if call := worker.call(self._num_calls + 1, now_s):
                self._num_calls += 1
                calls.append(call)
        return calls

    # reports

    def _hello(self, now_s: float) -> list[CoordinatorAction]:
        """Report each beat, and when a phase or epoch changed."""
        assert self._began_s is not None
        is_settled = all(worker.is_settled for worker in self.workers)
        if not is_settled and now_s < self._began_s + self._settings.settle_s:
            return []
        truths = self.truths()
        is_news = [_state(each) for each in truths] != [_state(each) for each in self._reported]
        if not is_news and now_s < self._reported_s + self._settings.beat_s:
            return []
        self._reported, self._reported_s = truths, now_s
        mine = self._settings
        return [Send(SCHEDULER, CoordinatorHello(mine.pipeline_id, truths, self._started_s))]


def _state(truth: WorkerTruth) -> tuple[object, ...]:
    return (truth.phase, truth.epoch)
