"""What is said of engines: their table, and the asks that change it.

    router -> worker   FleetChanged             worker -> router   EngineFaulted
    publisher, launch, scheduler -> router   JoinEngine BeginUpdate FinishUpdate SleepEngine
                                             WakeEngine FenceEngine RemoveEngine ReadFleet:
                                             FleetAnswered

Invariant: that of messages.py, whose vocabulary holds these too. Driven by engine/fleet.py and
those who ask.
"""

import enum

import msgspec

from rollmesh.wire.header import Message


class EnginePhase(enum.StrEnum):
    """JOINING -> READY <-> UPDATING; READY <-> ASLEEP; any -> FENCED -> JOINING; any -> GONE"""

    JOINING = "joining"
    READY = "ready"
    UPDATING = "updating"
    ASLEEP = "asleep"
    FENCED = "fenced"
    GONE = "gone"


class EngineRow(msgspec.Struct, frozen=True, array_like=True):
    """One engine in the fleet table."""

    url: str
    incarnation: str
    """Changes when the server behind `url` was restarted."""
    phase: EnginePhase
    policy_version: int
    """Publish sequence number of its weights; -1 while unknown."""
    num_running: int = 0
    num_waiting: int = 0
    detail: str = ""
    """Why it is not READY, in one line."""


class FleetChanged(Message, frozen=True, tag="fleet_changed"):
    epoch: int
    """Grows with every change; an older table never replaces a newer one of one router."""
    engines: tuple[EngineRow, ...]


class EngineFaulted(Message, frozen=True, tag="engine_faulted"):
    url: str
    incarnation: str
    detail: str


class JoinEngine(Message, frozen=True, tag="join_engine"):
    ask_id: int
    url: str


class BeginUpdate(Message, frozen=True, tag="begin_update"):
    ask_id: int
    url: str
    policy_version: int
    lease_s: float


class FinishUpdate(Message, frozen=True, tag="finish_update"):
    ask_id: int
    url: str
    policy_version: int
    ok: bool
    detail: str = ""


class SleepEngine(Message, frozen=True, tag="sleep_engine"):
    ask_id: int
    url: str
    lease_s: float


class WakeEngine(Message, frozen=True, tag="wake_engine"):
    ask_id: int
    url: str
    policy_version: int


class FenceEngine(Message, frozen=True, tag="fence_engine"):
    ask_id: int
    url: str
    policy_version: int
    """Under which it sampled what its weights do not; under another it may be sound."""
    detail: str


class RemoveEngine(Message, frozen=True, tag="remove_engine"):
    ask_id: int
    url: str


class ReadFleet(Message, frozen=True, tag="read_fleet"):
    ask_id: int


class FleetAnswered(Message, frozen=True, tag="fleet_answered"):
    ask_id: int
    ok: bool
    error: str
    epoch: int
    engines: tuple[EngineRow, ...]


FleetAsk = (
    JoinEngine
    | BeginUpdate
    | FinishUpdate
    | SleepEngine
    | WakeEngine
    | FenceEngine
    | RemoveEngine
    | ReadFleet
)
