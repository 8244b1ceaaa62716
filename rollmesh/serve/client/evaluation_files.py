"""The files of an evaluation: its plan and its rows.

- The plan that was written holds for all that is in the folder.
- The rows of a group are written together. Opening the file keeps only whole groups with a result,
  so groups that are requested again have no rows.
- Errors of environment code in `tasks` are one line. No numpy here, as in all verbs.
"""

import os
from collections import Counter, defaultdict
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Self

import msgspec

from rollmesh.core.errors import EnvError, UserError, remedy_of
from rollmesh.core.ids import GroupId
from rollmesh.core.types import ErrorPlace, Json, SamplingPolicy, Task
from rollmesh.envs.env import Env

PLAN = "eval.json"


class EvaluationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Plan of an evaluation."""

    env: str
    env_settings: dict[str, Json]
    model: str
    """Folder of the mesh; empty if the mesh existed before."""
    split: str
    num_tasks: int
    """Maximum number of tasks; a split may have fewer."""
    num_samples: int
    seed: int
    sampling: SamplingPolicy


def write_plan(plan: EvaluationPlan, folder: Path) -> None:
    """Write it into the evaluation's folder; UserError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PLAN).write_bytes(msgspec.json.format(msgspec.json.encode(plan)) + b"\n")
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; name another --out") from None


def read_plan(folder: Path) -> EvaluationPlan:
    """Read the plan of an evaluation's folder; UserError if there is none."""
    try:
        return msgspec.json.decode((folder / PLAN).read_bytes(), type=EvaluationPlan)
    except FileNotFoundError:
        raise UserError(f"{folder}: no evaluation to resume; leave out --resume") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{folder / PLAN}: {error}; start again without --resume") from None


def pose(env: Env, plan: EvaluationPlan) -> list[Task]:
    """Return the tasks of `plan` in order; a one-line EnvError if the environment fails."""
    where = f'env = "{plan.env}": tasks("{plan.split}")'
    tasks: list[Task] = []
    try:
        for task in islice(env.tasks(plan.split, plan.seed), plan.num_tasks):
            if not isinstance(task, Task):
                raise TypeError(f"gave {type(task).__name__} and not a Task")
            tasks.append(task)
    except Exception as error:  # door: a user's generator may raise anything
        first_line = next(iter(str(error).splitlines()), "")
        cause = f"{type(error).__name__}: {first_line}"
        raise EnvError(f"{where} failed after {len(tasks)} tasks: {cause}") from error
    if not tasks:
        raise EnvError(f"{where} gave no task; name another --split")
    return tasks


RESULTS = "results.jsonl"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout, or one place of a group without a result."""

    task_id: str
    group_id: str
    index: int
    """Index among its siblings."""
    num_samples: int
    """Number of rollouts in the group."""
    outcome: str
    """An Outcome; for a group without a result, the code of its end."""
    reward: float | None = None
    metrics: dict[str, float] = {}
    error: str = ""
    place: ErrorPlace | None = None
    """Where environment code raised `error`."""
    num_calls: int = 0
    """Model calls (turns)."""
    num_tokens: int = 0
    """Sampled tokens."""
    duration_s: float = 0.0
    worker_id: str = ""
    attempt: int = 0
    has_result: bool = True
    """False for a group that --resume asks for again."""


class Results:
    """The rows in `folder`; `with` closes the file."""

    def __init__(self, folder: Path) -> None:
        """Read the rows and keep whole groups; UserError if that fails."""
        self.rows: list[Row] = []
        self._path = folder / RESULTS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.rows = _whole_groups(folder)
            self._group_ids = {row.group_id for row in self.rows}
            part = self._path.with_suffix(".part")
            part.write_bytes(_lines(self.rows))
            os.replace(part, self._path)
            self._file = self._path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(f"{self._path}: {error.strerror}; name another --out") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def holds(self, group_id: GroupId) -> bool:
        """Return whether the rows of this group are in the file."""
        return str(group_id) in self._group_ids

    def num_groups(self) -> Counter[str]:
        """Return the number of groups with a result, by task."""
        firsts = (row for row in self.rows if row.index == 0 and row.has_result)
        return Counter(row.task_id for row in firsts)

    def add(self, rows: list[Row]) -> None:
        """Append the rows of a group; UserError if the disk takes none."""
        append(self._file, self._path, _lines(rows))
        self.rows += rows
        self._group_ids.update(row.group_id for row in rows)


def append(file: FileIO, path: Path, lines: bytes) -> None:
    """Write `lines` to the unbuffered `file` at `path`; UserError if the disk is full."""
    left = memoryview(lines)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        why = f"{error.strerror}; {remedy_of(error)}, then --resume"
        raise UserError(f"{path}: {why}") from None


def _lines(rows: list[Row]) -> bytes:
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)


def rows_in(folder: Path) -> list[Row]:
    """Return all rows of the file except one that a crash has cut."""
    path = folder / RESULTS
    lines = path.read_bytes().splitlines() if path.exists() else []
    rows: list[Row] = []
    for line in lines:
        try:
            rows.append(msgspec.json.decode(line, type=Row))
        except msgspec.MsgspecError:
            continue
    return rows


def _whole_groups(folder: Path) -> list[Row]:
    """Return the rows of groups that have a result and all their rows, in order."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows_in(folder):
        groups[row.group_id].append(row)
    whole = [
        rows for rows in groups.values() if rows[0].has_result and len(rows) == rows[0].num_samples
    ]
    return [row for rows in whole for row in rows]
