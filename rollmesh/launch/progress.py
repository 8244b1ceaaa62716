"""A run's progress in the few figures that fit a terminal, folded from metrics.jsonl and telemetry.

- Memory is bounded.
- Pure: no clock.
"""

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import msgspec

from rollmesh.launch.telemetry import Telemetry

MEAN_STEPS = 10
ETA_STEPS = 20


class MetricsRow(msgspec.Struct, frozen=True):
    """The fields of a line of metrics.jsonl that the terminal shows."""

    time_s: float
    step: int
    reward: float | None = None
    success: float | None = None
    reward_untrained: float | None = None
    success_untrained: float | None = None
    policy_version: int | None = None
    age_histogram: dict[str, int] = {}
    num_samples: int = 0
    num_masked: int = 0
    """Samples excluded from training because their log-probs differ too much from the trainer's."""
    num_masked_tokens: int = 0
    """Tokens of other samples, excluded for the same reason."""
    frac_equal_groups: float | None = None
    refused: str | None = None
    """Why no engine has accepted the newest weights; empty once one has."""


class Rates(msgspec.Struct, frozen=True):
    """The mesh's current throughput."""

    num_in_flight: int = 0
    calls_per_s: float = 0.0
    tokens_per_s: float = 0.0


class RunProgress:
    """The figures."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.num_bad_lines = 0
        self.start_over()

    def start_over(self) -> None:
        """Forget all lines: a restarted trainer resumed before its last ones."""
        self.reward_untrained: float | None = None
        self.success_untrained: float | None = None
        self.refused = ""
        """Why no engine has accepted the newest weights."""
        self.num_samples = 0
        self.num_masked = 0
        """Samples of `num_samples` excluded from training because their log-probs differ too
        much.
        """
        self.num_masked_tokens = 0
        self._ages: Counter[str] = Counter()
        self._recent: deque[MetricsRow] = deque(maxlen=ETA_STEPS)

    def add(self, lines: Iterable[bytes]) -> None:
        """Fold new lines of metrics.jsonl."""
        for line in lines:
            try:
                row = msgspec.json.decode(line, type=MetricsRow)
            except msgspec.MsgspecError:
                self.num_bad_lines += 1
                continue
            if row.reward_untrained is not None:
                self.reward_untrained = row.reward_untrained
                self.success_untrained = row.success_untrained
            if row.refused is not None:
                self.refused = row.refused
            if row.step >= 0:
                self._recent.append(row)
                self._ages.update(row.age_histogram)
                self.num_samples += row.num_samples
                self.num_masked += row.num_masked
                self.num_masked_tokens += row.num_masked_tokens

    @property
    def num_done(self) -> int:
        """Completed train steps."""
        return self._recent[-1].step + 1 if self._recent else 0

    @property
    def policy_version(self) -> int:
        """The newest published weights that a step reported."""
        return (self._recent[-1].policy_version or 0) if self._recent else 0

    def reward(self) -> float | None:
        """Return the mean over the last steps."""
        return _mean(row.reward for row in self._last())

    def success(self) -> float | None:
        """Return the mean over the last steps; None if the last one has no success rate."""
        rows = self._last()
        is_known = bool(rows) and rows[-1].success is not None
        return _mean(row.success for row in rows) if is_known else None

    def equal_groups(self) -> float | None:
        """Return the mean share of groups in which all rewards were equal, over the last steps."""
        return _mean(row.frac_equal_groups for row in self._last())

    def ages(self) -> dict[str, float]:
        """Return the share of the run's samples by age in train steps."""
        total = self._ages.total()
        return {age: num / total for age, num in sorted(self._ages.items())}

    def _last(self) -> list[MetricsRow]:
        return list(self._recent)[-MEAN_STEPS:]

    def seconds_left(self) -> float | None:
        """Return the estimate at the pace of the last steps; None before the second."""
        if len(self._recent) < 2:
            return None
        first, last = self._recent[0], self._recent[-1]
        pace_s = (last.time_s - first.time_s) / (last.step - first.step)
        return pace_s * (self.num_steps - self.num_done)


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def rates(before: Telemetry, last: Telemetry) -> Rates:
    """Compute rates from two samples; a worker that is not in the first adds nothing."""
    old, new = workers(before), workers(last)
    in_flight = sum(worker.get("in_flight", 0) for worker in new.values())
    elapsed_s = last.time_s - before.time_s
    if not old or elapsed_s <= 0:
        return Rates(in_flight)
    both = [(old[name], new[name]) for name in new if name in old]

    def gained(key: str) -> float:
        gains = [float(b.get(key, 0)) - float(a.get(key, 0)) for a, b in both]
        return sum(max(0.0, gain) for gain in gains) / elapsed_s

    return Rates(in_flight, gained("num_calls"), gained("num_tokens"))


def workers(sample: Telemetry) -> dict[str, dict[str, Any]]:
    """Return the router's rows of workers by id."""
    rows = (sample.router or {}).get("workers", [])
    return {row["worker_id"]: row for row in rows}


def unserved(before: Telemetry, last: Telemetry) -> str:
    """Return why no engine serves, by the router's table; '' if one does, or all others are asleep.

    An engine that is being updated is reported only if that takes longer than one sample.
    """
    tables = [(sample.router or {}).get("engines", []) for sample in (before, last)]
    for table in tables:
        awake = [row for row in table if row["phase"] not in ("asleep", "gone")]
        if not awake or any(row["phase"] == "ready" for row in awake):
            return ""
    return "; ".join(f"{row['url']}: {row['detail'] or row['phase']}" for row in awake)


def cpu_shares(before: Telemetry, last: Telemetry) -> dict[int, float]:
    """Return the CPU cores that each process, by pid, used between two samples."""
    elapsed_s = last.time_s - before.time_s
    if elapsed_s <= 0:
        return {}
    old = {sample.pid: sample.cpu_s for sample in before.processes}
    return {
        sample.pid: max(0.0, sample.cpu_s - old[sample.pid]) / elapsed_s
        for sample in last.processes
        if sample.pid in old
    }
