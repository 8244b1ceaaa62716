"""The simulated scheduler's disk: rows kept over deaths, and a look at its history.

Invariants: a transaction is kept whole or not at all; time does not run back in what happened.
Driven by scheduler.py and stage.py.
"""

from rollmesh.scheduler.service.records import HistoryRow, JournalTables, WriteRows


class SimDisk:
    """See the module."""

    def __init__(self) -> None:
        self._kept = JournalTables()
        self._last_s = float("-inf")

    def keep(self, write: WriteRows) -> None:
        self._kept.keep(write.rows)
        for row in write.rows:
            if isinstance(row, HistoryRow):
                assert row.at_s >= self._last_s, "history runs back"
                self._last_s = row.at_s

    def load(self) -> JournalTables | None:
        """What a new life begins with; None for the first."""
        tables = {table: dict(rows) for table, rows in self._kept.tables.items()}
        return JournalTables(tables) if tables else None

    def num_rows(self, table: str) -> int:
        return len(self._kept.tables.get(table, {}))
