"""Formulas of critics, reward models and preferences, each with its source.

- A loss is per token or pair and carries the gradient; the caller sums over a step and divides by
  the number on all ranks.
- No gradient flows through values from before the step: old values, returns, references.

Shapes: N trained tokens, P pairs.
"""

from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


class ValueLoss(NamedTuple):
    """The loss of a critic at N tokens."""

    losses_N: Tensor
    is_clipped_N: Tensor
    """Where the clip limits the value."""


def value_loss(values_N: Tensor, old_N: Tensor, returns_N: Tensor, clip: float) -> ValueLoss:
    """max((v - R)^2, (clamp(v, old - clip, old + clip) - R)^2) / 2, in squared rewards.

    Squared error to the returns (Schulman et al. 2016; 2017, "PPO", eq. 9); the clip is
    that of the authors' code (openai/baselines, ppo2): moving a value further than `clip` from its
    value before the step reduces no loss. An infinite `clip` disables it.
    """
    bounded_N = values_N.clamp(old_N - clip, old_N + clip)
    free_N = (values_N - returns_N).square()
    held_N = (bounded_N - returns_N).square()
    return ValueLoss(torch.maximum(free_N, held_N) / 2, held_N > free_N)


def preference_margins(logprobs_P2: Tensor, reference_P2: Tensor, beta: float) -> Tensor:
    """[P]: how much more than its reference a policy prefers the first of each pair.

    beta * ((l_first - r_first) - (l_second - r_second)), log-probs of whole answers in nats: the
    difference of DPO's implicit rewards (Rafailov et al. 2023, "Direct Preference Optimization",
    eq. 7).
    """
    gains_P2 = logprobs_P2 - reference_P2
    return beta * (gains_P2[:, 0] - gains_P2[:, 1])


def duel_loss(margins_P: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """[P]: -(1 - e) log sigmoid(m) - e log sigmoid(-m), in nats, for margins m and smoothing e.

    The first of each pair should win, by the model of Bradley and Terry 1952. With differences of
    rewards as margins it trains a reward model (Ouyang et al. 2022, eq. 1), with those of DPO a
    policy. `label_smoothing` is the assumed share of swapped pairs (Mitchell 2023, "A note on DPO
    with noisy preferences").
    """
    return -(1.0 - label_smoothing) * logsigmoid(margins_P) - label_smoothing * logsigmoid(
        -margins_P
    )


class Returns(NamedTuple):
    """Advantages and returns of one rollout."""

    advantages_N: Tensor
    returns_N: Tensor


def token_rewards(reward: float, divergence_N: Tensor, kl_coef: float) -> Tensor:
    """[N] float32: -kl_coef * divergence at each token, and the reward added at the last.

    Ouyang et al. 2022, "Training language models to follow instructions with human feedback",
    eq. 2, with Schulman 2020's k1 as divergence.
    """
    rewards_N = -kl_coef * divergence_N.float()
    rewards_N[-1:] += reward
    return rewards_N


def gae(rewards_N: Tensor, values_N: Tensor, discount: float, trace: float) -> Returns:
    """Generalized advantage estimation, in float32; sums are in float64.

    With values V_0 .. V_{n-1}, each estimated before one of the n trained tokens, rewards r_0 ..
    r_{n-1} that followed them, discount g and trace decay a:

        delta_t      =  r_t + g V_{t+1} - V_t             V_n = 0: the rollout has ended
        advantage_t  =  delta_t + g a advantage_{t+1}     advantage_n = 0
        return_t     =  advantage_t + V_t                 the target of the critic

    Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation", eq. 16. Only trained tokens are steps: messages of tools and users in between are
    the environment's response and take no time.
    """
    values = values_N.double()
    nexts = torch.cat([values[1:], values.new_zeros(1)])[: len(values)]
    deltas = (rewards_N.double() + discount * nexts - values).tolist()
    backwards = accumulate(reversed(deltas), lambda later, delta: delta + discount * trace * later)
    advantages = torch.tensor([*backwards][::-1], dtype=torch.float64)
    return Returns(advantages.float(), (advantages + values).float())


Estimate = Literal["k1", "k2", "k3"]
NO_LOSS = (
    'kl_estimate = "k1" trains nothing: its expected gradient is 0; use "k2", whose gradient is '
    'the divergence\'s, or "k3"'
)


def divergence(logprobs_N: Tensor, reference_N: Tensor, estimate: Estimate) -> Tensor:
    """[N]: an estimate of KL(policy || reference) from the log-probs of sampled tokens, in nats.

    With d = l - r, of the log-probs of one token under the policy (l) and under the reference (r):

              value               its mean is the KL   the mean of its gradient is
        k1    d                   yes                  0: no loss; it shapes rewards
        k2    d^2 / 2             near d = 0           the KL's gradient, exactly
        k3    exp(-d) - 1 + d     yes                  the gradient of KL(reference || policy)

    Means are over tokens that the policy sampled. Sources: Schulman 2020, "Approximating KL
    Divergence"; for gradients Tang and Munos 2025, "On a few pitfalls in KL divergence gradient
    estimation for RL"; k3 as a loss: Shao et al. 2024, "DeepSeekMath", eq. 4.
    """
    drift_N = logprobs_N - reference_N
    match estimate:
        case "k1":
            return drift_N
        case "k2":
            return drift_N.square() / 2
        case "k3":
            return torch.expm1(-drift_N) + drift_N
