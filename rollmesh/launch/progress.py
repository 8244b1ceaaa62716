"""How far the run is, in the few figures that fit a terminal.

Owns the fold of metrics.jsonl and of telemetry. Invariants: bounded; reads no clock. Driven by the
screen once per second.
"""

from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import msgspec

from rollmesh.launch.sampler import Telemetry

MEAN_STEPS = 10
ETA_STEPS = 20


class MetricsRow(msgspec.Struct, frozen=True):
    """What of a line of metrics.jsonl the terminal shows."""

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
    """Samples that did not train because their log-probs differ too much from the trainer's."""
    num_masked_tokens: int = 0
    """Tokens of other samples, for the same reason."""
    frac_equal_groups: float | None = None
    refused: str | None = None
    """Why no engine has accepted the newest weights; empty once one has."""


class Rates(msgspec.Struct, frozen=True):
    """What the mesh does now."""

    num_in_flight: int = 0
    calls_per_s: float = 0.0
    tokens_per_s: float = 0.0


class Progress:
    """The figures."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.num_bad_lines = 0
        self.start_over()

    def start_over(self) -> None:
        """The lines come anew: a trainer that died went on from before its last ones."""
        self.reward_untrained: float | None = None
        self.success_untrained: float | None = None
        self.refused = ""
        """Why no engine has accepted the newest weights."""
        self.num_samples = 0
        self.num_masked = 0
        """Samples of `num_samples` that did not train because their log-probs differ too much."""
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
        """Train steps that are done."""
        return self._recent[-1].step + 1 if self._recent else 0

    @property
    def policy_version(self) -> int:
        """The newest published weights that a step told of."""
        return (self._recent[-1].policy_version or 0) if self._recent else 0

    def reward(self) -> float | None:
        """Mean over the last steps."""
        return _mean(row.reward for row in self._last())

    def success(self) -> float | None:
        """Mean over the last steps; None where the last one does not know it."""
        rows = self._last()
        is_known = bool(rows) and rows[-1].success is not None
        return _mean(row.success for row in rows) if is_known else None

    def equal_groups(self) -> float | None:
        """Mean share of groups in which all rewards were equal, over the last steps."""
        return _mean(row.frac_equal_groups for row in self._last())

    def ages(self) -> dict[str, float]:
        """Share of the run's samples by age in train steps."""
        total = self._ages.total()
        return {age: num / total for age, num in sorted(self._ages.items())}

    def _last(self) -> list[MetricsRow]:
        return list(self._recent)[-MEAN_STEPS:]

    def seconds_left(self) -> float | None:
        """At the pace of the last steps; None while there is none."""
        if len(self._recent) < 2:
            return None
        first, last = self._recent[0], self._recent[-1]
        pace_s = (last.time_s - first.time_s) / (last.step - first.step)
        return pace_s * (self.num_steps - self.num_done)


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of those that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def rates(before: Telemetry, last: Telemetry) -> Rates:
    """From two samples; a worker that was not in the first counts nothing yet."""
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
    """The router's rows of workers, by name."""
    rows = (sample.router or {}).get("workers", [])
    return {row["worker_id"]: row for row in rows}


def unserved(before: Telemetry, last: Telemetry) -> str:
    """Why no engine serves, by the router's table; empty where one does, or the rest are asleep.

    An engine that is being updated is shown only once that takes longer than a sample.
    """
    tables = [(sample.router or {}).get("engines", []) for sample in (before, last)]
    for table in tables:
        awake = [row for row in table if row["phase"] not in ("asleep", "gone")]
        if not awake or any(row["phase"] == "ready" for row in awake):
            return ""
    return "; ".join(f"{row['url']}: {row['detail'] or row['phase']}" for row in awake)


def cpu_shares(before: Telemetry, last: Telemetry) -> dict[int, float]:
    """Cores that each process, by pid, kept busy between two samples."""
    elapsed_s = last.time_s - before.time_s
    if elapsed_s <= 0:
        return {}
    old = {sample.pid: sample.cpu_s for sample in before.processes}
    return {
        sample.pid: max(0.0, sample.cpu_s - old[sample.pid]) / elapsed_s
        for sample in last.processes
        if sample.pid in old
    }
