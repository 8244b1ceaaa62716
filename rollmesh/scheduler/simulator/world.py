"""A trace under a policy, from the first arrival to the last end.

Owns the run and what was measured in it. Invariant: a run is a function of its trace and policy.
Driven by comparison.py.
"""

import msgspec

from rollmesh.scheduler.planning.planner import SchedulingPolicy
from rollmesh.scheduler.simulator.agenda import Agenda
from rollmesh.scheduler.simulator.fleet import Fleet
from rollmesh.scheduler.simulator.spans import Span, Use
from rollmesh.scheduler.simulator.tenant import TracedTenant
from rollmesh.scheduler.simulator.trace import Trace

PATIENCE_S = 10 * 86400.0
"""Who is not done by then never will be."""


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """Of one pipeline in a run."""

    pipeline_id: str
    arrival_s: float
    ended_s: float | None
    """None: it was starved for ever."""
    num_steps: int
    waits_s: tuple[float, ...]
    """Of its steps, the one that still waits included."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What happened."""

    lives: tuple[Life, ...]
    spans: list[Span]
    ended_s: float
    served_gpu_s: float
    """In phases, and of full workers in rollouts, with what was done twice since KV was lost."""
    switch_gpu_s: float
    """Of workers on their way."""
    num_resizes: int
    num_evictions: int
    num_plans: int


def run(trace: Trace, policy: SchedulingPolicy) -> Run:
    """Simulate it."""
    agenda = Agenda()
    fleet = Fleet(trace, policy, agenda)
    tenants = [TracedTenant(trace, each, fleet, agenda) for each in trace.pipelines]
    for tenant in tenants:
        agenda.at(tenant.pipeline.arrival_s, tenant.arrive)
    agenda.run(PATIENCE_S)
    ended_s = max((each.ended_s or agenda.now_s) for each in tenants)
    spans = fleet.spans.close(agenda.now_s)
    return Run(
        lives=tuple(map(_life, tenants)),
        spans=spans,
        ended_s=ended_s,
        served_gpu_s=sum(map(_served_gpu_s, tenants)),
        switch_gpu_s=sum(
            each.end_s - each.start_s for each in spans if each.use in (Use.WAKE, Use.SLEEP)
        ),
        num_resizes=fleet.num_resizes,
        num_evictions=fleet.num_evictions,
        num_plans=fleet.num_plans,
    )


def _life(tenant: TracedTenant) -> Life:
    pipeline, open_s = tenant.pipeline, tenant.open_wait_s()
    return Life(
        pipeline_id=pipeline.pipeline_id,
        arrival_s=pipeline.arrival_s,
        ended_s=tenant.ended_s,
        num_steps=tenant.num_steps,
        waits_s=(*tenant.waits_s, *([] if open_s is None else [open_s])),
    )


def _served_gpu_s(tenant: TracedTenant) -> float:
    pipeline = tenant.pipeline
    return tenant.rollouts.served_s * pipeline.slot_gpus + tenant.num_steps * pipeline.fixed_gpu_s
