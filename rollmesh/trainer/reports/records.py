"""The records of a training run: its row files, its counts, and summary.json.

    metrics.jsonl       one row per train step
    trajectories.jsonl  one row per rollout, trained or not
    drops.jsonl         one row per rollout (or group without rollouts) that does not train, and why
    recoveries.jsonl    one row per restart of the trainer: what it continued from
    summary.json        the counts, written each second while the run trains, and at the end

- num_asked = num_trained + num_dropped + num_open + num_lost, all in rollouts. num_lost is what
  this equation leaves, never a counter of its own.
- A trainer that continues from a checkpoint truncates the first three to what that covers and
  writes the rest again, so that each step and each group has its rows once.
- What is held in memory does not grow with the run.
"""

import collections
import io
import math
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollmesh.core.clock import Clock
from rollmesh.core.errors import FULL, UserError
from rollmesh.core.files import read_rows
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.logs import get_logger
from rollmesh.core.types import ErrorPlace, GroupRecord, Json, RolloutRecord
from rollmesh.serve.client.client import TriesAgain
from rollmesh.serve.client.journal_entries import SeenRollout
from rollmesh.serve.client.samples import Sample
from rollmesh.serve.client.scores import SuccessRule
from rollmesh.serve.client.trajectories import encode_row, trajectory_row
from rollmesh.trainer.reports.exactness import ExactnessTotals

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

FEW_STEPS = 10
"""Steps at the start and at the end whose rewards are compared."""


MAX_WORKERS = 1024


OTHER_WORKERS = "others"
"""The name for workers beyond the first MAX_WORKERS."""


class SavedCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a Tally that a checkpoint stores unchanged."""

    num_asked: int = 0
    num_evals: int = 0
    measured: list[float] = []
    measured_successes: list[float] = []
    num_trained: int = 0
    num_dropped: int = 0
    outcomes: dict[str, int] = {}
    workers: dict[str, int] = {}
    ages: dict[int, int] = {}
    num_samples: int = 0
    num_two_versions: int = 0
    num_steps: int = 0
    num_skipped: int = 0
    num_groups: int = 0
    num_equal_groups: int = 0
    first_rewards: list[float] = []
    last_rewards: list[float] = []
    reward_untrained: float | None = None
    first_successes: list[float] = []
    last_successes: list[float] = []
    success_untrained: float | None = None
    rule: SuccessRule = msgspec.field(default_factory=SuccessRule)


class Tally:
    """The counts of a run."""

    def __init__(self, pass_threshold: float | None = None) -> None:
        self.num_asked = 0
        self.num_evals = 0
        """Requested for evaluation; not in num_asked."""
        self.measured: list[float] = []
        """Rewards of the current evaluation."""
        self.measured_successes: list[float] = []
        """Successes of the same rollouts, where known."""
        self.num_trained = 0
        self.num_dropped = 0
        self.num_open = 0
        self.outcomes = collections.Counter[str]()
        self.workers = collections.Counter[str]()
        self.ages = collections.Counter[int]()
        self.num_samples = 0
        self.num_two_versions = 0
        self.num_steps = 0
        self.num_skipped = 0
        """Optimizer steps whose loss or gradient was not finite: they changed nothing."""
        self.num_groups = 0
        """Groups in train steps."""
        self.num_equal_groups = 0
        """Groups among them whose siblings all had the same reward and so teach nothing."""
        self.first_rewards: list[float] = []
        """Mean rewards of the first FEW_STEPS steps."""
        self.last_rewards: list[float] = []
        self.reward_untrained: float | None = None
        self.first_successes: list[float] = []
        """Mean successes of the same steps, where known."""
        self.last_successes: list[float] = []
        self.success_untrained: float | None = None
        self.rule = SuccessRule(pass_threshold)
        """Decides which rollouts of the run's environment succeeded."""
        self.exactness = ExactnessTotals()

    def state(self) -> dict[str, Json]:
        """Return everything that must outlive this process, except open rollouts."""
        counts = {name: getattr(self, name) for name in SavedCounts.__struct_fields__}
        plain = counts | {"exactness": self.exactness.state()}
        state: dict[str, Json] = msgspec.to_builtins(plain, str_keys=True)
        return state

    def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from a saved state."""
        counts = msgspec.convert(state, SavedCounts, str_keys=True)
        counts.rule.pass_threshold = self.rule.pass_threshold  # the settings may have changed
        for name, value in msgspec.structs.asdict(counts).items():
            own = getattr(self, name)
            setattr(self, name, collections.Counter(value) if isinstance(own, dict) else value)
        self.exactness.restore(state.get("exactness", []))

    def add_step(self, reward: float | None, success: float | None) -> None:
        """Count a train step by the means of its rollouts; None if there are none."""
        self.num_steps += 1
        for value, first, last in (
            (reward, self.first_rewards, self.last_rewards),
            (success, self.first_successes, self.last_successes),
        ):
            if value is None:
                continue
            last.append(value)
            del last[:-FEW_STEPS]
            if self.num_steps <= FEW_STEPS:
                first.append(value)

    def end_evaluation(self) -> dict[str, float | None]:
        """End an evaluation; return its figures for a row."""
        self.reward_untrained = mean(self.measured)
        self.success_untrained = mean(self.measured_successes) if self.rule.is_known else None
        self.measured, self.measured_successes = [], []
        row = {"reward_untrained": self.reward_untrained}
        return row | self._successes(success_untrained=self.success_untrained)

    def _successes(self, **values: float | None) -> dict[str, float | None]:
        """Return the figures of success, or nothing if the rule does not know them."""
        known = self.rule.is_known
        return {name: value for name, value in values.items() if known and value is not None}

    def add_worker(self, worker_id: str) -> None:
        """Count a rollout of this worker."""
        is_known = worker_id in self.workers or len(self.workers) < MAX_WORKERS
        self.workers[worker_id if is_known else OTHER_WORKERS] += 1

    def summary(self) -> dict[str, Any]:
        """Return the training part of summary.json."""
        num_rollouts = sum(self.outcomes.values())
        num_aged = sum(self.ages.values())
        return {
            "reward_untrained": self.reward_untrained,
            "reward_first10": mean(self.first_rewards),
            "reward_last10": mean(self.last_rewards),
            **self._successes(
                success_untrained=self.success_untrained,
                success_first10=mean(self.first_successes),
                success_last10=mean(self.last_successes),
            ),
            "num_steps": self.num_steps,
            "num_skipped_steps": self.num_skipped,
            "frac_equal_groups": share(self.num_equal_groups, self.num_groups),
            "num_rollouts": num_rollouts,
            "num_asked": self.num_asked,
            "num_trained": self.num_trained,
            "num_dropped": self.num_dropped,
            "num_open": self.num_open,
            "num_lost": self.num_asked - self.num_trained - self.num_dropped - self.num_open,
            "outcomes": dict(self.outcomes),
            "max_staleness": max(self.ages, default=0),
            "share_age_ge_1": share(num_aged - self.ages[0], num_aged),
            "share_two_versions": share(self.num_two_versions, self.num_samples),
            "age_histogram": {str(age): num for age, num in sorted(self.ages.items())},
            "exactness": self.exactness.rows(),
            "share_by_worker": {
                worker: share(num, num_rollouts) for worker, num in sorted(self.workers.items())
            },
        }


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Write summary.json atomically."""
    part = folder / "summary.json.part"
    part.write_bytes(msgspec.json.format(encode_row(summary), indent=2) + b"\n")
    part.replace(folder / "summary.json")


def mean(values: Sequence[float]) -> float | None:
    """Mean, rounded to six significant digits; None for no values."""
    return float(f"{math.fsum(values) / len(values):.6g}") if values else None


def share(part: int, whole: int) -> float:
    """Rounded ratio; 0 if `whole` is 0."""
    return round(part / whole, 4) if whole else 0.0


RECOVERIES = "recoveries.jsonl"
RETRY_S = 1.0
"""Interval between attempts to write a row to a full disk."""


class RunRecords:
    """Appends rows; each is one write, so a reader sees complete lines and at most one incomplete
    one."""

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        covered: Mapping[str, int] | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """`covered` is the number of bytes of each file that stay, by name; other files are
        emptied.

        A full disk blocks every write until there is space; `stop` ends that with a UserError.
        """
        self.folder = folder
        """The run folder."""
        self._clock = clock
        self._covered = covered or {}
        self._stop = stop or threading.Event()
        self._should_retry: TriesAgain = lambda: not self._stop.wait(RETRY_S)
        self._metrics = self._open("metrics.jsonl")
        self._trajectories = self._open("trajectories.jsonl")
        self._drops = self._open("drops.jsonl")

    def set_retry(self, should_retry: TriesAgain) -> None:
        """Replace what a full disk waits by, for a caller with work to do meanwhile."""
        self._should_retry = should_retry

    def step(self, row: dict[str, Any]) -> None:
        """Write one train step."""
        self._write(self._metrics, row)

    def rollout(
        self,
        rollout_id: RolloutId,
        group: GroupRecord,
        record: RolloutRecord,
        samples: Sequence[Sample],
        **more: str | float | None,
    ) -> None:
        """Write one rollout: its messages, and its samples token by token."""
        row = trajectory_row(rollout_id, group, record, samples)
        self._write(self._trajectories, row | more)

    def drop(
        self,
        group_id: GroupId,
        num_rollouts: int,
        reason: str,
        **more: str | int | ErrorPlace | None,
    ) -> None:
        """Record that `num_rollouts` of a group do not train."""
        row = {"group_id": str(group_id), "num_rollouts": num_rollouts, "reason": reason}
        self._write(self._drops, row | more)

    def recovery(self, row: dict[str, Any]) -> None:
        """Record what this incarnation of the trainer began with; never truncated."""
        with open_waiting(self.folder / RECOVERIES, self._retries) as file:
            self._write(file, row)

    def flush(self) -> None:
        """Pass buffered rows to the system, for readers of the running run."""
        for file in self._files:
            file.flush()

    def offsets(self) -> dict[str, int]:
        """Return the length of each file after a flush, for `covered` of a later incarnation."""
        self.flush()
        return {Path(file.name).name: file.tell() for file in self._files}

    def close(self) -> None:
        for file in self._files:
            file.close()

    @property
    def _files(self) -> tuple[io.BufferedWriter, ...]:
        return self._metrics, self._trajectories, self._drops

    def _open(self, name: str) -> io.BufferedWriter:
        path = self.folder / name
        if path.exists():
            os.truncate(path, min(path.stat().st_size, self._covered.get(name, 0)))
        return open_waiting(path, self._retries)

    def _retries(self) -> bool:
        return self._should_retry()

    def _write(self, file: io.BufferedWriter, row: dict[str, Any]) -> None:
        file.write(encode_row({"time_s": round(self._clock.unix_s(), 3)} | row) + b"\n")


def read_recoveries(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the trainer's restarts, without an incomplete last row."""
    return read_rows(folder / RECOVERIES)


def restarts_of(folder: Path) -> dict[str, int]:
    """Return how often the run's trainer started, and how many steps were redone."""
    rows = read_recoveries(folder)
    num_redone = sum(len(row["redone_steps"]) for row in rows)
    return {"num_lives": len(rows) + 1, "num_steps_redone": num_redone}


log = get_logger()

BUFFER_BYTES = 2**20


class _WaitingFile(io.FileIO):
    def __init__(self, path: Path, should_retry: TriesAgain) -> None:
        super().__init__(path, "ab")
        self._should_retry = should_retry
        self._is_logged = False

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write as much of `data` as there is space for, at least one byte; UserError if the wait
        is ended."""
        while True:
            try:
                num_bytes = super().write(data)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self._wait(f"{self.name}: {error.strerror}")
            else:
                self._is_logged = False
                return num_bytes

    def _wait(self, why: str) -> None:
        if not self._is_logged:
            self._is_logged = True
            log.error("records.wait", error=why, fix="free disk space; nothing is lost")
        if not self._should_retry():
            raise UserError(f"{why}; free disk space, then use --resume")


def open_waiting(path: Path, should_retry: TriesAgain) -> io.BufferedWriter:
    """Open `path` for appending. A full disk is waited for until `should_retry` returns False;
    other errors are raised."""
    return io.BufferedWriter(_WaitingFile(path, should_retry), BUFFER_BYTES)


class DropLedger:
    """Writes drops.jsonl, so that `rollmesh trace bias` shows what a run selects against.

        group_id, index   of the rollout     task_id, env   of its task
        length            sampled tokens     age            of its oldest token, in train steps
        reason            why, its code first
        outcome           how it ended       error, place   what was raised, and where

    Rollouts that never arrived share one row, without index, length or age. Every rollout counted
    as dropped has a row, and every row is counted, except those of evaluations.
    """

    def __init__(self, records: RunRecords, tally: Tally, env: str) -> None:
        self._records = records
        self._tally = tally
        self._env = env

    def rollout(
        self, group_id: GroupId, task_id: str, seen: SeenRollout, reason: str, age: int | None
    ) -> None:
        """Write and count a rollout that arrived."""
        cause = {"error": seen.error, "place": seen.place} if seen.error or seen.place else {}
        self._records.drop(
            group_id,
            1,
            reason,
            index=seen.index,
            task_id=task_id,
            env=self._env,
            length=seen.length,
            age=age,
            outcome=seen.outcome,
            **cause,
        )
        self._tally.num_dropped += 1

    def unseen(self, group_id: GroupId, task_id: str, num_rollouts: int, reason: str) -> None:
        """Write and count rollouts of a group that never arrived."""
        if num_rollouts > 0:
            self.uncounted(group_id, task_id, num_rollouts, reason)
            self._tally.num_dropped += num_rollouts

    def uncounted(self, group_id: GroupId, task_id: str, num_rollouts: int, reason: str) -> None:
        """Write rollouts that were not requested for training; they are not counted."""
        self._records.drop(group_id, num_rollouts, reason, task_id=task_id, env=self._env)
