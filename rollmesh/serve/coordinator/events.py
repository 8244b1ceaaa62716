"""What a coordinator's machine is told and asks for, where that is no message of the wire.

Invariant: values only; each CallEngine is answered by one EngineDone of its serial, and a later
call to the same engine ends the one before. Driven by machine.py and by whoever carries its
actions out: process.py, and the simulator.
"""

import enum
from typing import Final

import msgspec

from rollmesh.wire.machine import Received, Send, Ticked

SCHEDULER: Final = b"scheduler"
"""The route of what goes to and comes from the scheduler; the router's is wire.machine.ROUTER."""
UNVERSIONED: Final = -1
"""Weights that have no policy version."""


class Deed(enum.StrEnum):
    """What can be done to an engine."""

    LOOK = "look"
    """Ask how it is: EngineDone.seen."""
    PAUSE = "pause"
    """End all that still runs there, and hold what comes."""
    RELEASE = "release"
    """Flush, and give its memory up; nothing more to do where it is given up already."""
    RESUME = "resume"
    """Take its memory again; its weights are lost."""
    LOAD = "load"
    """The newest weights that were published, with the adapter over them if that is newer, else
    what it was started with; then generate."""
    PROBE = "probe"
    """Prove that it serves `policy_version`."""


class EngineSeen(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is."""

    is_released: bool
    is_moving: bool = False
    """Somebody began to give its memory up, or to wake it, and has not ended: no weights."""
    policy_version: int = UNVERSIONED
    adapter: str = ""
    """Of that version, if it is there."""
    num_requests: int = 0
    kv_tokens: int = 0
    """Held for what runs there."""


class EngineDone(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to CallEngine."""

    url: str
    serial: int
    ok: bool
    detail: str = ""
    """Why it is not ok, in one line."""
    seen: EngineSeen | None = None
    """Of LOOK."""
    policy_version: int = UNVERSIONED
    """Of LOAD: that of the weights which it has now."""
    adapter: str = ""
    """Of LOAD: over them."""


class CallEngine(msgspec.Struct, frozen=True):
    """Do `deed` to the engine at `url`, after a while."""

    url: str
    serial: int
    deed: Deed
    policy_version: int = UNVERSIONED
    """Of PROBE."""
    after_s: float = 0.0


class CoordinatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Whose coordinator it is, and how patient."""

    pipeline_id: str
    urls: tuple[str, ...]
    """Of the engines, by rank."""
    started_s: float = 0.0
    """When this process began, in unix time: the scheduler tells it from those before by that."""
    lease_s: float = 15.0
    """A sleeping engine is leased for so long, and anew after a third of it."""
    beat_s: float = 1.0
    """The scheduler hears the truth this often, and each engine is looked at."""
    read_s: float = 0.5
    """The fleet table is read this often."""
    hasty_s: float = 0.1
    """The same while a change of it is waited for."""
    repeat_s: float = 0.5
    """An ask to the router that has not shown in the table is said again."""
    look_s: float = 0.05
    """Between two looks at an engine that drains."""
    drain_s: float = 5.0
    """Turns that cannot go on elsewhere have so long to end; then they are cut."""
    retry_s: float = 1.0
    """What failed is tried again after this time."""
    repair_s: float = 60.0
    """An engine that is awake and was started anew has so long to serve again."""
    call_s: float = 100_000.0
    """A call that its shell has not answered by then has failed; the shell's own limits are
    shorter."""
    settle_s: float = 10.0
    """The first truth waits so long for engines that do not answer."""


Event = Received | EngineDone | Ticked
Action = Send | CallEngine
