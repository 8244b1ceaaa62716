"""Scheduler state: everything the machine knows, its journal records, its settings, and the actions
that each step returns.

- A step returns at most one WriteRows, and it comes first. The process carries out nothing else
  before the rows are stored, all or none. A Send may be lost.
- GPU ownership and use follow from the records alone. Changed records are marked and read at the
  end of the step, so that a row is what the machine knows.
- No two owners occupy a GPU at once. An open ticket is in `queue` under its cluster.

    ticket   QUEUED -> GRANTED -> RELEASED;  QUEUED -> REFUSED | WITHDRAWN
             of a fixed cluster QUEUED -> OFFERED -> GRANTED
             WITHDRAWN because it expired -> QUEUED, when it is renewed after all
    intent   PLANNED -> SENT -> ACKED -> COMMITTED | FAILED
             a grant, and an intent that is called off: PLANNED -> COMMITTED | FAILED

An intent is PLANNED while its GPUs are in use or its coordinator is busy, SENT with an epoch and a
deadline, and ACKED when its coordinator reports it done, which commits it in the same step.
"""

import enum
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from rollmesh.core.errors import DECODE_ERRORS, JournalDamaged
from rollmesh.scheduler.planning.state import (
    FIXED,
    ClusterRequest,
    Demand,
    DemandHistory,
    FleetState,
    GpuHold,
    GpuNode,
    Owner,
    PipelinePhase,
    StreamProgress,
)
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.messages import AnyMessage
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


MAX_S = 1e6
Span = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_S)]
Second = Annotated[float, msgspec.Meta(ge=1.0, le=MAX_S)]
Beats = Annotated[float, msgspec.Meta(ge=2.0, le=MAX_S)]
"""At least two intervals of a peer that sends each second."""
Tick = Annotated[float, msgspec.Meta(ge=0.01, le=10.0)]


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts of the service; the fleet file's [service] table overrides them within these
    ranges."""

    patience_s: Beats = 15.0
    """A queued request or an offer that is not renewed for this long is withdrawn."""
    memory_s: Beats = 600.0
    """Ended requests are remembered for this long, for late repeats."""
    resize_deadline_s: Second = 120.0
    """Time for engines to wake, which includes loading weights; then the resize has failed."""
    sleep_deadline_s: Second = 45.0
    """Time for engines to go to sleep; no more than resize_deadline_s."""
    slack_s: Span = 5.0
    """Extra time for the answer of a resize to arrive."""
    turn_s: Second = 10.0
    """Resizes of a pipeline are done one after another, but the next waits no longer than this for
    the previous one; slower engines continue on their own."""
    join_s: Second = 600.0
    """An engine that has not started this long after its run began is a fault."""
    coordinator_grace_s: Beats = 15.0
    """A pipeline is quarantined if its coordinator is silent for this long."""
    node_grace_s: Beats = 15.0
    """A node with heartbeats is DOWN after this long without one."""
    settle_s: Span = 3.0
    """After a restart nothing is planned for this long, unless all coordinators have reported."""
    retry_s: Second = 1.0
    """Minimum time in quarantine, doubled by each fault."""
    max_retry_s: Second = 60.0
    """Maximum time in quarantine before another attempt."""
    stall_s: Second = 30.0
    """A rollout without progress for this long is logged."""
    progress_plan_s: Span = 0.25
    """Progress reports alone trigger at most one plan in this time."""
    tick_s: Tick = 0.25
    """Interval of time-based checks."""


FREE, HELD = "free", "held"
"""Phases of a GPU beside those of a worker."""
MAX_PROBLEMS = 20
MAX_WAITS = 10_000

_encode = msgspec.msgpack.Encoder().encode


class CoordinatorLink(msgspec.Struct, kw_only=True):
    """Connection to a pipeline's coordinator in this incarnation of the scheduler."""

    last_seen_s: float
    route: bytes = b""
    is_known: bool = False
    """The coordinator has reported all of its workers."""
    doubt_s: float | None = None
    """Since when its reports do not match the orders sent to it."""
    retry_s: float = 0.0
    """Earliest end of quarantine."""
    progressed_s: float = 0.0
    is_stalled: bool = False
    """The lack of progress was logged."""
    bucket: int = -1
    """Progress bucket at the last plan it requested."""


class ReplyTarget(msgspec.Struct):
    """Client that waits for an answer."""

    route: bytes
    last_seen_s: float


class SchedulerState:
    def __init__(self, settings: SchedulerSettings, incarnation: str) -> None:
        self.settings = settings
        self.incarnation = incarnation
        self.now_s = 0.0
        self.fleet = FleetState()
        self.numbers = CounterRecord()
        self.credits = CreditRecord()
        self.pipeline_records: dict[str, PipelineRecord] = {}
        self.links: dict[str, CoordinatorLink] = {}
        self.tickets: dict[str, TicketRecord] = {}
        self.reply_targets: dict[str, ReplyTarget] = {}
        self.queue: dict[tuple[str, str], dict[str, None]] = {}
        """By pipeline and cluster, keys of open tickets in order of arrival."""
        self.intents: dict[int, Intent] = {}
        """In progress."""
        self.ended: dict[int, Intent] = {}
        """The newest ended intents, for explanations only."""
        self.occupants: dict[int, Owner] = {}
        """By GPU, its actual user."""
        self.demand_records: dict[str, DemandRecord] = {}
        self.node_records: dict[str, NodeRecord] = {}
        self.nodes_seen_s: dict[str, float] = {}
        self.answers: dict[str, AnswerRecord] = {}
        self.wants_plan = False
        self.planned_s = float("-inf")
        """Time of the last plan."""
        self.again_s = float("inf")
        """When the next plan is due without an event."""
        self.problems: list[str] = []
        """Problems of the service itself, newest last."""
        self.counts: Counter[str] = Counter()
        self.waits_s: deque[float] = deque(maxlen=MAX_WAITS)
        """Time from request to grant, of the newest grants."""
        self._tables: dict[str, Mapping[Any, object]] = {
            "nodes": self.node_records,
            "requests": self.fleet.requests,
            "demands": self.demand_records,
            "tickets": self.tickets,
            "intents": self.intents,
            "ended": self.ended,
            "answers": self.answers,
            "numbers": {"1": self.numbers},
            "credits": {"1": self.credits},
        }
        self._dirty: dict[tuple[str, tuple[str | int, ...]], None] = {}
        self._history: list[HistoryRow] = []
        self._outbox: list[Send | LogLine] = []

    # results of a step

    def send(self, route: bytes, message: AnyMessage, body: bytes = b"") -> None:
        if route:
            self._outbox.append(Send(route, message, body))

    def log(self, event: str, pipeline_id: str, detail: str, is_warning: bool = True) -> None:
        self.counts[event] += 1
        self._outbox.append(LogLine(event, pipeline_id, detail, is_warning))

    def report_problem(self, detail: str) -> None:
        """Log a fault of the service that it survives; a repeated one is logged once."""
        if self.problems[-1:] == [detail]:
            self.counts["scheduler.failed"] += 1
            return
        self.problems = [*self.problems, detail][-MAX_PROBLEMS:]
        self.log("scheduler.failed", "", detail)

    def mark(self, table: str, *key: str | int) -> None:
        """Mark a record as changed, new or deleted."""
        self._dirty[table, key] = None

    def has_changed(self, quiet: frozenset[str]) -> bool:
        """Whether this step changed a record outside the `quiet` tables."""
        return any(table not in quiet for table, _ in self._dirty)

    def take_actions(self) -> list[Action]:
        """Return the actions of the step, rows first."""
        rows: list[Row] = [self._row(table, key) for table, key in self._dirty]
        rows += self._history
        if rows:
            self.numbers.now_s = self.now_s
            rows.append(self._row("numbers", ("1",)))
        actions: list[Action] = [WriteRows(tuple(rows)), *self._outbox] if rows else [*self._outbox]
        self._dirty, self._history, self._outbox = {}, [], []
        return actions

    # occupancy

    def is_clear(self, gpus: Iterable[int]) -> bool:
        return not any(gpu in self.occupants for gpu in gpus)

    def occupy(self, owner: Owner, gpus: Iterable[int], phase: str) -> None:
        """Record that the owner uses these GPUs in this phase."""
        for gpu in gpus:
            there = self.occupants.setdefault(gpu, owner)
            assert there == owner, f"GPU {gpu} is {there}'s, not {owner}'s"
            row = HistoryRow(self.now_s, gpu, owner.pipeline_id, owner.cluster, owner.rank, phase)
            self._history.append(row)

    def clear(self, owner: Owner, gpus: Iterable[int]) -> None:
        """Record that the owner no longer uses these GPUs."""
        for gpu in gpus:
            if self.occupants.get(gpu) == owner:
                del self.occupants[gpu]
                self._history.append(HistoryRow(self.now_s, gpu, "", "", owner.rank, FREE))

    # rows

    def _row(self, table: str, key: tuple[str | int, ...]) -> Row:
        name = "/".join(map(str, key))
        record = self._record(table, *key)
        return DropRow(table, name) if record is None else PutRow(table, name, _encode(record))

    def _record(self, table: str, first: str | int, second: str | int = "") -> object:
        """Current record of that key, or None."""
        if table in ("workers", "holds", "progress"):
            return self._of_pipeline(table, str(first), second)
        if table == "pipelines":
            return self._pipeline_record(str(first))
        return self._tables[table].get(first)

    def _pipeline_record(self, pipeline_id: str) -> PipelineRecord | None:
        """Record of a pipeline; fields that the planner also changes are taken from its state."""
        pipeline = self.fleet.pipelines.get(pipeline_id)
        if pipeline is None:
            return None
        record = self.pipeline_records[pipeline_id]
        record.phase, record.waiting_s = pipeline.phase, pipeline.waiting_s
        return record

    def _of_pipeline(self, table: str, pipeline_id: str, name: str | int) -> object:
        pipeline = self.fleet.pipelines.get(pipeline_id)
        if pipeline is None:
            return None
        if table == "holds":
            hold = pipeline.holds.get(str(name))
            return hold and HoldRecord(pipeline_id=pipeline_id, hold=hold)
        if table == "progress":
            progress = pipeline.progress.get(str(name))
            stream = str(name)
            return progress and ProgressRecord(
                pipeline_id=pipeline_id, stream=stream, progress=progress
            )
        worker = pipeline.workers[int(name)]
        return WorkerRecord(
            pipeline_id=pipeline_id,
            rank=worker.rank,
            phase=worker.phase,
            epoch=worker.epoch,
            since_s=worker.since_s,
        )


MAX_ENDED = 500
"""About 100 kB of journal."""
MAX_RECENT_LINES = 3
"""Per pipeline."""


def record_ended(state: SchedulerState, intent: Intent) -> None:
    """Keep an ended intent for explanations."""
    state.ended[intent.intent_id] = intent
    state.mark("ended", intent.intent_id)
    while len(state.ended) > MAX_ENDED:
        oldest = next(iter(state.ended))
        del state.ended[oldest]
        state.mark("ended", oldest)


def describe_recent(ended: Iterable[Intent], now_s: float) -> dict[str, tuple[str, ...]]:
    """Lines on the newest ended operations by pipeline, newest first."""
    lines: dict[str, list[str]] = {}
    for intent in ended:
        lines.setdefault(intent.pipeline_id, []).append(_ended_line(intent, now_s))
    return {name: tuple(reversed(each[-MAX_RECENT_LINES:])) for name, each in lines.items()}


def _ended_line(intent: Intent, now_s: float) -> str:
    what = intent.cluster if intent.rank == FIXED else f"worker {intent.rank}"
    took_s, ago_s = intent.ended_s - intent.planned_s, now_s - intent.ended_s
    why = f" ({intent.detail})" if intent.detail else ""
    return (
        f"{intent.kind} of {what} {intent.phase} {ago_s:.1f} s ago, {took_s:.1f} s after it was "
        f"planned{why}"
    )
