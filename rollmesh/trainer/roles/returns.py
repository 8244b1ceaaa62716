"""What a rollout's tokens earned, and how much more than its critic foresaw.

With values V_0 .. V_{n-1}, each of what stood before one of the n trained tokens, rewards r_0 ..
r_{n-1} that followed them, discount g and trace decay a:

    delta_t      =  r_t + g V_{t+1} - V_t             V_n = 0: the rollout has ended
    advantage_t  =  delta_t + g a advantage_{t+1}     advantage_n = 0
    return_t     =  advantage_t + V_t                 what the critic learns

Source: Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage
Estimation", eq. 16. Only trained tokens are steps: what tools and users say in between is the
environment's answer, which takes no time. The reward of the whole comes with its last token, and
each token pays for leaving the reference (Ouyang et al. 2022, "Training language models to follow
instructions with human feedback", eq. 2; Schulman 2020's k1). Sums are in float64. Pure. Driven by
the scalar role. Shapes: N trained tokens of one rollout.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Returns(NamedTuple):
    """Of one rollout."""

    advantages_N: Tensor
    returns_N: Tensor


def token_rewards(reward: float, divergence_N: Tensor, kl_coef: float) -> Tensor:
    """[N] float32: each token's price, and the reward with the last."""
    rewards_N = -kl_coef * divergence_N.float()
    rewards_N[-1:] += reward
    return rewards_N


def estimate(rewards_N: Tensor, values_N: Tensor, discount: float, trace: float) -> Returns:
    """The formulas above, in float32."""
    values = values_N.double()
    nexts = torch.cat([values[1:], values.new_zeros(1)])[: len(values)]
    deltas = (rewards_N.double() + discount * nexts - values).tolist()
    backwards = accumulate(reversed(deltas), lambda later, delta: delta + discount * trace * later)
    advantages = torch.tensor([*backwards][::-1], dtype=torch.float64)
    return Returns(advantages.float(), (advantages + values).float())
