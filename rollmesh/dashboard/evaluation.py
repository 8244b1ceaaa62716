"""The page's view of an evaluation: its plan, its report so far, and its failed rollouts.

- The rows of results.jsonl are held, since the report is over all of them.
- A resumed evaluation replaces the file; the rows are then read again from its start.
"""

from pathlib import Path
from typing import Any

import msgspec

from rollmesh.core.types import TRAINED_OUTCOMES
from rollmesh.dashboard.rowfile import RowFile
from rollmesh.dashboard.rows import FailedRow
from rollmesh.serve.client.evaluation_files import PLAN, RESULTS, Plan, Row
from rollmesh.serve.client.scores import report_of

MAX_FAILED = 20
"""Failed rollouts that the page lists, the latest."""


def is_evaluation(folder: Path) -> bool:
    """Whether the folder is that of an evaluation."""
    return (folder / PLAN).is_file()


class EvalView:
    """One evaluation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = RowFile(folder / RESULTS, Row)
        self._rows: list[Row] = []
        self._num_restarts = 0
        self._plan: Plan | None = None

    @property
    def num_bad_lines(self) -> int:
        return self._file.num_bad_lines

    @property
    def num_rows(self) -> int:
        """Rollouts that have ended, with a result or without."""
        return len(self._rows)

    def read(self) -> bool:
        """Read what is new; whether there was anything."""
        rows = self._file.read()
        is_new = self._plan is None or bool(rows)
        if self._file.num_restarts != self._num_restarts:
            self._num_restarts, self._rows = self._file.num_restarts, []
        self._rows += rows
        if self._plan is None:
            self._plan = _plan_in(self._folder)
        return is_new and self._plan is not None

    def picture(self, pass_threshold: float | None) -> dict[str, Any] | None:
        """All that the page shows; None while the plan cannot be read."""
        if self._plan is None:
            return None
        failed = [row for row in self._rows if row.outcome not in TRAINED_OUTCOMES]
        return {
            "split": self._plan.split,
            "model": self._plan.model,
            "num_samples": self._plan.num_samples,
            "num_wanted": self._plan.num_tasks * self._plan.num_samples,
            "num_rows": self.num_rows,
            "report": msgspec.to_builtins(report_of(self._rows, pass_threshold), str_keys=True),
            "failed": [_failed(row) for row in failed[: -MAX_FAILED - 1 : -1]],
        }


def _plan_in(folder: Path) -> Plan | None:
    try:
        return msgspec.json.decode((folder / PLAN).read_bytes(), type=Plan)
    except (OSError, msgspec.MsgspecError):
        return None


def _failed(row: Row) -> FailedRow:
    rollout_id = f"{row.group_id}/{row.index}"
    place = str(row.place) if row.place else ""
    return FailedRow(rollout_id, row.task_id, row.outcome, row.error, place)
