"""Group-relative advantages: a rollout's reward compared with those of its siblings.

With r the n rewards of one group, the advantage of rollout i is

    grpo           (r_i - mean(r)) / (std(r) + 1e-4)      std with n - 1; GRPO, eq. 3 of Shao et al.
                                                          2024, "DeepSeekMath"
    mean           r_i - mean(r)                          Liu et al. 2025, "Understanding
                                                          R1-Zero-Like Training" (Dr. GRPO)
    leave_one_out  r_i - mean of the others' rewards      Ahmadian et al. 2024, "Back to Basics"
                                                          (RLOO)

- Siblings with equal rewards get exactly zero, and so does an only child.
- Rewards are equal if they differ by no more than float64 rounding.
- A rollout counts once in its group's mean, however many samples its token graph was cut into, and
  also if none of its tokens trains.
"""

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.serve.client.samples import Sample

Advantage = Callable[[Sequence[float]], Sequence[float]]
"""From the rewards of one group's rollouts to an advantage for each, in the same order; equal
rewards must get equal advantages."""

STD_FLOOR = 1e-4
EQUAL_SHARE = 1e-9
"""Rewards that differ by less than this share of the larger one are equal: sums in another order
differ by about 1e-16 for each term."""


def grpo(rewards: Sequence[float]) -> list[float]:
    """Difference from the group's mean, over its standard deviation."""
    if rewards_equal(rewards):
        return [0.0] * len(rewards)
    return _centred(rewards, 1.0 / (statistics.stdev(rewards) + STD_FLOOR))


def mean_centred(rewards: Sequence[float]) -> list[float]:
    """Difference from the group's mean."""
    return [0.0] * len(rewards) if rewards_equal(rewards) else _centred(rewards, 1.0)


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Difference from the mean of the other rewards."""
    if rewards_equal(rewards):
        return [0.0] * len(rewards)
    return _centred(rewards, len(rewards) / (len(rewards) - 1))


def _centred(rewards: Sequence[float], scale: float) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    return [(reward - mean) * scale for reward in rewards]


def rewards_equal(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal, so that the group trains nothing."""
    if len(rewards) < 2:
        return True
    return math.isclose(min(rewards), max(rewards), rel_tol=EQUAL_SHARE, abs_tol=1e-12)


def sample_advantages(samples: Sequence[Sample], advantage: Advantage) -> npt.NDArray[np.float32]:
    """[len(samples)]: each sample has the advantage of its rollout."""
    own_rewards: dict[GroupId, dict[RolloutId, float]] = {}
    all_rewards: dict[GroupId, Sequence[float]] = {}
    for sample in samples:
        own_rewards.setdefault(sample.group_id, {})[sample.rollout_id] = sample.reward
        if sample.sibling_rewards:
            all_rewards[sample.group_id] = sample.sibling_rewards
    by_reward: dict[GroupId, dict[float, float]] = {}
    for group_id, own in own_rewards.items():
        rewards = all_rewards.get(group_id) or list(own.values())
        # Equal rewards have equal advantages, so the reward is a sufficient key.
        by_reward[group_id] = dict(zip(rewards, advantage(rewards), strict=True))
    advantages = [by_reward[sample.group_id][sample.reward] for sample in samples]
    return np.array(advantages, np.float32)
