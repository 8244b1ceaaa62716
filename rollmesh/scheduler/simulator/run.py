"""Simulation of a trace under a policy, from the first arrival to the last end.

- A run is a function of its trace and policy.
- Steps of a pipeline follow each other, rollouts before phases. Each rollout ends once, after all
  of its seconds.
"""

import collections
from collections.abc import Callable
from functools import partial

import msgspec

from rollmesh.scheduler.planning.planner import SchedulingPolicy
from rollmesh.scheduler.simulator.charts import GpuUse, Span
from rollmesh.scheduler.simulator.fleet import EventQueue, SimulatedFleet
from rollmesh.scheduler.simulator.trace import StepPhase, SwitchCosts, Trace, TracePipeline


class _AwakeWorker:
    """Rollouts on an awake worker."""

    def __init__(self) -> None:
        self.ran: dict[int, tuple[float, float]] = {}
        """Start and end by rollout."""
        self.starts_s = 0.0
        """Sum of their starts."""

    def run(self, rollout: int, start_s: float, end_s: float) -> None:
        self.ran[rollout] = (start_s, end_s)
        self.starts_s += start_s

    def end(self, rollout: int) -> float | None:
        """Seconds that it took; None if it does not run here."""
        if rollout not in self.ran:
            return None
        start_s, end_s = self.ran.pop(rollout)
        self.starts_s -= start_s
        return end_s - start_s


class RolloutQueue:
    """Rollouts of a pipeline's step on its awake workers.

    A worker runs up to `per_worker` rollouts at full speed; the others wait and go to the worker
    with the fewest. Rollouts of a worker that is put to sleep are placed first, with the cost of
    the lost KV cache.
    """

    def __init__(
        self, events: EventQueue, costs: SwitchCosts, per_worker: int, ended: Callable[[], None]
    ) -> None:
        self._events = events
        self._costs = costs
        self._per_worker = per_worker
        self._ended = ended
        self._waiting = collections.deque[float]()
        """Remaining seconds of each."""
        self._engines: dict[int, _AwakeWorker] = {}
        """Awake workers by rank."""
        self._num = 0
        self.served_s = 0.0
        """Worker seconds spent, including lost KV cache."""

    def start(self, lengths_s: tuple[float, ...]) -> None:
        """Add the rollouts of a step."""
        self._waiting.extend(lengths_s)
        self._fill()

    def woke(self, rank: int) -> None:
        """Use a worker that woke."""
        self._engines[rank] = _AwakeWorker()
        self._fill()

    def sleeps(self, rank: int) -> int:
        """Stop using a worker; return how many rollouts were evicted."""
        evicted = self._engines.pop(rank).ran
        now_s = self._events.now_s
        for start_s, end_s in evicted.values():
            self.served_s += now_s - start_s
            self._waiting.appendleft(end_s - now_s + self._costs.reprefill_s)
        self._fill()
        return len(evicted)

    def kv_tokens(self, rank: int) -> int:
        """KV-cache tokens that the worker's sleep would lose."""
        engine = self._engines[rank]
        running_s = len(engine.ran) * self._events.now_s - engine.starts_s
        return int(running_s * self._costs.kv_tokens_per_s)

    def _fill(self) -> None:
        engines = self._engines
        while self._waiting and engines:
            rank = min(engines, key=lambda rank: (len(engines[rank].ran), rank))
            if len(engines[rank].ran) == self._per_worker:
                return
            self._run(rank, self._waiting.popleft())

    def _run(self, rank: int, seconds: float) -> None:
        now_s = self._events.now_s
        self._num += 1
        self._engines[rank].run(self._num, now_s, now_s + seconds)
        self._events.after(seconds, partial(self._end, rank, self._num))

    def _end(self, rank: int, rollout: int) -> None:
        seconds = self._engines[rank].end(rollout) if rank in self._engines else None
        if seconds is None:
            return  # evicted: it ends elsewhere
        self.served_s += seconds
        if self._waiting:
            self._run(rank, self._waiting.popleft())
        self._ended()


class TracedPipeline:
    """A pipeline of the trace on the simulated fleet.

    ARRIVES -> ASKS (for generation) -> ROLLS -> PHASE ... PHASE -> next step, or GONE
    """

    def __init__(
        self, trace: Trace, pipeline: TracePipeline, fleet: SimulatedFleet, events: EventQueue
    ) -> None:
        self.pipeline = pipeline
        self.waits_s: list[float] = []
        """For each step, from its demand to the first engine that serves."""
        self.ended_s: float | None = None
        self.num_steps = 0
        """Completed steps."""
        self._trace = trace
        self._fleet = fleet
        self._events = events
        costs, per_worker = trace.costs, pipeline.rollouts_per_worker
        self.rollouts = RolloutQueue(events, costs, per_worker, self._rolled)
        self._asked_s: float | None = None
        """Set while it waits for its first engine."""
        self._target = 0
        self._completed = 0
        self._phases: list[StepPhase] = []
        """Remaining phases of this step; the first is in progress."""

    def open_wait_s(self) -> float | None:
        """Wait so far of a step without an engine, if any."""
        return None if self._asked_s is None else self._events.now_s - self._asked_s

    def arrive(self) -> None:
        """Register and begin."""
        self._fleet.join(self.pipeline.spec(), self)
        self._ask()

    def woke(self, rank: int) -> None:
        """Implement FleetClient."""
        self.rollouts.woke(rank)
        if self._asked_s is not None:
            self._roll(self._asked_s)

    def sleeps(self, rank: int) -> int:
        """Implement FleetClient."""
        return self.rollouts.sleeps(rank)

    def kv_tokens(self, rank: int) -> int:
        """Implement FleetClient."""
        return self.rollouts.kv_tokens(rank)

    def granted(self) -> None:
        """Implement FleetClient."""
        self._events.after(self._phases[0].seconds, self._phase_over)

    def _ask(self) -> None:
        lengths_s = self._trace.rollouts(self.pipeline, self.num_steps)
        self._target, self._completed = len(lengths_s), 0
        self._asked_s = self._events.now_s
        if self._fleet.open_demand(self.pipeline.pipeline_id, self._target):
            self._roll(self._asked_s)

    def _roll(self, asked_s: float) -> None:
        self.waits_s.append(self._events.now_s - asked_s)
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
            self._events.after(phase.seconds, self._phase_over)

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
            self.ended_s = self._events.now_s
            self._fleet.leave(self.pipeline.pipeline_id)


MAX_SIMULATED_S = 10 * 86400.0
"""A pipeline that is not done by then is considered starved."""


class PipelineOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one pipeline in a run."""

    pipeline_id: str
    arrival_s: float
    ended_s: float | None
    """None: it starved."""
    num_steps: int
    waits_s: tuple[float, ...]
    """Waits of its steps, including one that is still waiting."""


class SimulatedRun(msgspec.Struct, frozen=True, kw_only=True):
    outcomes: tuple[PipelineOutcome, ...]
    spans: list[Span]
    ended_s: float
    served_gpu_s: float
    """GPU seconds of phases and of full workers in rollouts, including work repeated for lost KV
    cache."""
    switch_gpu_s: float
    """GPU seconds of workers that wake or go to sleep."""
    num_resizes: int
    num_evictions: int
    num_plans: int


def simulate_trace(trace: Trace, policy: SchedulingPolicy) -> SimulatedRun:
    """Simulate a trace under a policy."""
    events = EventQueue()
    fleet = SimulatedFleet(trace, policy, events)
    clients = [TracedPipeline(trace, each, fleet, events) for each in trace.pipelines]
    for client in clients:
        events.at(client.pipeline.arrival_s, client.arrive)
    events.run(MAX_SIMULATED_S)
    ended_s = max((each.ended_s or events.now_s) for each in clients)
    spans = fleet.spans.close(events.now_s)
    return SimulatedRun(
        outcomes=tuple(map(_outcome, clients)),
        spans=spans,
        ended_s=ended_s,
        served_gpu_s=sum(map(_served_gpu_s, clients)),
        switch_gpu_s=sum(
            each.end_s - each.start_s for each in spans if each.use in (GpuUse.WAKE, GpuUse.SLEEP)
        ),
        num_resizes=fleet.num_resizes,
        num_evictions=fleet.num_evictions,
        num_plans=fleet.num_plans,
    )


def _outcome(client: TracedPipeline) -> PipelineOutcome:
    pipeline, open_s = client.pipeline, client.open_wait_s()
    return PipelineOutcome(
        pipeline_id=pipeline.pipeline_id,
        arrival_s=pipeline.arrival_s,
        ended_s=client.ended_s,
        num_steps=client.num_steps,
        waits_s=(*client.waits_s, *([] if open_s is None else [open_s])),
    )


def _served_gpu_s(client: TracedPipeline) -> float:
    pipeline = client.pipeline
    return client.rollouts.served_s * pipeline.slot_gpus + client.num_steps * pipeline.fixed_gpu_s
