"""What the service knows beside the planner's state, for those who put it into words.

    op   planned -> sent -> acked, and it is not under way any more

Invariants: values only, of one moment; times are those of the state. Made by scheduler.py, read by
occupants.py and explain.py.
"""

from collections.abc import Mapping

import msgspec

from rollmesh.scheduler.planning.state import FIXED
from rollmesh.wire.scheduling import RunClaim

FOREVER = float("inf")


class UnderWay(msgspec.Struct, frozen=True, kw_only=True):
    """An op that was planned and is not done: the state counts it as done already."""

    pipeline_id: str
    cluster: str
    rank: int = FIXED
    """FIXED, or of the generation worker."""
    stage: str
    """Of its intent: planned, sent..."""
    since_s: float
    until_s: float = FOREVER
    """When its pipeline is quarantined if it has not answered."""


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What the service knows beside the state."""

    scheduler: str = ""
    """Its incarnation."""
    policy: str = ""
    reserve_after_s: float = FOREVER
    """A request that waited so long is not bypassed."""
    again_s: float = FOREVER
    """When time alone may change the plan."""
    under_way: tuple[UnderWay, ...] = ()
    driven: frozenset[str] = frozenset()
    """Pipelines that a run drives: its coordinator was heard a moment ago."""
    runs: Mapping[str, RunClaim] = {}
    """By pipeline, the run that has its name."""
    faults: Mapping[str, str] = {}
    """By pipeline, why it is quarantined, or anything else that is wrong with it."""
    retry_s: Mapping[str, float] = {}
    """Of these, when it may be let in again at the earliest."""
    lately: Mapping[str, tuple[str, ...]] = {}
    """By pipeline, what has come of its newest ops, the newest first."""
    troubles: tuple[str, ...] = ()
    """Of the service itself, newest last: plans that failed, say."""
