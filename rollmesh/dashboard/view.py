"""The state that the dashboard shows, folded from the lines of a run's files.

- Its size does not grow with the run: series are thinned, tables hold the latest rows.
- Pure: no file and no clock; core/run_state.py derives the state of the run.
"""

from collections import Counter, deque
from typing import Any

import msgspec

from rollmesh.core.run_state import RunRecord, RunStatus, status_of
from rollmesh.core.types import Outcome
from rollmesh.dashboard.rows import (
    ConfigRow,
    DroppedRollout,
    FailedRow,
    RouterRow,
    StepRow,
    TelemetryRow,
)
from rollmesh.wire.worker_report import worker_table

Numbers = dict[str, float]


class Series:
    """Rows of named numbers for a plot, in time order, thinned so that any run fits in bounded
    memory.

    When `max_rows` rows are held, neighbours are joined into their means, and from then on each row
    is the mean of twice as many.
    """

    def __init__(self, max_rows: int = 1000, max_names: int = 64) -> None:
        """`max_rows` must be even."""
        assert max_rows % 2 == 0
        self.num_thinnings = 0
        """Grows when old rows changed; copies must then be replaced."""
        self._rows: list[Numbers] = []
        self._waiting: list[Numbers] = []
        self._names: set[str] = set()
        self._max_rows = max_rows
        self._max_names = max_names

    def append(self, row: Numbers) -> Numbers | None:
        """Add a row; return the row that a plot gains, or None while it waits to be joined."""
        self._waiting.append(self._known_names(row))
        if len(self._waiting) < 2**self.num_thinnings:
            return None
        joined = mean_of(self._waiting)
        self._waiting = []
        self._rows.append(joined)
        if len(self._rows) == self._max_rows:
            self._rows = [mean_of(self._rows[at : at + 2]) for at in range(0, self._max_rows, 2)]
            self.num_thinnings += 1
        return joined

    def rows(self) -> list[Numbers]:
        """Return the plot's rows, oldest first."""
        return list(self._rows)

    def _known_names(self, row: Numbers) -> Numbers:
        for name in row:
            if len(self._names) < self._max_names:
                self._names.add(name)
        return {name: value for name, value in row.items() if name in self._names}


def mean_of(rows: list[Numbers]) -> Numbers:
    """Return the mean by name, over the rows that have it.

    >>> mean_of([{"a": 1.0}, {"a": 3.0, "b": 5.0}])
    {'a': 2.0, 'b': 5.0}
    """
    names = {name: None for row in rows for name in row}
    means = {}
    for name in names:
        values = [row[name] for row in rows if name in row]
        means[name] = sum(values) / len(values)
    return means


PLOTTED = (
    "time_s",
    "step",
    "policy_version",
    "success",
    "reward",
    "loss",
    "entropy",
    "max_age",
    "frac_equal_groups",
)
MAX_KINDS, OTHER_KINDS = 32, "other"
"""Limit on the kinds of reasons for which rollouts did not train."""
MAX_FAILED = 20
"""Number of failed rollouts that the page lists, the latest ones."""
FAILED = (Outcome.AGENT_ERROR, Outcome.INFRA_ERROR)
RECENT_STEPS = 20
"""Number of steps in the second set of bars of the staleness histogram."""


class RunView:
    """The state of one run."""

    def __init__(self) -> None:
        self.config = ConfigRow()
        self.reward_untrained: float | None = None
        self.success_untrained: float | None = None
        self.record: RunRecord | None = None
        self.eval_name = ""
        """Name of the evaluation; '' for a training run."""
        self.num_bad_lines = 0
        self.steps = Series(max_names=96)
        self.telemetry = Series(max_names=96)
        self._ages: Counter[str] = Counter()
        self._recent_ages: list[dict[str, int]] = []
        self._drops: Counter[str] = Counter()
        self._failed: deque[FailedRow] = deque(maxlen=MAX_FAILED)
        self._last_step: StepRow | None = None
        self._first_time_s: float | None = None
        self.last_telemetry: TelemetryRow | None = None

    def add_step(self, row: StepRow) -> Numbers | None:
        """Fold a line of metrics.jsonl; return the row that the plots gain, if any."""
        if row.reward_untrained is not None:
            self.reward_untrained = row.reward_untrained
            self.success_untrained = row.success_untrained
        if row.step is None or row.step < 0:
            return None
        self._last_step = row
        self._note_time(row.time_s)
        self._ages.update(row.age_histogram)
        self._recent_ages = [*self._recent_ages[1 - RECENT_STEPS :], row.age_histogram]
        values = {name: getattr(row, name) for name in PLOTTED}
        values |= {f"env/{name}": value for name, value in row.metrics.items()}
        return self.steps.append({name: v for name, v in values.items() if v is not None})

    def add_telemetry(self, row: TelemetryRow) -> Numbers | None:
        """Fold a line of telemetry.jsonl; return the row that the process plots gain, if any."""
        numbers: Numbers = {"time_s": row.time_s}
        if row.router:
            before = self.last_telemetry
            numbers["in_flight"] = sum(worker.in_flight for worker in row.router.workers)
            if before and before.router and row.time_s > before.time_s:
                elapsed_s = row.time_s - before.time_s
                gained = gains(before.router, row.router)
                numbers |= {name: count / elapsed_s for name, count in gained.items()}
        for process in row.processes:
            numbers[f"rss/{process.role}"] = process.rss_bytes
        self._note_time(row.time_s)
        self.last_telemetry = row
        return self.telemetry.append(numbers)

    def add_drop(self, row: DroppedRollout) -> None:
        """Count rollouts that did not train; the part before a colon names the reason's kind."""
        kind = row.reason.partition(":")[0]
        is_known = kind in self._drops or len(self._drops) < MAX_KINDS
        self._drops[kind if is_known else OTHER_KINDS] += row.num_rollouts
        if row.outcome in FAILED:
            rollout_id = f"{row.group_id}/{row.index}"
            place = str(row.place) if row.place else ""
            self._failed.append(
                FailedRow(rollout_id, row.task_id, row.outcome, row.error or row.reason, place)
            )

    def status(self, unix_s: float) -> RunStatus:
        """Return the state of the run at `unix_s`."""
        seen = [row.time_s for row in (self.last_telemetry, self._last_step) if row]
        return status_of(self.record, max(seen, default=None), unix_s)

    def head(self, unix_s: float) -> dict[str, Any]:
        """Return the page's first line."""
        status = self.status(unix_s)
        return {
            "name": self.eval_name or self.config.run.name,
            "env": self.config.env,
            "is_eval": bool(self.eval_name),
            "num_steps": self.config.trainer.num_steps,
            "max_staleness": self.config.trainer.max_staleness,
            "reward_untrained": self.reward_untrained,
            "success_untrained": self.success_untrained,
            "phase": status.state,
            "cause": status.cause,
            "resume": status.resume,
            "started_s": self._first_time_s,
            "num_bad_lines": self.num_bad_lines,
        }

    def learning(self) -> dict[str, Any]:
        """Return the latest step, and counts of ages and drops."""
        recent: Counter[str] = Counter()
        for histogram in self._recent_ages:
            recent.update(histogram)
        return {
            "last": msgspec.to_builtins(self._last_step) if self._last_step else None,
            "ages": dict(self._ages),
            "recent_ages": dict(recent),
            "drops": dict(self._drops),
            "failed": list(reversed(self._failed)),
        }

    def fleet(self) -> dict[str, Any]:
        """Return the latest tables of workers, engines and processes."""
        row = self.last_telemetry or TelemetryRow(0.0)
        workers = row.router.workers if row.router else []
        return {**msgspec.to_builtins(row), "worker_table": worker_table(workers)}

    def _note_time(self, time_s: float) -> None:
        if self._first_time_s is None or time_s < self._first_time_s:
            self._first_time_s = time_s


def gains(before: RouterRow, after: RouterRow) -> Numbers:
    """Return calls, tokens and rollouts that workers known to both rows added; a restarted worker
    counts from zero.
    """
    old = {worker.worker_id: worker for worker in before.workers}
    gained = {"calls_per_s": 0.0, "tokens_per_s": 0.0, "rollouts_per_s": 0.0}
    for worker in after.workers:
        was = old.get(worker.worker_id)
        if was is None:
            continue
        gained["calls_per_s"] += added(was.num_calls, worker.num_calls)
        gained["tokens_per_s"] += added(was.num_tokens, worker.num_tokens)
        gained["rollouts_per_s"] += added(was.num_finished, worker.num_finished)
    return gained


def added(before: int, after: int) -> int:
    """Return the increase of a counter that may have restarted."""
    return after - before if after >= before else after
