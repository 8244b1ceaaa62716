"""Values of the scheduler's machine: journal records and the actions that each step returns.

- A step returns at most one WriteRows, and it comes first. The process carries out nothing else
  before the rows are stored, all or none. A Send may be lost.
- GPU ownership and use follow from the records alone.

    ticket   QUEUED -> GRANTED -> RELEASED;  QUEUED -> REFUSED | WITHDRAWN
             of a fixed cluster QUEUED -> OFFERED -> GRANTED
             WITHDRAWN because it expired -> QUEUED, when it is renewed after all
    intent   PLANNED -> SENT -> ACKED -> COMMITTED | FAILED
             a grant, and an intent that is called off: PLANNED -> COMMITTED | FAILED

An intent is PLANNED while its GPUs are in use or its coordinator is busy, SENT with an epoch and a
deadline, and ACKED when its coordinator reports it done, which commits it in the same step.
"""

import enum
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from rollmesh.core.errors import DECODE_ERRORS, JournalDamaged
from rollmesh.scheduler.planning.state import (
    FIXED,
    ClusterRequest,
    Demand,
    DemandHistory,
    GpuHold,
    GpuNode,
    PipelinePhase,
    StreamProgress,
)
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.scheduling import PipelineSpec, RunClaim, TicketState, WorkerPhase


class PutRow(msgspec.Struct, frozen=True):
    """Store the record of `key` in `table`."""

    table: str
    key: str
    raw: bytes
    """The record in msgpack, encoded at once so that later changes do not affect the row."""


class DropRow(msgspec.Struct, frozen=True):
    """Delete the record."""

    table: str
    key: str


class HistoryRow(msgspec.Struct, frozen=True):
    """Use of a GPU from `at_s` until the next row of that GPU."""

    at_s: float
    gpu: int
    pipeline_id: str
    """'' if unused."""
    cluster: str
    rank: int
    """Rank of the generation worker; -1 for a fixed cluster."""
    phase: str
    """Phase of the worker; `held` by a fixed cluster; `free`."""


Row = PutRow | DropRow | HistoryRow


class WriteRows(msgspec.Struct, frozen=True):
    """Store these rows in one transaction."""

    rows: tuple[Row, ...]


class LogLine(msgspec.Struct, frozen=True):
    """Write a line to the log."""

    event: str
    """`noun.verbed`."""
    pipeline_id: str
    detail: str
    is_warning: bool = True


Event = Received | Ticked
Action = WriteRows | Send | LogLine


R = TypeVar("R", bound=msgspec.Struct)


class TicketRecord(msgspec.Struct, kw_only=True, rename={"is_expired": "is_forsaken"}):
    """A request or release with a key."""

    key: str
    pipeline_id: str
    cluster: str
    gives_up: bool = False
    """Whether this is a release, which waits for its completion, rather than a request."""
    state: TicketState = TicketState.QUEUED
    reason: str = ""
    """Why it was refused."""
    asked_s: float
    closed_s: float = 0.0
    """When it reached its final state."""
    is_expired: bool = False
    """Whether it was withdrawn because it was not renewed; a later renewal restores its place."""
    offer: int = 0
    """Number of the newest offer, if any."""

    @property
    def is_open(self) -> bool:
        return self.is_waiting or self.state is TicketState.GRANTED

    @property
    def is_waiting(self) -> bool:
        """Whether its client does not have the GPUs yet."""
        return self.state in (TicketState.QUEUED, TicketState.OFFERED)


class IntentKind(enum.StrEnum):
    SLEEP = "sleep"
    WAKE = "wake"
    GRANT = "grant"


class IntentPhase(enum.StrEnum):
    PLANNED = "planned"
    SENT = "sent"
    ACKED = "acked"
    COMMITTED = "committed"
    FAILED = "failed"


class Intent(msgspec.Struct, kw_only=True):
    """An operation in progress, of one worker or one fixed cluster."""

    intent_id: int
    kind: IntentKind
    pipeline_id: str
    cluster: str
    rank: int = FIXED
    for_: str = ""
    """Shrink.for_ of a SLEEP."""
    request: ClusterRequest | None = None
    """Request behind a GRANT; it returns to the queue if the grant cannot be carried out."""
    phase: IntentPhase = IntentPhase.PLANNED
    planned_s: float
    epoch: int = 0
    resize_id: int = 0
    """From SENT on; intents of one message share it."""
    until_s: float = float("inf")
    """From SENT on: deadline after which its pipeline is quarantined."""
    detail: str = ""
    """Why it failed."""
    ended_s: float = 0.0


class PipelineRecord(msgspec.Struct, kw_only=True, rename={"resized_ranks": "told"}):
    """Service-side state of a pipeline."""

    pipeline_id: str
    seq: int
    """Order of registration."""
    spec: PipelineSpec
    phase: PipelinePhase = PipelinePhase.REGISTERED
    releasing: str = ""
    """Key of the release of generation, until all workers are asleep."""
    waiting_s: float | None = None
    is_wired: bool = False
    """Its hooks have connected."""
    why: str = ""
    """Why it is quarantined."""
    num_faults: int = 0
    """Since the last successful resize."""
    started_s: float = 0.0
    """Start time of its coordinator."""
    resized_ranks: list[int] = []
    """Ranks that this coordinator was ordered to resize; it must know their epochs."""
    unsure: list[int] = []
    """Ranks that may still carry out an order that was not answered in time."""
    leavers: list[str] = []
    """Keys of the requests to unregister it."""
    run: RunClaim | None = None
    """The run that uses its name."""
    token_hash: str = ""
    """SHA-256 of its token, in hex; '' if it was registered without one."""


class WorkerRecord(msgspec.Struct, kw_only=True):
    pipeline_id: str
    rank: int
    phase: WorkerPhase
    epoch: int
    since_s: float


class HoldRecord(msgspec.Struct, kw_only=True):
    """A hold, kept or promised."""

    pipeline_id: str
    hold: GpuHold


class DemandRecord(msgspec.Struct, kw_only=True, rename={"demand_history": "habits"}):
    """A pipeline's demand, and what separates its progress from that of earlier demands."""

    pipeline_id: str
    demand: Demand | None = None
    step: int = -1
    """Rollout step that opened it."""
    floors: dict[str, int] = {}
    """By stream, the newest batch of earlier demands; reports of it are stale."""
    demand_history: DemandHistory = msgspec.field(default_factory=DemandHistory)


class ProgressRecord(msgspec.Struct, kw_only=True):
    pipeline_id: str
    stream: str
    progress: StreamProgress


class NodeRecord(msgspec.Struct, kw_only=True):
    """A node, and whether it sends heartbeats."""

    node: GpuNode
    beats: bool
    key: str = ""
    """Key of the request by which it joined; repeating it does not end a drain."""
    is_drained: bool = False
    """Also kept while it is DOWN: a drained node that returns stays drained."""


class AnswerRecord(msgspec.Struct, kw_only=True):
    """Answer to a request of admission or a node, which is carried out once."""

    key: str
    ok: bool
    error: str = ""
    at_s: float


class CounterRecord(msgspec.Struct, kw_only=True, rename={"num_incarnations": "num_lives"}):
    """Counters, in one row that is written with every step."""

    num_incarnations: int = 0
    now_s: float = 0.0
    """Time of the last step that wrote."""
    seq: int = 0
    intent_id: int = 0
    resize_id: int = 0
    next_gpu: int = 0


class CreditRecord(msgspec.Struct, kw_only=True):
    """Credits of the policy, in one row that is written with every plan."""

    credited_s: float = 0.0
    gpu_s: dict[str, float] = {}
    """By pipeline."""


TABLES = (
    "nodes",
    "pipelines",
    "workers",
    "holds",
    "requests",
    "demands",
    "progress",
    "tickets",
    "intents",
    "ended",
    "answers",
    "credits",
    "numbers",
)


class JournalTables(msgspec.Struct):
    """Contents of a journal by table and key."""

    tables: dict[str, dict[str, bytes]] = {}

    def keep(self, rows: Iterable[Row]) -> None:
        """Apply rows as a journal does; history is not needed for a restart."""
        for row in rows:
            if isinstance(row, PutRow):
                self.tables.setdefault(row.table, {})[row.key] = row.raw
            elif isinstance(row, DropRow):
                self.tables.get(row.table, {}).pop(row.key, None)

    def read(self, table: str, kind: type[R]) -> list[R]:
        """Return all records of a table; JournalDamaged if one cannot be decoded."""
        rows = self.tables.get(table, {})
        try:
            return [msgspec.msgpack.decode(raw, type=kind) for raw in rows.values()]
        except DECODE_ERRORS as error:
            raise JournalDamaged(f"the journal's table {table} cannot be read: {error}") from None
