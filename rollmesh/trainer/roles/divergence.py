"""Estimates of KL(policy || reference) from the log-probs of sampled tokens, in nats.

With d = l - r, of the log-probs of one token under the policy (l) and under the reference (r):

          value               its mean is the KL   the mean of its gradient is
    k1    d                   yes                  0: no loss, but what shapes rewards
    k2    d^2 / 2             near d = 0           the KL's gradient, exactly
    k3    exp(-d) - 1 + d     yes                  the gradient of KL(reference || policy)

Means are over tokens that the policy sampled. Sources: Schulman 2020, "Approximating KL
Divergence"; for gradients Tang and Munos 2025, "On a few pitfalls in KL divergence gradient
estimation for RL"; k3 as a loss: Shao et al. 2024, "DeepSeekMath", eq. 4.
Shapes: N trained tokens.
"""

from typing import Literal

import torch
from torch import Tensor

Estimate = Literal["k1", "k2", "k3"]
NO_LOSS = (
    'kl_estimate = "k1" trains nothing: its expected gradient is 0; use "k2", whose gradient is '
    'the divergence\'s, or "k3"'
)


def divergence(logprobs_N: Tensor, reference_N: Tensor, estimate: Estimate) -> Tensor:
    """[N], in nats."""
    drift_N = logprobs_N - reference_N
    match estimate:
        case "k1":
            return drift_N
        case "k2":
            return drift_N.square() / 2
        case "k3":
            return torch.expm1(-drift_N) + drift_N
