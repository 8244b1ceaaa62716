"""A trace under several policies, and against a fleet for each pipeline alone.

Owns what the figures mean. Invariants: every policy gets the same trace; `static` is a partition in
which nobody shares; `bound` is no run, but what none can pass. Driven by command.py and by
benchmarks/_scheduler_results.py.

    steps_per_h_gpu  steps of all, by the hours from the first arrival to the last end and by GPUs
    utilisation      GPU seconds that rollouts and phases need at full workers, of those there were
    slowdown         from its arrival to its end, by the same alone on the whole fleet; mean, worst
    jain             (sum x)^2 / (n sum x^2) over the slowdowns of a trace's pipelines; 1: all alike
    wait             from a step's signal for generation to the first engine that serves; wait_next
                     is without each pipeline's first, before which nobody can know of it
    evictions        of workers on which rollouts ran
    switch_share     of the GPU seconds, those of workers that wake or go to sleep
    bound            the same steps in no less than the work at full workers takes the fleet, and
                     than the slowest pipeline takes alone where a switch is free
"""

import math
from collections.abc import Sequence

import msgspec

from rollmesh.scheduler.planning.policies import BASELINE_POLICY, make_policy, policy_names
from rollmesh.scheduler.simulator.partition import partition
from rollmesh.scheduler.simulator.trace import Costs, Trace, TracePipeline
from rollmesh.scheduler.simulator.world import Run, run

BOUND = "bound"
FREE = Costs(sleep_s=0.0, wake_s=0.0, reprefill_s=0.0)


def compared_policies() -> tuple[str, ...]:
    """Names of all policies, the baseline first."""
    others = [name for name in reversed(policy_names()) if name != BASELINE_POLICY]
    return (BASELINE_POLICY, *others)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A trace under a policy."""

    policy: str
    steps_per_h_gpu: float
    utilisation: float
    slowdowns: tuple[float, ...]
    waits_s: tuple[float, ...]
    next_waits_s: tuple[float, ...]
    """Without the first of each pipeline."""
    num_evictions: int
    num_resizes: int
    switch_share: float
    num_starved: int
    """Pipelines that never came to their end."""

    @property
    def jain(self) -> float:
        """See the module."""
        squares = len(self.slowdowns) * sum(each * each for each in self.slowdowns)
        total = sum(self.slowdowns)
        return total * total / squares if math.isfinite(total) else 0.0


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one policy over several traces: means, but for waits, which are those of all steps."""

    steps_per_h_gpu: float
    utilisation: float
    slowdown_mean: float
    slowdown_worst: float
    jain: float
    jain_worst: float
    wait_p50_s: float
    wait_p99_s: float
    wait_next_p99_s: float
    evictions: float
    resizes: float
    switch_share: float
    starved: float


class Comparison:
    """Of one trace; what every policy is measured against is simulated once."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._alone_s = [_alone_s(trace, each) for each in trace.pipelines]

    def run(self, policy: str) -> Run:
        """Simulate the policy."""
        is_static = policy == BASELINE_POLICY
        return run(partition(self.trace) if is_static else self.trace, make_policy(policy))

    def result(self, policy: str, done: Run) -> Result:
        """Of a run of the policy."""
        trace, lives = self.trace, done.lives
        pairs = zip(trace.pipelines, lives, strict=True)
        gpu_s = trace.num_gpus * (done.ended_s - self._first_s)
        return Result(
            policy=policy,
            steps_per_h_gpu=sum(each.num_steps for each in lives) * 3600 / gpu_s,
            utilisation=sum(trace.work_gpu_s(each, life.num_steps) for each, life in pairs) / gpu_s,
            slowdowns=tuple(
                math.inf if life.ended_s is None else (life.ended_s - life.arrival_s) / alone_s
                for life, alone_s in zip(lives, self._alone_s, strict=True)
            ),
            waits_s=tuple(wait_s for life in lives for wait_s in life.waits_s),
            next_waits_s=tuple(wait_s for life in lives for wait_s in life.waits_s[1:]),
            num_evictions=done.num_evictions,
            num_resizes=done.num_resizes,
            switch_share=done.switch_gpu_s / gpu_s,
            num_starved=sum(life.ended_s is None for life in lives),
        )

    def bound(self) -> float:
        """Steps an hour and GPU, of a policy that nobody has."""
        trace = self.trace
        free = msgspec.structs.replace(trace, costs=FREE)
        alone_s = max(each.arrival_s + _alone_s(free, each) for each in trace.pipelines)
        work_s = sum(trace.work_gpu_s(each, each.steps) for each in trace.pipelines)
        least_s = max(alone_s - self._first_s, work_s / trace.num_gpus)
        return sum(each.steps for each in trace.pipelines) * 3600 / (least_s * trace.num_gpus)

    @property
    def _first_s(self) -> float:
        return min(each.arrival_s for each in self.trace.pipelines)


def summary(results: Sequence[Result]) -> Figures:
    """Of the same policy."""
    waits_s = sorted(wait_s for each in results for wait_s in each.waits_s)
    next_s = sorted(wait_s for each in results for wait_s in each.next_waits_s)
    return Figures(
        steps_per_h_gpu=_mean([each.steps_per_h_gpu for each in results]),
        utilisation=_mean([each.utilisation for each in results]),
        slowdown_mean=_mean([_mean(each.slowdowns) for each in results]),
        slowdown_worst=max(max(each.slowdowns) for each in results),
        jain=_mean([each.jain for each in results]),
        jain_worst=min(each.jain for each in results),
        wait_p50_s=_quantile(waits_s, 0.5),
        wait_p99_s=_quantile(waits_s, 0.99),
        wait_next_p99_s=_quantile(next_s or [0.0], 0.99),
        evictions=_mean([each.num_evictions for each in results]),
        resizes=_mean([each.num_resizes for each in results]),
        switch_share=_mean([each.switch_share for each in results]),
        starved=_mean([each.num_starved for each in results]),
    )


def _alone_s(trace: Trace, pipeline: TracePipeline) -> float:
    """From its arrival to its end, with the whole fleet to itself."""
    alone = msgspec.structs.replace(trace, pipelines=(pipeline,))
    return run(alone, make_policy(BASELINE_POLICY)).ended_s - pipeline.arrival_s


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _quantile(values: Sequence[float], share: float) -> float:
    """The smallest of sorted values that so many are not above."""
    return values[max(0, math.ceil(share * len(values)) - 1)]
