"""What is said of engines: their table, and the asks that change it.

    router -> worker   FleetChanged             worker -> router   EngineFaulted
    publisher, launch, coordinator -> router   JoinEngine BeginUpdate FinishUpdate SleepEngine
                                             WakeEngine FenceEngine RemoveEngine ReadFleet:
                                             FleetAnswered
    publisher -> router   PublisherLeft

Invariant: that of messages.py, whose vocabulary holds these too. Driven by engine/fleet.py and
those who ask.
"""

import enum

import msgspec

from rollmesh.wire.header import Message


class EnginePhase(enum.StrEnum):
    """JOINING -> READY <-> UPDATING; READY, JOINING, FENCED -> ASLEEP -> JOINING; any -> FENCED ->
    JOINING; any -> GONE"""

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
    adapter: str = ""
    """Its weights of this version are its own and the adapter of this name: requests name it."""
    max_running: int = 0
    """Requests that it runs at a time, over all of its ranks; 0 where it does not report it."""


class FleetChanged(Message, frozen=True, tag="fleet_changed"):
    epoch: int
    """Grows with every change; an older table never replaces a newer one of one router."""
    engines: tuple[EngineRow, ...]
    published: int = -1
    """What a publisher brought last: older than what a session has seen where another run began to
    count anew; -1 where none did since the router began."""
    has_publisher: bool = True
    """Whether a publisher numbers these weights: then a session never moves to an older version.
    False where engines number them as they like, and a version is a preference."""


class PublisherLeft(Message, frozen=True, tag="publisher_left"):
    """Neither its versions nor its leases keep another publisher out."""


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
    publisher: str = ""
    """Of the run that asks, in all its lives, of which one lives at a time; '' is of none."""


class FinishUpdate(Message, frozen=True, tag="finish_update"):
    ask_id: int
    url: str
    policy_version: int
    ok: bool
    detail: str = ""
    adapter: str = ""
    """What requests to it must name from now on; see EngineRow."""


class SleepEngine(Message, frozen=True, tag="sleep_engine"):
    """Send nobody there, until WakeEngine; one that is not in the table joins it asleep."""

    ask_id: int
    url: str
    lease_s: float
    """After that the table says that nobody knows of it; it sleeps on."""


class WakeEngine(Message, frozen=True, tag="wake_engine"):
    """It has its memory, and verified weights of that version."""

    ask_id: int
    url: str
    policy_version: int
    adapter: str = ""
    """Of these weights, as EngineRow has it."""


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
    policy_version: int = -1
    """What the publisher that asks publishes now: engines that come (back) with older weights wait
    for it, also where no engine has it yet. -1 from all others."""


class FleetAnswered(Message, frozen=True, tag="fleet_answered"):
    ask_id: int
    ok: bool
    error: str
    epoch: int
    engines: tuple[EngineRow, ...]
    superseded_by: int = -1
    """Refused because another publisher, which is known to live, has brought engines to this
    version; of one that may have been killed it is -1, and a later ask is let in or told."""


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
