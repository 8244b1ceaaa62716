"""The counts of a run, and summary.json.

- num_asked = num_trained + num_dropped + num_open + num_lost, all in rollouts. num_lost is what
  this equation leaves, never a counter of its own.
- summary.json is written each second while the run trains, and at the end.
"""

import collections
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.core.types import Json
from rollmesh.serve.client.scores import SuccessRule
from rollmesh.serve.client.trajectories import encode_row
from rollmesh.trainer.reports.exactness import ExactnessTotals

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
