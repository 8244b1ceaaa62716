"""Messages about engines: their table, and requests that change it.

router -> worker   FleetChanged EnginesChanged LoadsChanged TableDigest
worker -> router   EngineFaulted; AskTable: FleetChanged
publisher, launch, coordinator -> router   JoinEngine BeginUpdate FinishUpdate SleepEngine
                                         WakeEngine FenceEngine RemoveEngine ReadFleet:
                                         FleetAnswered
publisher -> router   PublisherLeft
operator, launch -> router   AddEngine DropEngine: FleetAnswered, ListEngines: EnginesListed
"""

import enum

import msgspec

from rollmesh.wire.header import Message


class EnginePhase(enum.StrEnum):
    """JOINING -> READY <-> UPDATING; READY, JOINING, FENCED -> ASLEEP -> JOINING; any -> FENCED ->
    JOINING; READY, JOINING -> DRAINING -> GONE; any -> GONE"""

    JOINING = "joining"
    READY = "ready"
    UPDATING = "updating"
    ASLEEP = "asleep"
    FENCED = "fenced"
    GONE = "gone"
    DRAINING = "draining"
    """The engine gets no new requests, and is removed when its running ones have ended."""


class EngineRow(msgspec.Struct, frozen=True, array_like=True):
    """One engine in the fleet table."""

    url: str
    incarnation: str
    """Changes when the server behind `url` restarts."""
    phase: EnginePhase
    policy_version: int
    """Publish sequence number of its weights; -1 while unknown."""
    num_running: int = 0
    num_waiting: int = 0
    detail: str = ""
    """Why it is not READY, in one line."""
    adapter: str = ""
    """Adapter that requests must name to get the weights of this version, if any."""
    max_running: int = 0
    """Requests that it runs at a time, over all of its ranks; 0 if it does not report it."""


class FleetChanged(Message, frozen=True, tag="fleet_changed"):
    epoch: int
    """Grows with each change but of loads; an older table never replaces a newer one of the same
    router."""
    engines: tuple[EngineRow, ...]
    published: int = -1
    """Version that a publisher published last. It is older than one that a session has seen if a
    new run counts from the start again; -1 if none was published since the router started."""
    has_publisher: bool = True
    """Whether a publisher numbers these weights, so that a session never moves to an older version.
    False if engines number them as they like, and a version is a preference."""


class EnginesChanged(Message, frozen=True, tag="engines_changed"):
    """The rows that changed since an earlier epoch; a worker with an older table asks for all."""

    epoch: int
    since: int
    """Epoch of the table that these changes complete; a newer one may have some of them."""
    engines: tuple[EngineRow, ...]
    removed: tuple[str, ...] = ()
    """URLs that are no longer in the table."""
    published: int = -1
    has_publisher: bool = True


class LoadsChanged(Message, frozen=True, tag="loads_changed"):
    """Loads (requests that run or wait) that moved noticeably, each second."""

    epoch: int
    """Epoch of the table to which the places belong."""
    places: tuple[int, ...] = ()
    """Places of the engines in the table sorted by URL; empty: all of them, or none."""
    loads: tuple[int, ...] = ()


class TableDigest(Message, frozen=True, tag="table_digest"):
    """All loads, and a checksum by which a worker knows that its table is right."""

    epoch: int
    checksum: int
    """CRC-32 of the table without loads; see engine/table_sync.py."""
    loads: tuple[int, ...] = ()
    """In the order of the URLs."""


TableMessage = FleetChanged | EnginesChanged | LoadsChanged | TableDigest


class AskTable(Message, frozen=True, tag="ask_table"):
    """From a worker that missed a change; the answer is a FleetChanged."""


class PublisherLeft(Message, frozen=True, tag="publisher_left"):
    """The publisher has ended: its versions and leases no longer exclude another."""


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
    """Name of the run, common to all its incarnations, of which one runs at a time; '' for none."""


class FinishUpdate(Message, frozen=True, tag="finish_update"):
    ask_id: int
    url: str
    policy_version: int
    ok: bool
    detail: str = ""
    adapter: str = ""
    """Adapter that requests must name from now on; see EngineRow."""


class SleepEngine(Message, frozen=True, tag="sleep_engine"):
    """Stop sending requests there until WakeEngine; an engine that is not in the table joins
    asleep."""

    ask_id: int
    url: str
    lease_s: float
    """Time after which the table shows the lease as lapsed; the engine stays asleep."""


class WakeEngine(Message, frozen=True, tag="wake_engine"):
    """The engine has its memory, and verified weights of that version."""

    ask_id: int
    url: str
    policy_version: int
    adapter: str = ""
    """Adapter of these weights; see EngineRow."""


class FenceEngine(Message, frozen=True, tag="fence_engine"):
    ask_id: int
    url: str
    policy_version: int
    """Version whose samples did not match the weights; under another it may be sound."""
    detail: str


class RemoveEngine(Message, frozen=True, tag="remove_engine"):
    ask_id: int
    url: str


class AddEngine(Message, frozen=True, tag="add_engine"):
    """Add an engine of any host, until it is dropped; the publisher updates it before it serves."""

    ask_id: int
    url: str
    is_launched: bool = False
    """Whether launch has started it with weights of this mesh and names it to each router: then the
    version that it reports counts, and it is an engine of the configuration."""


class DropEngine(Message, frozen=True, tag="drop_engine"):
    """Remove an engine, which does not join again until it is added."""

    ask_id: int
    url: str
    drains: bool = False
    """Whether its running requests may end there; otherwise they are resumed elsewhere."""
    force: bool = False
    """Whether the last engine may be removed."""
    is_launched: bool = False
    """Whether launch reports that nothing runs there any more: then the address is not kept out."""


class ListEngines(Message, frozen=True, tag="list_engines"):
    ask_id: int


class EngineOrigin(enum.StrEnum):
    """How an engine became one of the mesh."""

    CONFIGURED = "configured"
    ADDED = "added"
    """By the operator."""
    JOINED = "joined"
    """By a message from a host in engine.allow_hosts."""


class EnginesListed(Message, frozen=True, tag="engines_listed"):
    ask_id: int
    engines: tuple[EngineRow, ...]
    origins: tuple[EngineOrigin, ...]
    """By the position of the engine."""
    is_kept: bool = False
    """Whether a restarted router knows of the operator's changes."""
    has_publisher: bool = False
    """Whether a publisher is expected to update engines."""
    model: str = ""
    """The mesh's model folder or model id, '' if the router was not given one."""
    max_context_tokens: int = 0
    """Context length of the mesh's calls; 0 if the router does not know it."""


class ReadFleet(Message, frozen=True, tag="read_fleet"):
    ask_id: int
    policy_version: int = -1
    """Version that the asking publisher is publishing: joining engines with older weights wait for
    it, even before any engine has it. -1 from all others."""


class FleetAnswered(Message, frozen=True, tag="fleet_answered"):
    ask_id: int
    ok: bool
    error: str
    epoch: int
    engines: tuple[EngineRow, ...]
    superseded_by: int = -1
    """Version that another running publisher has published, if that is why the request was refused;
    -1 if that publisher may have been killed, so that a later request is decided again."""


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

OperatorAsk = AddEngine | DropEngine | ListEngines
