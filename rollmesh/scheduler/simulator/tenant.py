"""One pipeline of a trace, as it lives on the simulated fleet.

Owns where it stands in its step. Invariant: its steps follow each other, rollouts before phases;
what it waits for, it is told. Driven by world.py, by the fleet and by its own rollouts.

    ARRIVES -> ASKS (for generation) -> ROLLS -> PHASE ... PHASE -> next step, or GONE
"""

from rollmesh.scheduler.simulator.agenda import Agenda
from rollmesh.scheduler.simulator.fleet import Fleet
from rollmesh.scheduler.simulator.rollouts import Rollouts
from rollmesh.scheduler.simulator.trace import Phase, Trace, TracePipeline


class TracedTenant:
    """See the module."""

    def __init__(self, trace: Trace, pipeline: TracePipeline, fleet: Fleet, agenda: Agenda) -> None:
        self.pipeline = pipeline
        self.waits_s: list[float] = []
        """Of each step, from its signal to the first engine that serves."""
        self.ended_s: float | None = None
        self.num_steps = 0
        """That are done."""
        self._trace = trace
        self._fleet = fleet
        self._agenda = agenda
        costs, per_worker = trace.costs, pipeline.rollouts_per_worker
        self.rollouts = Rollouts(agenda, costs, per_worker, self._rolled)
        self._asked_s: float | None = None
        """While it waits for its first engine."""
        self._target = 0
        self._completed = 0
        self._phases: list[Phase] = []
        """Of this step, what is to come; the first is under way."""

    def open_wait_s(self) -> float | None:
        """Of a step that waits for its first engine."""
        return None if self._asked_s is None else self._agenda.now_s - self._asked_s

    def arrive(self) -> None:
        """It registers, and begins."""
        self._fleet.join(self.pipeline.spec(), self)
        self._ask()

    def woke(self, rank: int) -> None:
        """See fleet.Tenant."""
        self.rollouts.woke(rank)
        if self._asked_s is not None:
            self._roll(self._asked_s)

    def sleeps(self, rank: int) -> int:
        """See fleet.Tenant."""
        return self.rollouts.sleeps(rank)

    def kv_tokens(self, rank: int) -> int:
        """See fleet.Tenant."""
        return self.rollouts.kv_tokens(rank)

    def granted(self) -> None:
        """See fleet.Tenant."""
        self._agenda.after(self._phases[0].seconds, self._phase_over)

    def _ask(self) -> None:
        lengths_s = self._trace.rollouts(self.pipeline, self.num_steps)
        self._target, self._completed = len(lengths_s), 0
        self._asked_s = self._agenda.now_s
        if self._fleet.open_demand(self.pipeline.pipeline_id, self._target):
            self._roll(self._asked_s)

    def _roll(self, asked_s: float) -> None:
        self.waits_s.append(self._agenda.now_s - asked_s)
        self._asked_s = None
        self.rollouts.start(self._trace.rollouts(self.pipeline, self.num_steps))

    def _rolled(self) -> None:
        self._completed += 1
        self._fleet.report(self.pipeline.pipeline_id, self._target, self._completed)
        if self._completed == self._target:
            self._phases = [*self.pipeline.phases]
            self._next_phase()

    def _next_phase(self) -> None:
        if not self._phases:
            self._step_over()
            return
        phase = self._phases[0]
        if phase.cluster:
            self._fleet.request(self.pipeline.pipeline_id, phase.cluster, phase.priority)
        else:
            self._agenda.after(phase.seconds, self._phase_over)

    def _phase_over(self) -> None:
        phase = self._phases.pop(0)
        if phase.cluster:
            self._fleet.release(self.pipeline.pipeline_id, phase.cluster)
        self._next_phase()

    def _step_over(self) -> None:
        self.num_steps += 1
        if self.num_steps < self.pipeline.steps:
            self._ask()
        else:
            self.ended_s = self._agenda.now_s
            self._fleet.leave(self.pipeline.pipeline_id)
