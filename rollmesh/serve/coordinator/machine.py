"""The coordinator's machine: what the scheduler wants of a pipeline's engines, done at the engines.

    resize   heard -> in line -> in its turn -> answered;  the deadline passes -> answered, not done
                                    |      ^    newer ones name all of its engines -> so, too
                                    v      |
                                   overdue, since its turn is over

Invariants: resizes are carried out one after another, but one that has had its turn keeps the next
one waiting no longer: what it still waits for are other engines, each of which goes its own way;
one with an older epoch than its engine has heard of is refused, one said again is answered again;
of one whose engines a newer one names the others go on: they may be slow, and those be awake long;
the scheduler hears the truth each second, and at once when it changes or the scheduler is another;
while there is none, nothing changes and leases are renewed. An engine's own way is drawn in
worker.py. Pure; driven by process.py and by the simulator, with a tick at least every tenth of a
second.
"""

from collections import deque

import msgspec

from rollmesh.serve.coordinator.events import (
    SCHEDULER,
    Action,
    CoordinatorSettings,
    EngineDone,
    Event,
)
from rollmesh.serve.coordinator.table import Table
from rollmesh.serve.coordinator.worker import Step, Worker
from rollmesh.wire.fleet import FleetAnswered
from rollmesh.wire.machine import Received, Send
from rollmesh.wire.scheduling import (
    CoordinatorHello,
    ResizeWorkers,
    SchedulerHello,
    WorkersResized,
    WorkerTruth,
)

KEPT_ANSWERS = 64
"""So many resizes are remembered, to be answered again."""


def _is_of(ask: ResizeWorkers, known: ResizeWorkers) -> bool:
    """Whether it is that resize said again, or what is left of it; a scheduler that has lost its
    journal numbers anew."""
    return ask.resize_id == known.resize_id and set(ask.changes) <= set(known.changes)


class _Resize(msgspec.Struct):
    """One that is not answered yet."""

    ask: ResizeWorkers
    ranks: set[int]
    """Those of its engines that no newer one has named."""
    until_s: float
    turn_ends_s: float | None = None
    """None while it waits in line."""


def _is_in_turn(resize: _Resize, now_s: float) -> bool:
    return resize.turn_ends_s is not None and now_s < resize.turn_ends_s


class Coordinator:
    """See the module."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self.workers = [Worker(rank, url, settings) for rank, url in enumerate(settings.urls)]
        self._table = Table(settings)
        self._line: list[_Resize] = []
        """Those that are under way, then those that wait."""
        self._answered: deque[tuple[ResizeWorkers, str]] = deque(maxlen=KEPT_ANSWERS)
        """Resizes and their errors, '' where they were done, the oldest first."""
        self._num_calls = 0
        self._began_s: float | None = None
        self._said: tuple[WorkerTruth, ...] = ()
        self._said_s = float("-inf")
        self._scheduler = ""
        self._started_s = settings.started_s
        self._is_believed = False
        """A scheduler has taken it for the newest process of its pipeline."""

    def truths(self) -> tuple[WorkerTruth, ...]:
        """How the engines are, by rank."""
        return tuple(worker.truth() for worker in self.workers)

    @property
    def has_told(self) -> bool:
        """Whether it knows how the engines are, as far as that can be known, and has said so."""
        return bool(self._said)

    def step(self, event: Event, now_s: float) -> list[Action]:
        """Take one event; what is late or foreign changes nothing."""
        if self._began_s is None:
            self._began_s = now_s
        actions: list[Action] = []
        match event:
            case EngineDone():
                self._on_done(event, now_s)
            case Received(message=FleetAnswered() as answer):
                self._table.take(answer, event.router)
            case Received(message=SchedulerHello() as hello):
                self._on_scheduler(hello)
            case Received(message=ResizeWorkers() as ask):
                actions += self._on_resize(ask, now_s)
        return [*actions, *self._tend(now_s)]

    def _on_scheduler(self, hello: SchedulerHello) -> None:
        """One that was started anew hears all at once; so does one that takes us for a process
        before, since the clock went back between its life and ours."""
        if hello.scheduler != self._scheduler:
            self._scheduler, self._said_s = hello.scheduler, float("-inf")
        if hello.newest_s > self._started_s and not self._is_believed:
            # Above it by what no other process adds.
            self._started_s = hello.newest_s + 1.0 + self._settings.started_s % 1.0
            self._said_s = float("-inf")
        # What was said of another, perhaps to the process before, says nothing of this one.
        self._is_believed = self._is_believed or hello.newest_s == self._started_s

    # resizes

    def _on_resize(self, ask: ResizeWorkers, now_s: float) -> list[Action]:
        if ask.pipeline_id != self._settings.pipeline_id:
            return []
        if ask.started_s not in (0.0, self._started_s):
            return []  # it was meant for a process before
        for known, error in self._answered:
            if _is_of(ask, known):
                return [self._answer(ask, error)]
        if any(_is_of(ask, each.ask) for each in self._line):
            return []
        if error := self._refusal(ask):
            return [self._answer(ask, error)]
        ranks, why = {change.rank for change in ask.changes}, f"overtaken by resize {ask.resize_id}"
        for each in self._line:
            each.ranks -= ranks
        for change in ask.changes:
            self.workers[change.rank].epoch = change.epoch
        overtaken = [each for each in self._line if not each.ranks]
        actions: list[Action] = [self._end(each, why) for each in overtaken]
        self._line.append(_Resize(ask, ranks, now_s + ask.deadline_s))
        return actions

    def _refusal(self, ask: ResizeWorkers) -> str:
        for change in ask.changes:
            if not 0 <= change.rank < len(self.workers):
                return f"there is no worker {change.rank}; there are {len(self.workers)}"
            known = self.workers[change.rank].epoch
            if change.epoch < known:
                return f"worker {change.rank} has heard of epoch {known}, this is {change.epoch}"
        return ""

    def _tend_line(self, now_s: float) -> list[Action]:
        """Begin what waits, when its turn has come; end what is done, or late."""
        actions: list[Action] = []
        for each in list(self._line):
            if each.turn_ends_s is None:
                if any(_is_in_turn(other, now_s) for other in self._line):
                    break
                self._begin(each, now_s)
            if all(self.workers[rank].is_there for rank in each.ranks):
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
        late = [w for w in self.workers if w.rank in resize.ranks and not w.is_there]
        for worker in late:
            worker.give_up(f"{worker.step.value}: took too long")
        return self._end(resize, "; ".join(f"worker {w.rank}: {w.detail}" for w in late))

    def _end(self, resize: _Resize, error: str) -> Send:
        self._line = [each for each in self._line if each is not resize]
        self._answered.append((resize.ask, error))
        return self._answer(resize.ask, error)

    def _answer(self, ask: ResizeWorkers, error: str) -> Send:
        truths = self.truths()
        ranks = {change.rank for change in ask.changes}
        named = tuple(truth for truth in truths if truth.rank in ranks)
        return Send(SCHEDULER, WorkersResized(ask.pipeline_id, ask.resize_id, named, error))

    # engines

    def _on_done(self, done: EngineDone, now_s: float) -> None:
        for worker in self.workers:
            if worker.url == done.url:
                worker.on_done(done, self._table.row(worker.url), now_s)

    def _tend(self, now_s: float) -> list[Action]:
        for worker in self.workers:
            worker.tend(self._table.row(worker.url), now_s)
        actions = self._tend_line(now_s)
        waits = any(w.step in (Step.LEAVING, Step.JOINING) for w in self.workers)
        actions += self._table.tend(self.workers, waits, now_s)
        if self._table.is_read:
            actions += self._calls(now_s)
        return [*self._hello(now_s), *actions]

    def _calls(self, now_s: float) -> list[Action]:
        calls: list[Action] = []
        for worker in self.workers:
            if call := worker.call(self._num_calls + 1, now_s):
                self._num_calls += 1
                calls.append(call)
        return calls

    # the truth

    def _hello(self, now_s: float) -> list[Action]:
        """Each beat, and when it is another than was said, but for what a sleep would lose."""
        assert self._began_s is not None
        is_settled = all(worker.is_settled for worker in self.workers)
        if not is_settled and now_s < self._began_s + self._settings.settle_s:
            return []
        truths = self.truths()
        is_news = [_state(each) for each in truths] != [_state(each) for each in self._said]
        if not is_news and now_s < self._said_s + self._settings.beat_s:
            return []
        self._said, self._said_s = truths, now_s
        mine = self._settings
        return [Send(SCHEDULER, CoordinatorHello(mine.pipeline_id, truths, self._started_s))]


def _state(truth: WorkerTruth) -> tuple[object, ...]:
    return (truth.phase, truth.epoch)
