"""The row files of a training run.

    metrics.jsonl       one row per train step
    trajectories.jsonl  one row per rollout, trained or not
    drops.jsonl         one row per rollout (or group without rollouts) that does not train, and why
    recoveries.jsonl    one row per restart of the trainer: what it continued from

- A trainer that continues from a checkpoint truncates the first three to what that covers and
  writes the rest again, so that each step and each group has its rows once.
- What is held in memory does not grow with the run.
"""

import io
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollmesh.core.clock import Clock
from rollmesh.core.errors import FULL, UserError
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.logs import get_logger
from rollmesh.core.types import ErrorPlace, GroupRecord, RolloutRecord
from rollmesh.serve.client.client import TriesAgain
from rollmesh.serve.client.journal_entries import SeenRollout
from rollmesh.serve.client.samples import Sample
from rollmesh.serve.client.trajectories import encode_row, trajectory_row
from rollmesh.trainer.reports.summary import Tally

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

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
    path = folder / RECOVERIES
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [msgspec.json.decode(line) for line in lines]


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
