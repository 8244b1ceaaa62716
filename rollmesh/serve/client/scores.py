"""Figures of an evaluation: success, means, pass@k, confidence intervals, failures by cause.

    success:  metric `success` of Score, 1 or 0, if the environment reports it; missing is failed
              reward >= pass_threshold, if that is set
              reward == 1, if all rewards seen are 0 or 1
              otherwise unknown: success and pass@k are left out

- Rollouts lost to infrastructure faults are excluded and counted among the failures; a rollout
  whose agent broke counts as failed.
- Errors are clustered by task (E. Miller, "Adding Error Bars to Evals", arXiv:2411.00640).
  Intervals of shares are Wilson's score interval (JASA 22, 1927) with the effective number of
  independent rollouts (E. Korn and B. Graubard, Survey Methodology 24, 1998).
- Pure.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import NormalDist, fmean

import msgspec

from rollmesh.core.types import TRAINED_OUTCOMES, Outcome
from rollmesh.serve.client.evaluation_files import Row

SUCCESS = "success"
"""Metric of Score by which an environment reports success."""


class SuccessRule(msgspec.Struct):
    """The success rule of one environment, derived from its rollouts so far."""

    pass_threshold: float | None = None
    is_reported: bool = False
    """Whether a rollout had the metric `success`."""
    is_binary: bool = True
    """Whether all rewards were 0 or 1."""

    @property
    def is_known(self) -> bool:
        """Return whether the success of a rollout can be decided."""
        return self.is_reported or self.pass_threshold is not None or self.is_binary

    def see(self, reward: float | None, metrics: Mapping[str, float]) -> None:
        """Account for a rollout; a reward of None is no reward."""
        self.is_reported = self.is_reported or SUCCESS in metrics
        self.is_binary = self.is_binary and reward in (None, 0.0, 1.0)

    def success_of(self, reward: float, metrics: Mapping[str, float]) -> float | None:
        """Return the rollout's success in [0, 1], 1 if it passed; None if that is unknown."""
        if self.is_reported:
            return min(max(metrics.get(SUCCESS, 0.0), 0.0), 1.0)
        if self.pass_threshold is not None:
            return float(reward >= self.pass_threshold)
        return reward if self.is_binary else None


CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
NUM_ERRORS = 3
"""Errors that are listed per cause."""
COUNTED = (*TRAINED_OUTCOMES, Outcome.AGENT_ERROR)


class Estimate(msgspec.Struct, frozen=True):
    """A mean, and the interval that contains the true one with probability CONFIDENCE."""

    mean: float
    low: float | None
    """None if there is only one task."""
    high: float | None
    num_tasks: int
    """Number of values in the mean."""


class Cluster(msgspec.Struct, frozen=True):
    """One task's part in a mean."""

    weight: int
    """Number of its rollouts."""
    value: float


class Failure(msgspec.Struct, frozen=True):
    """Failures with one cause."""

    num_rollouts: int
    errors: dict[str, int]
    """Rollouts by error text; the NUM_ERRORS most frequent."""
    num_others: int
    """Rollouts with other error texts."""
    tasks: dict[str, str] = {}
    """For each of `errors`, the first task that had it."""


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An evaluation in figures; None if nothing was counted."""

    num_tasks: int
    """Different tasks with a rollout that counts."""
    num_rollouts: int
    """Rollouts that count."""
    reward: Estimate | None
    """Mean reward, 0 for rollouts whose agent broke."""
    failures: dict[str, Failure]
    """Failures by cause: an outcome, or the code of a group's end; most frequent first."""
    num_truncated: int
    """Rollouts that a limit ended; they count."""
    tokens_per_rollout: float | None
    """Sampled tokens; None if the endpoint reported none."""
    turns_per_rollout: float | None
    s_per_rollout: float | None
    success: Estimate | None = None
    """Share of rollouts that succeeded, by the rule of scores.py; None if it is not known."""
    pass_at: dict[int, Estimate] = {}
    """By k: the probability that at least one of k rollouts of a task succeeds, over the tasks with
    that many rollouts; empty if success is not known.
    """
    metrics: dict[str, Estimate] = {}
    """By the environment's own name, over the rollouts that have it."""


def report_of(rows: Sequence[Row], pass_threshold: float | None = None) -> Report:
    """Return the figures of all rows; `pass_threshold` as in the config."""
    counted = [row for row in rows if row.outcome in COUNTED]
    by_task: dict[str, list[Row]] = defaultdict(list)
    for row in counted:
        by_task[row.task_id].append(row)
    tasks = list(by_task.values())
    rule = SuccessRule(pass_threshold)
    for row in counted:
        rule.see(row.reward, row.metrics)

    def success(row: Row) -> float:
        return rule.success_of(reward(row), row.metrics) or 0.0

    return Report(
        num_tasks=len(tasks),
        num_rollouts=len(counted),
        reward=_reward(tasks),
        success=share(_clusters(tasks, success)) if rule.is_known else None,
        pass_at=_pass_at(tasks, success) if rule.is_known else {},
        metrics=_metrics(tasks),
        failures=_failures(row for row in rows if row.outcome not in TRAINED_OUTCOMES),
        num_truncated=sum(row.outcome == Outcome.TRUNCATED for row in counted),
        tokens_per_rollout=_mean(row.num_tokens for row in counted) or None,
        turns_per_rollout=_mean(row.num_calls for row in counted),
        s_per_rollout=_mean(row.duration_s for row in counted),
    )


def reward(row: Row) -> float:
    """Reward of a rollout, 0 if its agent broke."""
    return row.reward or 0.0


def pass_at_k(num_rollouts: int, num_successes: int, k: int) -> float:
    """Return the probability that one of k rollouts drawn without replacement is a success.

    An unbiased estimate of pass@k: 1 - C(n-c, k) / C(n, k), after M. Chen et al., "Evaluating Large
    Language Models Trained on Code", arXiv:2107.03374.
    """
    return 1.0 - math.comb(num_rollouts - num_successes, k) / math.comb(num_rollouts, k)


def share(clusters: Sequence[Cluster]) -> Estimate | None:
    """Return the mean of values in [0, 1]; its interval is not empty even if all values agree."""
    if not clusters:
        return None
    mean, variance = _moments(clusters)
    # Without any variance, rollouts of a task cannot be distinguished: each task counts for one.
    num = mean * (1 - mean) / variance if variance > 0 else float(len(clusters))
    num = max(num * (Z / _quantile(len(clusters))) ** 2, 1.0)
    middle = (mean + Z**2 / (2 * num)) / (1 + Z**2 / num)
    half = Z * math.sqrt(mean * (1 - mean) / num + (Z / (2 * num)) ** 2) / (1 + Z**2 / num)
    # At the ends the interval touches the mean, which sums of fractions miss by their last digit.
    low = 0.0 if mean <= 0 else max(0.0, middle - half)
    high = 1.0 if mean >= 1 else min(1.0, middle + half)
    return Estimate(mean, low, high, len(clusters))


def average(clusters: Sequence[Cluster]) -> Estimate | None:
    """Return the mean of any values with Student's interval; a single task has none."""
    if not clusters:
        return None
    mean, variance = _moments(clusters)
    if len(clusters) < 2:
        return Estimate(mean, None, None, 1)
    half = _quantile(len(clusters)) * math.sqrt(variance)
    return Estimate(mean, mean - half, mean + half, len(clusters))


def _reward(tasks: Sequence[Sequence[Row]]) -> Estimate | None:
    clusters = _clusters(tasks, reward)
    is_share = all(reward(row) in (0.0, 1.0) for rows in tasks for row in rows)
    return share(clusters) if is_share else average(clusters)


def _metrics(tasks: Sequence[Sequence[Row]]) -> dict[str, Estimate]:
    """Return means of the environment's metrics, by name."""
    found: dict[str, Estimate] = {}
    for name in sorted({name for rows in tasks for row in rows for name in row.metrics}):
        having = [[row for row in rows if name in row.metrics] for rows in tasks]
        clusters = _clusters([rows for rows in having if rows], lambda row: row.metrics[name])  # noqa: B023 - called here
        if estimate := average(clusters):
            found[name] = estimate
    return found


def _clusters(tasks: Sequence[Sequence[Row]], value: Callable[[Row], float]) -> list[Cluster]:
    return [Cluster(len(rows), fmean(map(value, rows))) for rows in tasks]


def _moments(clusters: Sequence[Cluster]) -> tuple[float, float]:
    """Return the weighted mean and the variance of that mean between clusters."""
    total = sum(each.weight for each in clusters)
    mean = sum(each.weight * each.value for each in clusters) / total
    num = len(clusters)
    if num < 2:
        return mean, 0.0
    scatter = sum((each.weight * (each.value - mean)) ** 2 for each in clusters)
    return mean, scatter / total**2 * num / (num - 1)


def _quantile(num_clusters: int) -> float:
    """Return Student's quantile in place of Z, since few tasks estimate their variance badly.

    In closed form for two and three tasks, else by Cornish and Fisher's expansion (Abramowitz and
    Stegun, 26.7.5), which is within 1 % from there on.
    """
    dof = max(num_clusters - 1, 1)
    if dof == 1:
        return math.tan(math.pi * CONFIDENCE / 2)
    if dof == 2:
        return CONFIDENCE * math.sqrt(2 / (1 - CONFIDENCE**2))
    terms = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
    )
    return Z + sum(term / float(dof) ** power for power, term in enumerate(terms, start=1))


def _pass_at(
    tasks: Sequence[Sequence[Row]], success: Callable[[Row], float]
) -> dict[int, Estimate]:
    """Return pass@k for k = 1, 2, 4 and so on up to a group's size, over the tasks with that many
    rollouts; a rollout passed if its success is 1.
    """
    found: dict[int, Estimate] = {}
    largest = max((row.num_samples for rows in tasks for row in rows), default=0)
    k = 1
    while k <= largest:
        clusters = [
            Cluster(len(rows), pass_at_k(len(rows), sum(success(row) >= 1 for row in rows), k))
            for rows in tasks
            if len(rows) >= k
        ]
        if estimate := share(clusters):
            found[k] = estimate
        k *= 2
    return found


def _failures(rows: Iterable[Row]) -> dict[str, Failure]:
    by_cause: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_cause[row.outcome].append(row)
    found = {cause: _failure(each) for cause, each in by_cause.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1].num_rollouts))


def _failure(rows: list[Row]) -> Failure:
    texts = Counter(row.error for row in rows if row.error)
    errors = dict(texts.most_common(NUM_ERRORS))
    tasks = {row.error: row.task_id for row in reversed(rows) if row.error in errors}
    return Failure(len(rows), errors, texts.total() - sum(errors.values()), tasks)


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return fmean(numbers) if numbers else None
