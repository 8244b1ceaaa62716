"""Journal of the scheduler: an SQLite file with a write-ahead log, and the state restored from it.

    <table>   one for each of state.TABLES: key, raw (the record, msgpack)
    history   at_s, gpu, pipeline_id, cluster, rank, phase: use of the GPUs, newest rows only

- `keep` is one transaction, on disk when it returns (synchronous = FULL: it survives a power loss).
- One process at a time opens a journal. Its folder is 0700 and its files are 0600.
- Ownership and occupancy follow from the rows alone: a worker that was ordered to wake occupies its
  GPUs, one that was only promised does not. What is not journalled (routes, heartbeats) counts from
  the first step.
"""

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

from rollmesh.core.errors import ConfigError, JournalDamaged, JournalError
from rollmesh.core.files import make_folder
from rollmesh.scheduler.planning.state import (
    FIXED,
    OWNING_PHASES,
    RESTING_PHASES,
    ClusterRequest,
    Owner,
    PipelineState,
)
from rollmesh.scheduler.service.state import (
    TABLES,
    AnswerRecord,
    CoordinatorLink,
    CounterRecord,
    CreditRecord,
    DemandRecord,
    DropRow,
    HistoryRow,
    HoldRecord,
    Intent,
    IntentKind,
    IntentPhase,
    JournalTables,
    NodeRecord,
    PipelineRecord,
    ProgressRecord,
    PutRow,
    ReplyTarget,
    Row,
    SchedulerState,
    TicketRecord,
    WorkerRecord,
)
from rollmesh.wire.scheduling import GENERATION_CLUSTER

FILE_NAME = "scheduler.sqlite"
LOCK_NAME = "scheduler.lock"
SCHEMA = 1
"""Raised when a record changes other than by a field with a default."""
_DISK = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR})
"""SQLite errors caused by the disk."""
MAX_HISTORY = 1_000_000
"""Rows of history; about 100 MB."""
PRUNE_EVERY = 10_000


class SqliteJournal:
    def __init__(self, folder: Path, max_history: int = MAX_HISTORY) -> None:
        """Open or create it; ConfigError if another process has it or it cannot be created,
        JournalDamaged if it is not a journal, JournalError if the disk is full."""
        self._max_history = max_history
        self._num_unpruned = 0
        try:
            make_folder(folder, "private")
            self._lock = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            why = str(error.strerror).lower()
            raise ConfigError(f"journal = {folder}: {why}; name another folder") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(
                f"journal = {folder}: another scheduler uses it; stop it or name another folder"
            ) from None
        self._path = folder / FILE_NAME
        _make_private(self._path)
        try:
            self._database = sqlite3.connect(self._path, isolation_level=None)
        except sqlite3.Error as error:
            os.close(self._lock)
            raise JournalDamaged(f"{self._path} is not a scheduler's journal: {error}") from None
        try:
            self._open()
        except sqlite3.Error as error:
            self.close()
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DISK:
                raise JournalError(f"{self._path} cannot be written: {error}") from None
            raise JournalDamaged(f"{self._path} is not a scheduler's journal: {error}") from None

    def load(self) -> JournalTables | None:
        """Return the rows of an earlier process, if there was one."""
        try:
            tables = {
                table: dict(self._database.execute(f"SELECT key, raw FROM {table} ORDER BY rowid"))
                for table in TABLES
            }
        except sqlite3.Error as error:
            raise JournalDamaged(f"{self._path} cannot be read: {error}") from None
        return JournalTables(tables) if any(tables.values()) else None

    def keep(self, rows: Iterable[Row]) -> None:
        """Store all of the rows, or raise JournalError and store none."""
        try:
            self._database.execute("BEGIN IMMEDIATE")
            for row in rows:
                self._do(row)
            self._prune()
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise JournalError(f"{self._path} cannot be written: {error}") from None

    def close(self) -> None:
        """Release the journal. Idempotent."""
        self._database.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _open(self) -> None:
        database = self._database
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        (fault,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if fault != "ok":  # otherwise damage shows only on a later write
            raise sqlite3.DatabaseError(str(fault).replace("\n", " "))
        (schema,) = database.execute("PRAGMA user_version").fetchone()
        if schema not in (0, SCHEMA):
            raise sqlite3.DatabaseError(f"its schema is {schema}, ours {SCHEMA}")
        for table in TABLES:
            database.execute(
                f"CREATE TABLE IF NOT EXISTS {table} (key TEXT PRIMARY KEY, raw BLOB NOT NULL)"
            )
        database.execute(
            "CREATE TABLE IF NOT EXISTS history (at_s REAL, gpu INTEGER, pipeline_id TEXT, "
            "cluster TEXT, rank INTEGER, phase TEXT)"
        )
        database.execute(f"PRAGMA user_version = {SCHEMA}")

    def _do(self, row: Row) -> None:
        database = self._database
        match row:
            case PutRow(table, key, raw):
                assert table in TABLES
                database.execute(
                    f"INSERT INTO {table} VALUES (?, ?) "
                    "ON CONFLICT (key) DO UPDATE SET raw = excluded.raw",
                    (key, raw),
                )
            case DropRow(table, key):
                assert table in TABLES
                database.execute(f"DELETE FROM {table} WHERE key = ?", (key,))
            case HistoryRow():
                database.execute(
                    "INSERT INTO history VALUES (?, ?, ?, ?, ?, ?)",
                    (row.at_s, row.gpu, row.pipeline_id, row.cluster, row.rank, row.phase),
                )
                self._num_unpruned += 1

    def _prune(self) -> None:
        if self._num_unpruned < min(PRUNE_EVERY, self._max_history):
            return
        self._num_unpruned = 0
        self._database.execute(
            "DELETE FROM history WHERE rowid <= (SELECT MAX(rowid) FROM history) - ?",
            (self._max_history,),
        )


def _make_private(path: Path) -> None:
    """Create the file as 0600 before SQLite does, and the files beside it, which take its mode.

    Errors here are ignored: SQLite reports them.
    """
    for each in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if each == path else 0)
        with contextlib.suppress(OSError):
            descriptor = os.open(each, flags, 0o600)
            try:
                os.fchmod(descriptor, 0o600)
            finally:
                os.close(descriptor)


def restore_state(state: SchedulerState, tables: JournalTables) -> SchedulerState:
    """Fill an empty state from the journal."""
    for numbers in tables.read("numbers", CounterRecord):
        for field in numbers.__struct_fields__:
            setattr(state.numbers, field, getattr(numbers, field))
    state.numbers.num_incarnations += 1
    state.now_s = state.fleet.now_s = state.numbers.now_s
    for credits in tables.read("credits", CreditRecord):
        state.credits.credited_s, state.credits.gpu_s = credits.credited_s, credits.gpu_s
    state.fleet.credited_s = state.credits.credited_s
    state.mark("numbers", "1")
    _nodes(state, tables)
    _pipelines(state, tables)
    _asks(state, tables)
    _owners(state)
    state.wants_plan = True
    return state


def _nodes(state: SchedulerState, tables: JournalTables) -> None:
    for machine in sorted(tables.read("nodes", NodeRecord), key=lambda each: each.node.gpus):
        state.node_records[machine.node.name] = machine
        state.fleet.add_node(machine.node)


def _pipelines(state: SchedulerState, tables: JournalTables) -> None:
    for record in sorted(tables.read("pipelines", PipelineRecord), key=lambda each: each.seq):
        name = record.pipeline_id
        pipeline = state.fleet.add_pipeline(record.spec)
        pipeline.phase, pipeline.waiting_s = record.phase, record.waiting_s
        pipeline.credit_gpu_s = state.credits.gpu_s.get(name, 0.0)
        if record.releasing:
            pipeline.releasing[GENERATION_CLUSTER] = record.releasing
        state.pipeline_records[name] = record
        state.links[name] = CoordinatorLink(last_seen_s=0.0)
    for engine in tables.read("workers", WorkerRecord):
        worker = state.fleet.pipelines[engine.pipeline_id].workers[engine.rank]
        worker.phase, worker.epoch, worker.since_s = engine.phase, engine.epoch, engine.since_s
    for pipeline in state.fleet.pipelines.values():
        state.fleet.recount_workers(pipeline)
    for held in sorted(tables.read("holds", HoldRecord), key=lambda each: each.hold.since_s):
        state.fleet.pipelines[held.pipeline_id].holds[held.hold.cluster] = held.hold
    for demand in tables.read("demands", DemandRecord):
        state.demand_records[demand.pipeline_id] = demand
        pipeline = state.fleet.pipelines[demand.pipeline_id]
        pipeline.demand, pipeline.demand_history = demand.demand, demand.demand_history
    for stream in tables.read("progress", ProgressRecord):
        state.fleet.pipelines[stream.pipeline_id].progress[stream.stream] = stream.progress


def _asks(state: SchedulerState, tables: JournalTables) -> None:
    requests = sorted(tables.read("requests", ClusterRequest), key=lambda each: each.seq)
    state.fleet.requests.update((each.key, each) for each in requests)
    for ticket in sorted(tables.read("tickets", TicketRecord), key=lambda each: each.asked_s):
        state.tickets[ticket.key] = ticket
        state.reply_targets[ticket.key] = ReplyTarget(b"", 0.0)
        if ticket.is_open:
            line = state.queue.setdefault((ticket.pipeline_id, ticket.cluster), {})
            line[ticket.key] = None
    for intent in sorted(tables.read("intents", Intent), key=lambda each: each.intent_id):
        state.intents[intent.intent_id] = intent
    ended = sorted(tables.read("ended", Intent), key=lambda each: (each.ended_s, each.intent_id))
    state.ended.update((each.intent_id, each) for each in ended)
    state.answers.update((each.key, each) for each in tables.read("answers", AnswerRecord))


def _owners(state: SchedulerState) -> None:
    """Restore ownership and occupancy."""
    promised = {
        (each.pipeline_id, each.cluster, each.rank)
        for each in state.intents.values()
        if each.kind is not IntentKind.SLEEP and each.phase is IntentPhase.PLANNED
    }
    for name, pipeline in state.fleet.pipelines.items():
        for owner, gpus, owns, occupies in _claims(name, pipeline):
            if owns:
                state.fleet.owners.update(dict.fromkeys(gpus, owner))
            if occupies and owner not in promised:
                state.occupants.update(dict.fromkeys(gpus, owner))


def _claims(
    name: str, pipeline: PipelineState
) -> Iterator[tuple[Owner, tuple[int, ...], bool, bool]]:
    """Owners with their GPUs: whether each owns them, and occupies them unless they are only
    promised."""
    for cluster in pipeline.holds:
        yield Owner(name, cluster, FIXED), pipeline.spec.clusters[cluster], True, True
    for worker in pipeline.workers:
        owner = Owner(name, GENERATION_CLUSTER, worker.rank)
        owns = worker.phase in OWNING_PHASES
        yield owner, worker.gpus, owns, worker.phase not in RESTING_PHASES
