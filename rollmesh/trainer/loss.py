"""The policy-gradient loss on exact tokens, clipped and importance-weighted.

For a token n with advantage A and log-probs l (now), p (proximal: as the train step began) and
r (recorded when it was sampled, maybe by older weights):

    ratio = exp(l - p)                    importance = min(exp(p - r), max_importance_weight)
    gain  = min(ratio * A, clamp(ratio, 1 - clip_low, 1 + clip_high) * A)
    loss  = - sum over n of weight * (importance * gain + entropy_coef * entropy)

The decoupled objective is that of Hilton et al. 2021, "Batch size-invariance for policy
optimization", used for stale rollouts by Fu et al. 2025, "AReaL"; the truncated weight that of
Espeholt et al. 2018, "IMPALA"; the clip that of Schulman et al. 2017, "PPO", its upper bound apart
as in Yu et al. 2025, "DAPO"; the entropy bonus that of Mnih et al. 2016, "A3C". With one optimiser
step per train step l = p, so that nothing clips and the gradient is importance * A * grad l.

Invariant: no gradient flows through p, r or importance. Driven by the policy, batch by batch.
Shapes: N trained tokens, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rollmesh.core.config import TrainerConfig


class TokenTerms(NamedTuple):
    """What the loss knows of N tokens."""

    logprobs_N: Tensor
    """Under the current weights; carries the gradient."""
    entropies_N: Tensor
    """Of the distributions that the tokens came from, in nats; carries the gradient."""
    proximal_N: Tensor
    recorded_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor


class Loss(NamedTuple):
    """The loss of a batch and how far the clip reached."""

    value: Tensor
    """A scalar: a sum, so that batches of one optimiser step add up."""
    num_clipped: int
    """Tokens whose gain the clip holds down."""


def token_logprobs(
    logits_NV: Tensor, targets_N: Tensor, temperatures_N: Tensor
) -> tuple[Tensor, Tensor]:
    """(log-probs of the targets [N], entropies [N]) of softmax(logits / temperature), float32."""
    scaled_NV = logits_NV.float() / temperatures_N[:, None]
    all_NV = torch.log_softmax(scaled_NV, dim=-1)
    entropies_N = -(all_NV.exp() * all_NV).sum(-1)
    return all_NV.gather(-1, targets_N[:, None])[:, 0], entropies_N


def policy_loss(terms: TokenTerms, settings: TrainerConfig) -> Loss:
    """The formula above; `settings` gives clip_low, clip_high and the rest by name."""
    ratio_N = torch.exp(terms.logprobs_N - terms.proximal_N)
    clipped_N = ratio_N.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    free_gain_N = ratio_N * terms.advantages_N
    clipped_gain_N = clipped_N * terms.advantages_N
    gain_N = torch.minimum(free_gain_N, clipped_gain_N)
    importance_N = torch.exp(terms.proximal_N - terms.recorded_N)
    importance_N = importance_N.clamp(max=settings.max_importance_weight)
    total_N = importance_N * gain_N + settings.entropy_coef * terms.entropies_N
    num_clipped = int((clipped_gain_N < free_gain_N).sum())
    return Loss(-(terms.weights_N * total_N).sum(), num_clipped)
