"""How far a policy has gone from a reference, estimated token by token.

With d = l - r, of the log-probs of one token under the policy (l) and under the reference (r):

    k1    d                   unbiased, of either sign; what rewards are shaped with
    k2    d^2 / 2             biased, never below 0; its gradient is that of the divergence
    k3    exp(-d) - 1 + d     unbiased, never below 0; GRPO's

where the token came from the policy: then their means estimate KL(policy || reference), in nats.
Source: Schulman 2020, "Approximating KL Divergence"; k3 as a loss: Shao et al. 2024,
"DeepSeekMath", eq. 4. Pure. Driven by the roles. Shapes: N trained tokens.
"""

from typing import Literal

import torch
from torch import Tensor

Estimate = Literal["k1", "k2", "k3"]


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
