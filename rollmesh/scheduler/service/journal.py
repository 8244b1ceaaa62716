"""The scheduler's journal: its records in an SQLite file with a write-ahead log, and the past.

    <table>   one for each of records.TABLES: key, raw (the record, msgpack)
    history   at_s, gpu, pipeline_id, cluster, rank, phase: who stood where, the newest rows of it

Invariants: `keep` is one transaction, on the disk when it returns (synchronous = FULL: also a
machine that loses power finds it); one process at a time has a journal; its folder is 0700 and its
files are 0600, so that only its own user reads it.
"""

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from rollmesh.core.errors import ConfigError, JournalDamaged, JournalError
from rollmesh.core.file_modes import make_folder
from rollmesh.scheduler.service.actions import Drop, Happened, Put, Row
from rollmesh.scheduler.service.records import TABLES, Revived

FILE_NAME = "scheduler.sqlite"
LOCK_NAME = "scheduler.lock"
SCHEMA = 1
"""Raised when a record changes other than by a field with a default."""
_DISK = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR})
"""What is the disk's fault."""
MAX_HISTORY = 1_000_000
"""Rows of the past; about 100 MB."""
PRUNE_EVERY = 10_000


class Journal:
    """See the module."""

    def __init__(self, folder: Path, max_history: int = MAX_HISTORY) -> None:
        """Open or make it; ConfigError where another process has it, or it cannot be made,
        JournalDamaged where it is none, JournalError where the disk is full.
        """
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
            told = "another scheduler has this journal; end it, or name another folder"
            raise ConfigError(f"journal = {folder}: {told}") from None
        self._path = folder / FILE_NAME
        _make_private(self._path)
        try:
            self._database = sqlite3.connect(self._path, isolation_level=None)
        except sqlite3.Error as error:
            os.close(self._lock)
            raise JournalDamaged(f"{self._path} is no scheduler's journal: {error}") from None
        try:
            self._open()
        except sqlite3.Error as error:
            self.close()
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DISK:
                raise JournalError(f"{self._path} cannot be written: {error}") from None
            raise JournalDamaged(f"{self._path} is no scheduler's journal: {error}") from None

    def load(self) -> Revived | None:
        """What a life before has left, if there was one."""
        try:
            tables = {
                table: dict(self._database.execute(f"SELECT key, raw FROM {table} ORDER BY rowid"))
                for table in TABLES
            }
        except sqlite3.Error as error:
            raise JournalDamaged(f"{self._path} cannot be read: {error}") from None
        return Revived(tables) if any(tables.values()) else None

    def keep(self, rows: Iterable[Row]) -> None:
        """All of them, or JournalError and none."""
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
        """Let another have it. Idempotent."""
        self._database.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _open(self) -> None:
        database = self._database
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        (fault,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if fault != "ok":  # else it would be found when something is to be written
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
            case Put(table, key, raw):
                assert table in TABLES
                database.execute(
                    f"INSERT INTO {table} VALUES (?, ?) "
                    "ON CONFLICT (key) DO UPDATE SET raw = excluded.raw",
                    (key, raw),
                )
            case Drop(table, key):
                assert table in TABLES
                database.execute(f"DELETE FROM {table} WHERE key = ?", (key,))
            case Happened():
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
    """Make the file 0600 before SQLite does, and those beside it, which take its mode.

    What cannot be done here is reported by SQLite.
    """
    for each in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if each == path else 0)
        with contextlib.suppress(OSError):
            descriptor = os.open(each, flags, 0o600)
            try:
                os.fchmod(descriptor, 0o600)
            finally:
                os.close(descriptor)
