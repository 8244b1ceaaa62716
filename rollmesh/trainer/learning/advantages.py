"""How much better a rollout did than its siblings: group-relative advantages.

With r the n rewards of one group, the advantage of rollout i is

    grpo           (r_i - mean(r)) / (std(r) + 1e-4)      std with n - 1; GRPO, eq. 3 of Shao et al.
                                                          2024, "DeepSeekMath"
    mean           r_i - mean(r)                          Liu et al. 2025, "Understanding
                                                          R1-Zero-Like Training" (Dr. GRPO)
    leave_one_out  r_i - mean of the others' rewards      Ahmadian et al. 2024, "Back to Basics"
                                                          (RLOO)

Invariant: siblings with equal rewards get exactly zero, and so does an only child; a rollout counts
once in its group's mean however many samples its token graph was cut into. Driven by the policy,
once per train step.
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


def group_advantages(rewards: Sequence[float], rule: AdvantageRule) -> list[float]:
    """The advantage of each sibling, in the order of `rewards`."""
    if len(rewards) < 2 or min(rewards) == max(rewards):
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


def sample_advantages(samples: Sequence[Sample], rule: AdvantageRule) -> npt.NDArray[np.float32]:
    """[len(samples)]: each sample has its rollout's advantage."""
    rewards: dict[GroupId, dict[RolloutId, float]] = {}
    for sample in samples:
        rewards.setdefault(sample.group_id, {})[sample.rollout_id] = sample.reward
    advantages: dict[RolloutId, float] = {}
    for group in rewards.values():
        values = group_advantages(list(group.values()), rule)
        advantages.update(zip(group, values, strict=True))
    return np.array([advantages[sample.rollout_id] for sample in samples], np.float32)
