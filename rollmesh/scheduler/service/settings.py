"""How patient the scheduler's service is.

Invariants: frozen; the fleet file has a line for each, which overrides it, and a time out of its
range there is refused: whoever is heard each second is not given up after less than two. Driven by
the machine in scheduler.py, by its process and by tests.
"""

from typing import Annotated

import msgspec

MAX_S = 1e6
Span = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_S)]
Second = Annotated[float, msgspec.Meta(ge=1.0, le=MAX_S)]
Beats = Annotated[float, msgspec.Meta(ge=2.0, le=MAX_S)]
"""Some, of who is heard each second."""
Tick = Annotated[float, msgspec.Meta(ge=0.01, le=10.0)]


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """See the module."""

    patience_s: Beats = 15.0
    """A queued ask that nobody has said again for so long is withdrawn, and so is an offer."""
    memory_s: Beats = 600.0
    """What has ended is known so long, for those who ask again."""
    resize_deadline_s: Second = 120.0
    """Engines have so long to wake, which is to load weights; then the resize has failed."""
    sleep_deadline_s: Second = 45.0
    """The same for one that goes to sleep, where that is less."""
    slack_s: Span = 5.0
    """And its answer so long for the way."""
    turn_s: Second = 10.0
    """Resizes of a pipeline are done one after another, but the next one waits no longer than that
    for the one before: engines that take longer go on by themselves."""
    join_s: Second = 600.0
    """An engine that has not come up so long after its run began is a fault."""
    coordinator_grace_s: Beats = 15.0
    """A pipeline is quarantined whose coordinator is silent for so long."""
    node_grace_s: Beats = 15.0
    """A node that beats is down that is silent for so long."""
    settle_s: Span = 3.0
    """After a restart nothing is planned for so long, unless all coordinators are heard before."""
    retry_s: Second = 1.0
    """A quarantined pipeline is let in again after so long at the least, doubled by each fault."""
    max_retry_s: Second = 60.0
    stall_s: Second = 30.0
    """A rollout without progress for so long is told of."""
    progress_plan_s: Span = 0.25
    """News of progress alone makes no more than one plan in so long."""
    tick_s: Tick = 0.25
    """What time brings is looked at so often."""
