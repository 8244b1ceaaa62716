"""What the scheduler must find again after its death, as values: one record for each row.

    ticket   QUEUED -> GRANTED -> RELEASED;  QUEUED -> REFUSED | WITHDRAWN
             of a fixed cluster QUEUED -> OFFERED -> GRANTED
             WITHDRAWN, since nobody said it -> QUEUED, when it is said after all
    intent   PLANNED -> SENT -> ACKED -> COMMITTED | FAILED
             a grant, and what is called off: PLANNED -> COMMITTED | FAILED

An intent is PLANNED while others stand on its GPUs, or its coordinator is busy; SENT with an epoch
and a deadline; ACKED when its coordinator has said that it is done, which commits it in that step.
Invariant: whose a GPU is, and who stands there, follows from the records alone. Driven by book.py,
which writes them, journal.py, which keeps them, and revival.py, which reads them.
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
from rollmesh.scheduler.service.actions import Drop, Put, Row
from rollmesh.wire.scheduling import PipelineSpec, RunClaim, TicketState, WorkerPhase

R = TypeVar("R", bound=msgspec.Struct)


class Ticket(msgspec.Struct, kw_only=True):
    """An ask with a key."""

    key: str
    pipeline_id: str
    cluster: str
    gives_up: bool = False
    """It is a release, and waits for its end; else a request."""
    state: TicketState = TicketState.QUEUED
    reason: str = ""
    """Why it was refused."""
    asked_s: float
    closed_s: float = 0.0
    """When it came to its last state."""
    is_forsaken: bool = False
    """It was withdrawn since nobody said it any more; who does after all has waited all along."""
    offer: int = 0
    """Number of the newest offer, if any."""

    @property
    def is_open(self) -> bool:
        return self.is_waiting or self.state is TicketState.GRANTED

    @property
    def is_waiting(self) -> bool:
        """Whoever asked does not have it yet."""
        return self.state in (TicketState.QUEUED, TicketState.OFFERED)


class IntentKind(enum.StrEnum):
    """What an op becomes."""

    SLEEP = "sleep"
    WAKE = "wake"
    GRANT = "grant"


class IntentPhase(enum.StrEnum):
    """See the module."""

    PLANNED = "planned"
    SENT = "sent"
    ACKED = "acked"
    COMMITTED = "committed"
    FAILED = "failed"


class Intent(msgspec.Struct, kw_only=True):
    """An op that is under way, of one worker or one fixed cluster."""

    intent_id: int
    kind: IntentKind
    pipeline_id: str
    cluster: str
    rank: int = FIXED
    for_: str = ""
    """Of a SLEEP, as the planner says it."""
    request: ClusterRequest | None = None
    """Of a GRANT: it waits again where the promise cannot be kept."""
    phase: IntentPhase = IntentPhase.PLANNED
    planned_s: float
    epoch: int = 0
    resize_id: int = 0
    """From SENT on: those of one message have the same."""
    until_s: float = float("inf")
    """From SENT on: its pipeline is quarantined if it is not done by then."""
    detail: str = ""
    """Why it failed."""
    ended_s: float = 0.0


class Tenant(msgspec.Struct, kw_only=True):
    """What the service knows of a pipeline, beside what the planner does."""

    pipeline_id: str
    seq: int
    """In the order of registration."""
    spec: PipelineSpec
    phase: PipelinePhase = PipelinePhase.REGISTERED
    releasing: str = ""
    """The key of who gives generation up, until all workers are asleep."""
    waiting_s: float | None = None
    is_wired: bool = False
    """Its hooks have been heard."""
    why: str = ""
    """Why it is quarantined."""
    num_faults: int = 0
    """Since its last resize that was done."""
    started_s: float = 0.0
    """Of its coordinator."""
    told: list[int] = []
    """Ranks that this coordinator has been told to resize: of these it must know the epoch."""
    unsure: list[int] = []
    """Ranks that may yet do what they were told to, though nobody answered in time."""
    leavers: list[str] = []
    """Keys of those who asked that it leaves."""
    run: RunClaim | None = None
    """The run that has its name."""
    token_hash: str = ""
    """SHA-256 of its token, in hex; '': it was registered without one."""


class Engine(msgspec.Struct, kw_only=True):
    """A worker of a pipeline."""

    pipeline_id: str
    rank: int
    phase: WorkerPhase
    epoch: int
    since_s: float


class Held(msgspec.Struct, kw_only=True):
    """A hold of a pipeline, kept or promised."""

    pipeline_id: str
    hold: GpuHold


class Wish(msgspec.Struct, kw_only=True):
    """A pipeline's demand, and what it must not be mistaken for."""

    pipeline_id: str
    demand: Demand | None = None
    step: int = -1
    """The rollout that opened it."""
    floors: dict[str, int] = {}
    """By stream, the newest batch of demands before: its news is old."""
    demand_history: DemandHistory = msgspec.field(default_factory=DemandHistory)
    """What its next demand is foreseen by."""


class Stream(msgspec.Struct, kw_only=True):
    """A stream's progress."""

    pipeline_id: str
    stream: str
    progress: StreamProgress


class Machine(msgspec.Struct, kw_only=True):
    """A node, and whether it says that it lives."""

    node: GpuNode
    beats: bool
    key: str = ""
    """Of the ask by which it joined: said again, it does not end a drain."""
    is_drained: bool = False
    """Also while it is down: who but was silent for a while is still not to be used."""


class Answer(msgspec.Struct, kw_only=True):
    """To an ask of admission or of a node, which is done once."""

    key: str
    ok: bool
    error: str = ""
    at_s: float


class Numbers(msgspec.Struct, kw_only=True):
    """What only grows, as one row, which is written with each other."""

    num_lives: int = 0
    now_s: float = 0.0
    """Of the last step that wrote."""
    seq: int = 0
    intent_id: int = 0
    resize_id: int = 0
    next_gpu: int = 0


class Credits(msgspec.Struct, kw_only=True):
    """What the policy owes whom, as one row, which is written with each plan."""

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


class Revived(msgspec.Struct):
    """What a journal holds, by table and key."""

    tables: dict[str, dict[str, bytes]] = {}

    def keep(self, rows: Iterable[Row]) -> None:
        """What a journal does with them; what happened is of no use to who rises."""
        for row in rows:
            if isinstance(row, Put):
                self.tables.setdefault(row.table, {})[row.key] = row.raw
            elif isinstance(row, Drop):
                self.tables.get(row.table, {}).pop(row.key, None)

    def read(self, table: str, kind: type[R]) -> list[R]:
        """All records of a table; JournalDamaged where one is none of ours."""
        rows = self.tables.get(table, {})
        try:
            return [msgspec.msgpack.decode(raw, type=kind) for raw in rows.values()]
        except DECODE_ERRORS as error:
            raise JournalDamaged(f"the journal's table {table} cannot be read: {error}") from None
