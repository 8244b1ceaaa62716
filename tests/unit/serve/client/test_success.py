"""Success: reported, or by rewards that are 0 or 1, or by a threshold, or else unknown."""

import pytest

from rollmesh.serve.client.scores import SuccessRule

Seen = list[tuple[float, dict[str, float]]]


def successes(seen: Seen, pass_threshold: float | None = None) -> list[float | None]:
    rule = SuccessRule(pass_threshold)
    for reward, metrics in seen:
        rule.see(reward, metrics)
    found = [rule.success_of(reward, metrics) for reward, metrics in seen]
    assert rule.is_known == (None not in found)
    return found


def test_a_small_positive_reward_is_no_success() -> None:
    assert successes([(0.155, {}), (0.0, {})]) == [None, None]


def test_rewards_of_0_and_1_are_failures_and_successes() -> None:
    assert successes([(1.0, {}), (0.0, {}), (1.0, {"turns": 3.0})]) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("other", [0.5, -1.0, 2.0])
def test_any_other_reward_of_the_environment_makes_success_unknown(other: float) -> None:
    assert successes([(1.0, {}), (other, {})]) == [None, None]


def test_with_a_threshold_rewards_that_reach_it_are_successes() -> None:
    assert successes([(0.155, {}), (0.5, {}), (0.9, {})], 0.5) == [0.0, 1.0, 1.0]


def test_what_the_environment_reports_goes_before_threshold_and_rewards() -> None:
    seen: Seen = [(0.155, {"success": 0.0}), (0.2, {"success": 1.0}), (1.0, {})]
    assert successes(seen, pass_threshold=0.1) == [0.0, 1.0, 0.0]


def test_a_rollout_without_a_reward_says_nothing_of_the_environment() -> None:
    rule = SuccessRule()
    rule.see(None, {})
    assert rule.success_of(1.0, {}) == 1.0
