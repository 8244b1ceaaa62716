"""Rows of trajectories.jsonl: a rollout with its messages and, token by token, its samples.

- A training run and an evaluation write the same rows, so that one page shows both.
- A torn last line of a killed process is cut when an evaluation is resumed; a rollout may then have
  two equal rows, of which readers take the last.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from rollmesh.core.errors import UserError
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.types import Branch, GroupRecord, RolloutRecord
from rollmesh.serve.client.arrivals import Arrival, Dropped
from rollmesh.serve.client.evaluation_files import append
from rollmesh.serve.client.samples import Sample, cut

TRAJECTORIES = "trajectories.jsonl"
LOGPROB_DIGITS = 5
BRANCHES: frozenset[Branch] = frozenset({"main", "subagent", "side"})
BLOCK_BYTES = 2**16

encode_row = msgspec.json.Encoder(enc_hook=str).encode


def trajectory_row(
    rollout_id: RolloutId, group: GroupRecord, record: RolloutRecord, samples: Sequence[Sample]
) -> dict[str, Any]:
    """Return one rollout as a row, without its time and the fields that only the writer knows."""
    return {
        "rollout_id": str(rollout_id),
        "task_id": group.task.id,
        "is_eval": group.is_eval,
        "outcome": record.outcome,
        "reward": record.reward,
        "metrics": record.metrics,
        "error": record.error,
        "place": record.place,
        "num_calls": record.num_calls,
        "duration_s": round(record.duration_s, 4),
        "messages": record.messages,
        "samples": [_sample_row(sample) for sample in samples],
    }


def _sample_row(sample: Sample) -> dict[str, Any]:
    return {
        "token_ids": sample.token_ids.tolist(),
        "logprobs": np.round(sample.logprobs.astype(np.float64), LOGPROB_DIGITS).tolist(),
        "loss_mask": sample.loss_mask.astype(np.int8).tolist(),
        "policy_versions": sample.policy_versions.tolist(),
        "branch": sample.branch,
    }


class Trajectories:
    """The file of an evaluation; `with` closes it."""

    def __init__(self, folder: Path) -> None:
        """Append to the file in `folder`; UserError if that fails."""
        self._path = folder / TRAJECTORIES
        try:
            self._file = self._path.open("ab", buffering=0)
            os.truncate(self._file.fileno(), _whole_bytes(self._path))
        except OSError as error:
            raise UserError(f"{self._path}: {error.strerror}; name another --out") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, arrival: Arrival) -> None:
        """Write the rollouts of a group; UserError if the disk is full."""
        lines = b"".join(encode_row(row) + b"\n" for row in rows_of(arrival))
        append(self._file, self._path, lines)


def rows_of(arrival: Arrival) -> list[dict[str, Any]]:
    """Return a row for each rollout of the group; only a group with a result has samples."""
    if arrival.record is None:
        return []
    samples: dict[int, list[Sample]] = {}
    if not isinstance(arrival, Dropped):
        arrays = arrival.token_ids, arrival.logprobs
        for sample in cut(arrival.group_id, arrival.record, *arrays, BRANCHES).samples:
            samples.setdefault(sample.rollout_id.index, []).append(sample)
    worker_id = "" if isinstance(arrival, Dropped) else arrival.worker_id
    return [
        _row(arrival.group_id, arrival.record, rollout, samples.get(rollout.index, ()), worker_id)
        for rollout in arrival.record.rollouts
    ]


def _row(
    group_id: GroupId,
    group: GroupRecord,
    rollout: RolloutRecord,
    samples: Sequence[Sample],
    worker_id: str,
) -> dict[str, Any]:
    ended_s = round(rollout.started_s + rollout.duration_s, 3)
    row = trajectory_row(RolloutId(group_id, rollout.index), group, rollout, samples)
    return {"time_s": ended_s} | row | {"worker_id": worker_id}


def _whole_bytes(path: Path) -> int:
    """Return the length of the file up to the end of its last whole line."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - BLOCK_BYTES)
            file.seek(start)
            at = file.read(end - start).rfind(b"\n")
            if at >= 0:
                return start + at + 1
            end = start
    return 0
