"""How patient the scheduler's service is.

Invariant: frozen; the fleet file has a line for each, which overrides it. Driven by the machine in
scheduler.py, by its process and by tests.
"""

import msgspec


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """See the module."""

    patience_s: float = 15.0
    """A queued ask that nobody has said again for so long is withdrawn."""
    memory_s: float = 600.0
    """What has ended is known so long, for those who ask again."""
    resize_deadline_s: float = 120.0
    """A coordinator has so long for each resize."""
    slack_s: float = 5.0
    """And its answer so long for the way."""
    promise_s: float = 30.0
    """Workers wait so long behind a resize of their pipeline, then their GPUs are for anybody."""
    coordinator_grace_s: float = 15.0
    """A pipeline is quarantined whose coordinator is silent for so long."""
    node_grace_s: float = 15.0
    """A node that beats is down that is silent for so long."""
    settle_s: float = 3.0
    """After a restart nothing is planned for so long, unless all coordinators are heard before."""
    retry_s: float = 1.0
    """A quarantined pipeline is let in again after so long at the least, doubled by each fault."""
    max_retry_s: float = 60.0
    stall_s: float = 30.0
    """A rollout without progress for so long is told of."""
    progress_plan_s: float = 0.25
    """News of progress alone makes no more than one plan in so long."""
    tick_s: float = 0.25
    """What time brings is looked at so often."""
