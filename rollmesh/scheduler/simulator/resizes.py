"""Engines that wake and go to sleep in simulated time, one resize of a pipeline after another.

Owns what is promised to workers and not begun. Invariants: as in the service, a resize is all of a
pipeline's that are to sleep, else all that wake on GPUs that are clear; the next waits for its end,
but no longer than TURN_S; until it is begun a worker that is to sleep serves. Driven by fleet.py.

    promised > begun (SLEEP for sleep_s, WAKE for wake_s) > done
"""

from collections.abc import Callable
from functools import partial

import msgspec

from rollmesh.scheduler.planning.state import GenerationWorker
from rollmesh.scheduler.simulator.agenda import Agenda
from rollmesh.scheduler.simulator.spans import Spans, Use
from rollmesh.scheduler.simulator.trace import Costs
from rollmesh.wire.scheduling import WorkerPhase

TURN_S = 10.0
"""The service's `turn_s`: who waits behind a resize does not wait longer."""
Told = Callable[[str, GenerationWorker], None]
"""Of a pipeline's worker."""


class _Promised(msgspec.Struct):
    """To one pipeline's workers."""

    sleeps: list[GenerationWorker] = []
    wakes: list[GenerationWorker] = []


class Resizes:
    """See the module."""

    def __init__(
        self,
        costs: Costs,
        agenda: Agenda,
        spans: Spans,
        sleeps: Told,
        done: Told,
        turned: Callable[[], None],
    ) -> None:
        """`sleeps`: from now on it serves nobody; `done`: it has its new phase; `turned`: somebody
        is no longer busy."""
        self.busy: set[str] = set()
        """Pipelines with a resize that has its turn."""
        self._costs = costs
        self._agenda = agenda
        self._spans = spans
        self._sleeps = sleeps
        self._done = done
        self._turned = turned
        self._promised: dict[str, _Promised] = {}

    def promise(self, pipeline_id: str, worker: GenerationWorker) -> None:
        """Of a worker that is WAKING or SLEEPING from now on, says the plan."""
        promised = self._promised.setdefault(pipeline_id, _Promised())
        wakes = worker.phase is WorkerPhase.WAKING
        (promised.wakes if wakes else promised.sleeps).append(worker)

    def drive(self) -> None:
        """Begin what can be."""
        for pipeline_id, promised in list(self._promised.items()):
            if pipeline_id in self.busy:
                continue
            if promised.sleeps:
                workers, promised.sleeps = promised.sleeps, []
                self._begin(pipeline_id, workers, Use.SLEEP)
            elif clear := [each for each in promised.wakes if self._spans.is_clear(each.gpus)]:
                promised.wakes = [each for each in promised.wakes if each not in clear]
                self._begin(pipeline_id, clear, Use.WAKE)

    def _begin(self, pipeline_id: str, workers: list[GenerationWorker], use: Use) -> None:
        self.busy.add(pipeline_id)
        now_s, costs = self._agenda.now_s, self._costs
        for worker in workers:
            if use is Use.SLEEP:
                self._sleeps(pipeline_id, worker)
                self._spans.turn(worker.gpus, use, now_s)
            else:
                label = f"engine {worker.rank}"
                self._spans.enter(worker.gpus, pipeline_id, label, use, now_s)
        takes_s = costs.sleep_s if use is Use.SLEEP else costs.wake_s
        self._agenda.after(min(takes_s, TURN_S), partial(self._turn_over, pipeline_id))
        self._agenda.after(takes_s, partial(self._end, pipeline_id, workers))

    def _turn_over(self, pipeline_id: str) -> None:
        self.busy.discard(pipeline_id)
        self._turned()

    def _end(self, pipeline_id: str, workers: list[GenerationWorker]) -> None:
        for worker in workers:
            self._done(pipeline_id, worker)
