"""What a training run leaves in its folder, and the counts behind its summary.

    metrics.jsonl       one row per train step
    trajectories.jsonl  one row per rollout, trained or not
    drops.jsonl         one row per rollout (or group without rollouts) that does not train, and why
    recoveries.jsonl    one row per life of the trainer but the first: what it went on from
    summary.json        each second while it trains, and at the end
    learning.png        the curve of rewards

Invariants: num_asked = num_trained + num_dropped + num_open + num_lost, all in rollouts, and
num_lost is what this equation leaves, never a counter of its own; a trainer that goes on from a
checkpoint cuts the first three to what that covers and writes the rest again, so that each step and
each group has its rows once; what is held does not grow with the run. Driven by the trainer's loop.
"""

import collections
import io
import math
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.core.clock import Clock
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.types import ErrorPlace, GroupRecord, Json, RolloutRecord
from rollmesh.serve.client.client import TriesAgain
from rollmesh.serve.client.samples import Sample
from rollmesh.serve.client.scores import SuccessRule
from rollmesh.serve.client.trajectories import encode_row, trajectory_row
from rollmesh.trainer.books.lasting import open_lasting
from rollmesh.trainer.meter.exactness import ExactnessBook

RECOVERIES = "recoveries.jsonl"
AGAIN_S = 1.0
"""Between two times that a row is given to a disk that refuses it."""
FEW_STEPS = 10
"""The first and the last so many tell what a run learned."""
MAX_WORKERS = 1024
OTHER_WORKERS = "others"
"""Who comes after MAX_WORKERS others have brought something."""


class RunRecords:
    """Appends rows; each is one write, so that a reader sees whole lines or a torn last one."""

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        covered: Mapping[str, int] | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """`covered` says how much of each file stays, by its name; of others nothing does.

        A full disk holds all of it up, until there is room; `stop` ends that by a UserError.
        """
        self.folder = folder
        """The run's."""
        self._clock = clock
        self._covered = covered or {}
        self._stop = stop or threading.Event()
        self._tries_again: TriesAgain = lambda: not self._stop.wait(AGAIN_S)
        self._metrics = self._open("metrics.jsonl")
        self._trajectories = self._open("trajectories.jsonl")
        self._drops = self._open("drops.jsonl")

    def wait_by(self, again: TriesAgain) -> None:
        """Where the disk is full, from now on: somebody has more to do meanwhile than to hear a
        stop."""
        self._tries_again = again

    def step(self, row: dict[str, Any]) -> None:
        """One train step."""
        self._write(self._metrics, row)

    def rollout(
        self,
        rollout_id: RolloutId,
        group: GroupRecord,
        record: RolloutRecord,
        samples: Sequence[Sample],
        **more: str | float | None,
    ) -> None:
        """One rollout: its messages, and its samples token by token."""
        row = trajectory_row(rollout_id, group, record, samples)
        self._write(self._trajectories, row | more)

    def drop(
        self,
        group_id: GroupId,
        num_rollouts: int,
        reason: str,
        **more: str | int | ErrorPlace | None,
    ) -> None:
        """`num_rollouts` of a group do not train."""
        row = {"group_id": str(group_id), "num_rollouts": num_rollouts, "reason": reason}
        self._write(self._drops, row | more)

    def recovery(self, row: dict[str, Any]) -> None:
        """What this life of the trainer began with; never cut."""
        with open_lasting(self.folder / RECOVERIES, self._try_again) as file:
            self._write(file, row)

    def flush(self) -> None:
        """Hand what was written to the system, for readers of the running run."""
        for file in self._files:
            file.flush()

    def offsets(self) -> dict[str, int]:
        """How long each file is, with all that was written, for `covered` of a later life."""
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
        return open_lasting(path, self._try_again)

    def _try_again(self) -> bool:
        return self._tries_again()

    def _write(self, file: io.BufferedWriter, row: dict[str, Any]) -> None:
        file.write(encode_row({"time_s": round(self._clock.unix_s(), 3)} | row) + b"\n")


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What of a Tally a checkpoint holds as it is."""

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
    """Counts for the summary."""

    def __init__(self, pass_threshold: float | None = None) -> None:
        self.num_asked = 0
        self.num_evals = 0
        """Asked for by an evaluation, and so not among the others."""
        self.measured: list[float] = []
        """Rewards of an evaluation that has not ended."""
        self.measured_successes: list[float] = []
        """Successes of the same rollouts, as far as they were known."""
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
        """Optimiser steps whose loss or gradient was not finite: they changed nothing."""
        self.num_groups = 0
        """Groups that steps have taken."""
        self.num_equal_groups = 0
        """Groups among them whose siblings all had the same reward: they teach nothing."""
        self.first_rewards: list[float] = []
        """Mean rewards of the first FEW_STEPS steps."""
        self.last_rewards: list[float] = []
        self.reward_untrained: float | None = None
        self.first_successes: list[float] = []
        """The same of success, in steps where it was known."""
        self.last_successes: list[float] = []
        self.success_untrained: float | None = None
        self.rule = SuccessRule(pass_threshold)
        """Which rollouts of the run's environment succeeded."""
        self.exactness = ExactnessBook()

    def state(self) -> dict[str, Json]:
        """All that must outlive this process, but for the rollouts that are open."""
        counts = {name: getattr(self, name) for name in Counts.__struct_fields__}
        plain = counts | {"exactness": self.exactness.state()}
        state: dict[str, Json] = msgspec.to_builtins(plain, str_keys=True)
        return state

    def restore(self, state: Mapping[str, Json]) -> None:
        """Count on from there."""
        counts = msgspec.convert(state, Counts, str_keys=True)
        counts.rule.pass_threshold = self.rule.pass_threshold  # the settings may have changed
        for name, value in msgspec.structs.asdict(counts).items():
            own = getattr(self, name)
            setattr(self, name, collections.Counter(value) if isinstance(own, dict) else value)
        self.exactness.restore(state.get("exactness", []))

    def add_step(self, reward: float | None, success: float | None) -> None:
        """Count a train step by the means of its rollouts; None where there is none."""
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
        """Take the means of what was measured; the figures for a row."""
        self.reward_untrained = mean(self.measured)
        self.success_untrained = mean(self.measured_successes) if self.rule.is_known else None
        self.measured, self.measured_successes = [], []
        row = {"reward_untrained": self.reward_untrained}
        return row | self._successes(success_untrained=self.success_untrained)

    def _successes(self, **values: float | None) -> dict[str, float | None]:
        """Figures of success; none where the rule does not know them."""
        known = self.rule.is_known
        return {name: value for name, value in values.items() if known and value is not None}

    def add_worker(self, worker_id: str) -> None:
        """A rollout came from there."""
        is_known = worker_id in self.workers or len(self.workers) < MAX_WORKERS
        self.workers[worker_id if is_known else OTHER_WORKERS] += 1

    def summary(self) -> dict[str, Any]:
        """The training side of summary.json."""
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


def mean(values: Sequence[float]) -> float | None:
    """Rounded to six significant digits; None of nothing."""
    return float(f"{math.fsum(values) / len(values):.6g}") if values else None


def share(part: int, whole: int) -> float:
    """Rounded; 0 of nothing."""
    return round(part / whole, 4) if whole else 0.0


def read_recoveries(folder: Path) -> list[dict[str, Any]]:
    """What lives of the trainer after the first began with; a torn last row is left out."""
    path = folder / RECOVERIES
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [msgspec.json.decode(line) for line in lines]


def lives_of(folder: Path) -> dict[str, int]:
    """How often the run's trainer began, and what it did again for that."""
    rows = read_recoveries(folder)
    num_redone = sum(len(row["redone_steps"]) for row in rows)
    return {"num_lives": len(rows) + 1, "num_steps_redone": num_redone}


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """summary.json, whole or not at all."""
    part = folder / "summary.json.part"
    part.write_bytes(msgspec.json.format(encode_row(summary), indent=2) + b"\n")
    part.replace(folder / "summary.json")
