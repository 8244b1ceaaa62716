"""How much better a rollout did than its siblings: group-relative advantages.

With r the n rewards of one group, the advantage of rollout i is

    grpo           (r_i - mean(r)) / (std(r) + 1e-4)      std with n - 1; GRPO, eq. 3 of Shao et al.
                                                          2024, "DeepSeekMath"
    mean           r_i - mean(r)                          Liu et al. 2025, "Understanding
                                                          R1-Zero-Like Training" (Dr. GRPO)
    leave_one_out  r_i - mean of the others' rewards      Ahmadian et al. 2024, "Back to Basics"
                                                          (RLOO)

- Siblings with equal rewards get exactly zero, and so does an only child.
- Rewards are equal if they differ by no more than float64 rounds.
- A rollout counts once in its group's mean, however many samples its token graph was cut into, and
  also if none of its tokens trains.
"""

import math
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rollmesh.core.config import AdvantageRule
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.serve.client.samples import Sample

STD_FLOOR = 1e-4
EQUAL_SHARE = 1e-9
"""Rewards that differ by less than this share of the larger are equal: sums in another order
differ by about 1e-16 for each term."""


def group_advantages(rewards: Sequence[float], rule: AdvantageRule) -> list[float]:
    """The advantage of each sibling, in the order of `rewards`."""
    if rewards_equal(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    match rule:
        case "grpo":
            scale = 1.0 / (statistics.stdev(rewards) + STD_FLOOR)
        case "mean":
            scale = 1.0
        case "leave_one_out":
            scale = len(rewards) / (len(rewards) - 1)
    return [(reward - mean) * scale for reward in rewards]


def rewards_equal(rewards: Sequence[float]) -> bool:
    """Whether no sibling did better than another, so that the group teaches nothing."""
    if len(rewards) < 2:
        return True
    return math.isclose(min(rewards), max(rewards), rel_tol=EQUAL_SHARE, abs_tol=1e-12)


def sample_advantages(samples: Sequence[Sample], rule: AdvantageRule) -> npt.NDArray[np.float32]:
    """[len(samples)]: each sample has its rollout's advantage."""
    given: dict[GroupId, dict[RolloutId, float]] = {}
    known: dict[GroupId, Sequence[float]] = {}
    for sample in samples:
        given.setdefault(sample.group_id, {})[sample.rollout_id] = sample.reward
        if sample.sibling_rewards:
            known[sample.group_id] = sample.sibling_rewards
    advantages: dict[GroupId, dict[float, float]] = {}
    for group_id, own in given.items():
        rewards = known.get(group_id) or list(own.values())
        # Equal rewards have equal advantages, so the reward is key enough.
        advantages[group_id] = dict(zip(rewards, group_advantages(rewards, rule), strict=True))
    told = [advantages[sample.group_id][sample.reward] for sample in samples]
    return np.array(told, np.float32)
