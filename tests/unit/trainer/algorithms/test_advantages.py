"""Group-relative advantages: the formulas, and the cases that give exactly zero."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.algorithms.advantages import (
    STD_FLOOR,
    Advantage,
    grpo,
    leave_one_out,
    mean_centred,
    sample_advantages,
)
from tests.unit.trainer.samples import new_sample

RULES: tuple[Advantage, ...] = (grpo, mean_centred, leave_one_out)


def test_grpo_divides_the_difference_from_the_mean_by_the_deviation() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0]
    std = statistics.stdev(rewards) + STD_FLOOR
    assert grpo(rewards) == pytest.approx([(r - 0.6) / std for r in rewards])


def test_leave_one_out_compares_with_the_others() -> None:
    rewards = [3.0, 1.0, 2.0]
    assert leave_one_out(rewards) == pytest.approx([1.5, -1.5, 0.0])
    assert mean_centred(rewards) == pytest.approx([1.0, -1.0, 0.0])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rewards", [[], [7.0], [0.1, 0.1, 0.1], [1, 1], [0.1 + 0.2, 0.3]])
def test_equal_siblings_and_single_rollouts_have_advantage_zero(
    rule: Advantage, rewards: list[float]
) -> None:
    assert rule(rewards) == [0.0] * len(rewards)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16), st.sampled_from(RULES))
def test_advantages_balance_and_keep_the_order_of_rewards(
    rewards: list[float], rule: Advantage
) -> None:
    advantages = rule(rewards)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-6)
    for one, other in zip(range(len(rewards)), range(1, len(rewards)), strict=False):
        if rewards[one] > rewards[other]:
            assert advantages[one] >= advantages[other]


def test_rewards_are_compared_within_a_group_and_a_rollout_counts_once() -> None:
    def sample(seq: int, index: int, reward: float) -> Sample:
        return new_sample([1, 2], [0, 1], seq=seq, index=index, reward=reward)

    twice = sample(0, 0, 1.0)  # cut into two samples
    samples = [twice, sample(1, 0, 5.0), twice, sample(0, 1, 0.0), sample(1, 1, 3.0)]
    assert sample_advantages(samples, mean_centred).tolist() == [0.5, 1.0, 0.5, -0.5, -1.0]


def test_a_baseline_counts_siblings_that_have_no_sample() -> None:
    rewards = (1.0, 0.0, 0.0, 0.0)
    alone = new_sample([1, 2], [0, 1], reward=1.0, sibling_rewards=rewards)
    assert sample_advantages([alone], mean_centred).tolist() == [0.75]
