"""Scores against brute force, interval coverage, and success by report, reward or threshold."""

import itertools
import math
import random
from statistics import NormalDist, stdev
from typing import Any

import msgspec
import pytest

from rollmesh.core.types import Outcome
from rollmesh.serve.client.evaluation_files import Row
from rollmesh.serve.client.scores import (
    Cluster,
    Estimate,
    Failure,
    SuccessRule,
    average,
    pass_at_k,
    report_of,
    share,
)


def row(task_id: str, outcome: str = "completed", **more: object) -> Row:
    fields: dict[str, object] = {"reward": 0.0, "group_id": "r1/0", "index": 0, "num_samples": 1}
    if outcome not in ("completed", "truncated"):
        fields["reward"] = None
    return Row(task_id=task_id, outcome=outcome, **(fields | more))  # type: ignore[arg-type]


def interval_ends(estimate: Estimate | None) -> tuple[float, float]:
    """Return the interval_ends of its interval."""
    assert estimate is not None
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low, estimate.high


@pytest.mark.parametrize("num_successes", range(6))
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_draws_with_a_success(num_successes: int, k: int) -> None:
    outcomes = [True] * num_successes + [False] * (5 - num_successes)
    draws = [any(draw) for draw in itertools.combinations(outcomes, k)]
    assert pass_at_k(5, num_successes, k) == pytest.approx(sum(draws) / len(draws))


def test_pass_at_k_is_unbiased() -> None:
    """Over all outcomes of n rollouts, weighted by probability, the mean is 1 - (1 - p)^k."""
    p, n, k = 0.3, 6, 4
    mean = sum(
        math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1)
    )
    assert mean == pytest.approx(1 - (1 - p) ** k)


def test_infrastructure_faults_are_excluded_and_agent_errors_are_failures() -> None:
    rows = [
        row("a", reward=1.0),
        row("a", outcome="truncated", reward=0.0),
        row("b", outcome=Outcome.AGENT_ERROR),
        row("c", outcome="quarantined", has_result=False),
        row("b", outcome=Outcome.INFRA_ERROR, error="no engine"),
        row("b", outcome=Outcome.INFRA_ERROR, error="again no engine"),
    ]
    report = report_of(rows)
    assert (report.num_tasks, report.num_rollouts, report.num_truncated) == (2, 3, 1)
    assert report.success is not None
    assert report.success.mean == pytest.approx(1 / 3)
    assert report.reward is not None
    assert report.reward.mean == pytest.approx(1 / 3)
    assert list(report.failures.items()) == [
        (
            "infra_error",
            Failure(
                2,
                {"no engine": 1, "again no engine": 1},
                0,
                {"no engine": "b", "again no engine": "b"},
            ),
        ),
        ("agent_error", Failure(1, {}, 0)),
        ("quarantined", Failure(1, {}, 0)),
    ]


def test_the_most_frequent_errors_of_a_cause_are_listed_and_the_others_counted() -> None:
    errors = ["a", "b", "b", "c", "c", "c", "d", "d", "d", "d", "e"]
    rows = [row("t", outcome=Outcome.INFRA_ERROR, error=error) for error in errors]
    assert report_of(rows).failures == {
        "infra_error": Failure(11, {"d": 4, "c": 3, "b": 2}, 2, dict.fromkeys("bcd", "t"))
    }


def test_the_success_that_the_environment_reports_goes_before_the_rewards() -> None:
    report = report_of([row("a", reward=0.5, metrics={"success": 0.0}), row("b", reward=0.5)])
    assert report.success is not None
    assert report.success.mean == 0.0, "the environment reports success, and did not for b"


def test_rewards_that_are_not_0_or_1_give_no_success_and_no_pass_at_k() -> None:
    rows = [row("t", reward=0.155, num_samples=4) for _ in range(4)]
    report = report_of(rows)
    assert report.reward is not None
    assert report.reward.mean == pytest.approx(0.155)
    assert (report.success, report.pass_at) == (None, {})
    report_fields = msgspec.json.decode(msgspec.json.encode(report), type=dict[str, Any])
    assert not {"success", "pass_at"} & report_fields.keys(), "absent, not 0"


def test_a_threshold_defines_success_if_nothing_else_does() -> None:
    rows = [row("t", reward=reward, num_samples=2) for reward in (0.2, 0.9)]
    report = report_of(rows, pass_threshold=0.5)
    assert report.success is not None
    assert report.success.mean == 0.5
    assert report.pass_at[2].mean == 1.0


def test_environment_metrics_have_means_over_the_rollouts_that_have_them() -> None:
    rows = [
        row("a", metrics={"turns": 2.0}),
        row("a", metrics={"turns": 4.0, "tests": 1.0}),
        row("b", outcome=Outcome.AGENT_ERROR),
    ]
    metrics = report_of(rows).metrics
    assert {name: each.mean for name, each in metrics.items()} == {"turns": 3.0, "tests": 1.0}


def test_pass_at_1_is_the_success_rate_and_grows_with_k() -> None:
    rng = random.Random(3)
    rows = [
        row(f"t{task}", reward=float(rng.random() < 0.4), num_samples=4)
        for task in range(9)
        for _ in range(4)
    ]
    report = report_of(rows)
    assert list(report.pass_at) == [1, 2, 4]
    assert report.success is not None
    assert report.pass_at[1].mean == pytest.approx(report.success.mean)
    means = [estimate.mean for estimate in report.pass_at.values()]
    assert means == sorted(means)


def test_pass_at_k_counts_the_tasks_with_at_least_k_rollouts() -> None:
    rows = [row(task, num_samples=4, reward=float(task == "a")) for task in "aaaabbb"]
    pass_at = report_of(rows).pass_at
    assert {k: each.num_tasks for k, each in pass_at.items()} == {1: 2, 2: 2, 4: 1}
    assert pass_at[4].mean == 1.0
    posed_twice = [row("a", num_samples=2) for _ in range(4)]
    assert list(report_of(posed_twice).pass_at) == [1, 2]
    assert list(report_of([row(task, num_samples=4) for task in "aab"]).pass_at) == [1, 2]


def test_a_score_of_no_rollouts_is_none() -> None:
    report = report_of([row("a", outcome="env_failed", has_result=False)])
    assert (report.success, report.reward, report.s_per_rollout) == (None, None, None)
    assert report.pass_at == {}


def test_the_interval_is_wilsons_for_independent_rollouts() -> None:
    n, c = 40, 12
    estimate = share([Cluster(1, float(number < c)) for number in range(n)])
    assert estimate is not None
    # By the formula for fewer than n: sample variance and Student's quantile.
    z, p, t = NormalDist().inv_cdf(0.975), c / n, 2.02269
    m = (n - 1) * (z / t) ** 2
    half = z * math.sqrt(p * (1 - p) / m + z**2 / (4 * m**2)) / (1 + z**2 / m)
    low, high = interval_ends(estimate)
    assert high - low == pytest.approx(2 * half, rel=1e-4)


def test_the_interval_of_unanimous_rollouts_is_not_empty() -> None:
    estimate = share([Cluster(4, 1.0)] * 10)
    assert estimate is not None
    assert estimate.mean == estimate.high == 1.0
    assert 0.6 < interval_ends(estimate)[0] < 0.9


def coverage(num_tasks: int, num_samples: int) -> float:
    """Return how often the interval contains the true value, for tasks of different difficulty."""
    rng = random.Random(5)
    held = 0
    for _ in range(400):
        clusters = []
        for _ in range(num_tasks):
            chance = rng.betavariate(2.0, 2.0)  # half of them succeed in the long run
            wins = sum(rng.random() < chance for _ in range(num_samples))
            clusters.append(Cluster(num_samples, wins / num_samples))
        low, high = interval_ends(share(clusters))
        held += low <= 0.5 <= high
    return held / 400


@pytest.mark.parametrize(("num_tasks", "num_samples"), [(6, 8), (20, 1), (20, 8), (60, 4)])
def test_intervals_contain_the_true_value_at_their_nominal_rate(
    num_tasks: int, num_samples: int
) -> None:
    assert 0.91 < coverage(num_tasks, num_samples) < 0.99


def test_rewards_may_be_any_number() -> None:
    estimate = average([Cluster(1, -3.0), Cluster(1, 5.0)])
    assert estimate is not None
    assert estimate.mean == 1.0
    # Student's quantile for two tasks is 12.706, and the standard error is 4.
    assert estimate.low == pytest.approx(1.0 - 4 * 12.7062, rel=1e-5)
    assert estimate.high == pytest.approx(1.0 + 4 * 12.7062, rel=1e-5)


def test_a_single_task_has_no_reward_interval() -> None:
    report = report_of([row("a", reward=0.25), row("a", reward=0.75)])
    assert report.reward is not None
    assert (report.reward.mean, report.reward.low, report.reward.high) == (0.5, None, None)


def test_rewards_of_0_and_1_have_the_interval_of_successes() -> None:
    report = report_of([row(task, reward=float(task < "c")) for task in "aabbcddd"])
    assert report.reward == report.success
    mixed = report_of([row(task, reward=0.5 * (task < "c")) for task in "aabbcddd"])
    assert mixed.success is None


@pytest.mark.parametrize(
    ("num_tasks", "quantile"),
    [(2, 12.7062), (3, 4.30265), (4, 3.18245), (5, 2.77645), (11, 2.22814), (1001, 1.96234)],
)
def test_the_interval_is_students(num_tasks: int, quantile: float) -> None:
    """Compared with tables, for values with a standard error of 1."""
    values = [float(number) for number in range(num_tasks)]
    error = stdev(values) / math.sqrt(num_tasks)
    estimate = average([Cluster(1, value / error) for value in values])
    assert estimate is not None
    assert interval_ends(estimate)[1] - estimate.mean == pytest.approx(quantile, rel=0.01)


@pytest.mark.parametrize("num_tasks", range(1, 40))
def test_the_interval_of_all_or_no_successes_reaches_1_or_0(num_tasks: int) -> None:
    every, none = (interval_ends(share([Cluster(3, value)] * num_tasks)) for value in (1.0, 0.0))
    assert (every[1], none[0]) == (1.0, 0.0)
    assert every[0] < 1.0
    assert none[1] > 0.0


Seen = list[tuple[float, dict[str, float]]]


def successes(seen: Seen, pass_threshold: float | None = None) -> list[float | None]:
    rule = SuccessRule(pass_threshold)
    for reward, metrics in seen:
        rule.see(reward, metrics)
    found = [rule.success_of(reward, metrics) for reward, metrics in seen]
    assert rule.is_known == (None not in found)
    return found


def test_a_small_positive_reward_is_no_success_by_itself() -> None:
    assert successes([(0.155, {}), (0.0, {})]) == [None, None]


def test_rewards_of_0_and_1_are_failures_and_successes() -> None:
    assert successes([(1.0, {}), (0.0, {}), (1.0, {"turns": 3.0})]) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("other", [0.5, -1.0, 2.0])
def test_any_other_reward_of_the_environment_makes_success_unknown(other: float) -> None:
    assert successes([(1.0, {}), (other, {})]) == [None, None]


def test_rewards_that_reach_the_threshold_are_successes() -> None:
    assert successes([(0.155, {}), (0.5, {}), (0.9, {})], 0.5) == [0.0, 1.0, 1.0]


def test_the_environments_report_goes_before_threshold_and_rewards() -> None:
    seen: Seen = [(0.155, {"success": 0.0}), (0.2, {"success": 1.0}), (1.0, {})]
    assert successes(seen, pass_threshold=0.1) == [0.0, 1.0, 0.0]


def test_a_rollout_without_a_reward_is_ignored_when_success_is_inferred() -> None:
    rule = SuccessRule()
    rule.see(None, {})
    assert rule.success_of(1.0, {}) == 1.0
