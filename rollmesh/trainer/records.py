"""What a training run leaves in its folder, and the counts behind its summary.

    metrics.jsonl       one row per train step
    trajectories.jsonl  one row per rollout, trained or not
    drops.jsonl         one row per rollout (or group without rollouts) that does not train, and why
    summary.json        at the end, however it ends
    learning.png        the success curve

Invariants: num_asked = num_trained + num_dropped + num_open + num_lost, all in rollouts, and
num_lost is what this equation leaves, never a counter of its own; what is held does not grow with
the run. Driven by the trainer's loop.
"""

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from rollmesh.core.clock import Clock
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.types import GroupRecord, RolloutRecord
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.exactness import ExactnessBook

_encode = msgspec.json.Encoder(enc_hook=str).encode
LOGPROB_DIGITS = 5
FEW_STEPS = 10
"""The first and the last so many tell what a run learned."""
MAX_WORKERS = 1024
OTHER_WORKERS = "others"
"""Who comes after MAX_WORKERS others have brought something."""


class RunRecords:
    """Appends rows; each is one write, so that a reader sees whole lines or a torn last one."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self._metrics = self._open("metrics.jsonl")
        self._trajectories = self._open("trajectories.jsonl")
        self._drops = self._open("drops.jsonl")

    def step(self, row: dict[str, Any]) -> None:
        """One train step."""
        self._write(self._metrics, row)

    def rollout(
        self,
        rollout_id: RolloutId,
        group: GroupRecord,
        record: RolloutRecord,
        samples: Sequence[Sample],
        **more: str | int | None,
    ) -> None:
        """One rollout: its messages, and its samples token by token."""
        row = {
            "rollout_id": str(rollout_id),
            "task_id": group.task.id,
            "is_eval": group.is_eval,
            "outcome": record.outcome,
            "reward": record.reward,
            "metrics": record.metrics,
            "error": record.error,
            "num_calls": record.num_calls,
            "duration_s": round(record.duration_s, 4),
            "messages": record.messages,
            "samples": [_sample_row(sample) for sample in samples],
        }
        self._write(self._trajectories, row | more)

    def drop(self, group_id: GroupId, num_rollouts: int, reason: str, **more: str | int) -> None:
        """`num_rollouts` of a group do not train."""
        row = {"group_id": str(group_id), "num_rollouts": num_rollouts, "reason": reason}
        self._write(self._drops, row | more)

    def flush(self) -> None:
        """Hand what was written to the system, for readers of the running run."""
        for file in (self._metrics, self._trajectories, self._drops):
            file.flush()

    def close(self) -> None:
        for file in (self._metrics, self._trajectories, self._drops):
            file.close()

    def _open(self, name: str) -> BinaryIO:
        return open(self._folder / name, "ab", buffering=2**20)

    def _write(self, file: BinaryIO, row: dict[str, Any]) -> None:
        file.write(_encode({"time_s": round(self._clock.unix_s(), 3)} | row) + b"\n")


def _sample_row(sample: Sample) -> dict[str, Any]:
    return {
        "token_ids": sample.token_ids.tolist(),
        "logprobs": np.round(sample.logprobs.astype(np.float64), LOGPROB_DIGITS).tolist(),
        "loss_mask": sample.loss_mask.astype(np.int8).tolist(),
        "policy_versions": sample.policy_versions.tolist(),
        "branch": sample.branch,
    }


class Tally:
    """Counts for the summary."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.num_trained = 0
        self.num_dropped = 0
        self.num_open = 0
        self.outcomes = collections.Counter[str]()
        self.workers = collections.Counter[str]()
        self.ages = collections.Counter[int]()
        self.num_samples = 0
        self.num_two_versions = 0
        self.num_steps = 0
        self._first_successes: list[float] = []
        self._last_successes = collections.deque[float](maxlen=FEW_STEPS)
        self.success_untrained: float | None = None
        self.exactness = ExactnessBook()

    def add_step(self, success: float) -> None:
        """A train step was done, and so many of its rollouts were good."""
        self.num_steps += 1
        self._last_successes.append(success)
        if self.num_steps <= FEW_STEPS:
            self._first_successes.append(success)

    def add_worker(self, worker_id: str) -> None:
        """A rollout came from there."""
        is_known = worker_id in self.workers or len(self.workers) < MAX_WORKERS
        self.workers[worker_id if is_known else OTHER_WORKERS] += 1

    def summary(self) -> dict[str, Any]:
        """The training side of summary.json."""
        num_rollouts = sum(self.outcomes.values())
        num_aged = sum(self.ages.values())
        return {
            "success_untrained": self.success_untrained,
            "success_first10": mean(self._first_successes),
            "success_last10": mean(list(self._last_successes)),
            "num_steps": self.num_steps,
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


def mean(values: Sequence[float]) -> float | None:
    """Rounded; None of nothing."""
    return round(sum(values) / len(values), 4) if values else None


def share(part: int, whole: int) -> float:
    """Rounded; 0 of nothing."""
    return round(part / whole, 4) if whole else 0.0


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """summary.json, whole or not at all."""
    part = folder / "summary.json.part"
    part.write_bytes(msgspec.json.format(_encode(summary), indent=2) + b"\n")
    part.replace(folder / "summary.json")
