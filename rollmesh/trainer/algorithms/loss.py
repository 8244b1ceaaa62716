"""The clipped, importance-weighted policy-gradient loss, and the log-probs that it refers to.

For a token n with advantage A and log-probs l (current), p (proximal: by the weights as the train
step began, or a substitute) and r (recorded when the token was sampled, maybe by older weights),
and C = max_importance_weight:

    ratio = exp(l - p)        w = exp(p - r)        importance = min(w, C)
    gain  = min(ratio * A, clamp(ratio, 1 - clip_low, 1 + clip_high) * A)
    loss  = - sum over n of weight * (importance * gain + entropy_coef * entropy)

The decoupled objective is that of Hilton et al. 2021, "Batch size-invariance for policy
optimization", used for stale rollouts by Fu et al. 2025, "AReaL"; the truncated weight is that of
Espeholt et al. 2018, "IMPALA", per token as in Yao et al. 2025, "Your Efficient RL Framework
Secretly Brings You Off-Policy RL Training" (TIS); the clip is that of Schulman et al. 2017, "PPO",
its separate upper bound that of Yu et al. 2025, "DAPO"; the entropy bonus that of Mnih et al. 2016,
"A3C". With one optimiser step per train step l = p: nothing is clipped, and the gradient is that of
TIS, importance * A * grad l.

With trainer.proximal = "recorded" there is no third policy: p = r, and this is plain PPO. Its ratio
is then the whole weight, w = exp(l - r), which the clip does not bound where A < 0; importance is
min(w, C) / w, so that no token's gradient has a factor above C either.

- No gradient flows through p, r or importance.
- A ratio is at most e^20, and its gradient there is the whole one.
- A token whose recorded log-prob is not finite has weight 0.

Shapes: N trained tokens, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rollmesh.core.config import ProximalRule, TrainerConfig

MAX_LOG_RATIO = 20.0
"""e^20 is 5e8: beyond every clip and bound, and far below the largest float32."""


class TokenTerms(NamedTuple):
    """The inputs of a loss for N tokens."""

    logprobs_N: Tensor
    """By the current weights; carries the gradient."""
    entropies_N: Tensor
    """Entropy of the distribution at each token, in nats; carries the gradient."""
    proximal_N: Tensor
    recorded_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    """Factor of each token in the sum; 0 for masked tokens."""
    samples_N: Tensor
    """int64: the sample (one sequence) of each token. All trained tokens of a sample are in one
    call; the numbers are otherwise arbitrary."""


class LossResult(NamedTuple):
    """The loss of a batch, and its clipping and truncation."""

    value: Tensor
    """Scalar sum over tokens, so the batches of one optimiser step add up."""
    num_clipped: int
    """Tokens whose gain is limited by the clip."""
    importance_N: Tensor
    """min(w, C)."""
    is_truncated_N: Tensor
    """Whether w > C."""


def token_logprobs(
    logits_NV: Tensor, targets_N: Tensor, temperatures_N: Tensor
) -> tuple[Tensor, Tensor]:
    """(log-probs of the targets [N], entropies [N]) of softmax(logits / temperature), float32."""
    scaled_NV = logits_NV.float() / temperatures_N[:, None]
    all_NV = torch.log_softmax(scaled_NV, dim=-1)
    entropies_N = -(all_NV.exp() * all_NV).sum(-1)
    return all_NV.gather(-1, targets_N[:, None])[:, 0], entropies_N


def ppo_loss(terms: TokenTerms, settings: TrainerConfig) -> LossResult:
    """Return the loss of the formula above; `settings` has clip_low, clip_high and the others."""
    terms = mask_not_finite(terms)
    return clipped_loss(
        terms,
        terms.logprobs_N - terms.proximal_N,
        terms.proximal_N - terms.recorded_N,
        settings,
    )


def clipped_loss(
    terms: TokenTerms, log_ratio_N: Tensor, log_weight_N: Tensor, settings: TrainerConfig
) -> LossResult:
    """Return the loss of the formula above for ratio = exp(log_ratio), w = exp(log_weight).

    `log_ratio_N` carries the gradient. With settings.proximal = "recorded" `log_weight_N` is not
    used, since the ratio is the whole weight.
    """
    ratio_N = _bounded_exp(log_ratio_N)
    clipped_N = ratio_N.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    free_gain_N = ratio_N * terms.advantages_N
    clipped_gain_N = clipped_N * terms.advantages_N
    gain_N = torch.minimum(free_gain_N, clipped_gain_N)
    max_weight = settings.max_importance_weight
    if settings.proximal == "recorded":
        whole_N = ratio_N.detach()
        factor_N = (max_weight / whole_N).clamp(max=1.0)
    else:
        whole_N = _bounded_exp(log_weight_N).detach()
        factor_N = whole_N.clamp(max=max_weight)
    total_N = factor_N * gain_N + settings.entropy_coef * terms.entropies_N
    return LossResult(
        value=-(terms.weights_N * total_N).sum(),
        num_clipped=int((clipped_gain_N < free_gain_N).sum()),
        importance_N=whole_N.clamp(max=max_weight),
        is_truncated_N=whole_N > max_weight,
    )


def mask_not_finite(terms: TokenTerms) -> TokenTerms:
    """Give tokens without a finite recorded log-prob weight 0, and the current one in its place."""
    is_finite_N = torch.isfinite(terms.recorded_N) & torch.isfinite(terms.proximal_N)
    current_N = terms.logprobs_N.detach()
    return terms._replace(
        proximal_N=torch.where(is_finite_N, terms.proximal_N, current_N),
        recorded_N=torch.where(is_finite_N, terms.recorded_N, current_N),
        weights_N=terms.weights_N.masked_fill(~is_finite_N, 0.0),
    )


def _bounded_exp(log_N: Tensor) -> Tensor:
    """exp(log), at most e^20, with the gradient that it has at the bounded value."""
    held_N = log_N.detach().clamp(max=MAX_LOG_RATIO)
    return torch.exp(held_N + (log_N - log_N.detach()))


class ProximalInputs(NamedTuple):
    """Log-probs of a batch's tokens before its minibatch steps; none has a gradient."""

    current_N: Tensor
    start_N: Tensor | None
    """By the weights as the train step began; None if they were not computed."""
    recorded_N: Tensor
    ages_N: Tensor
    """In optimiser steps, as the train step began."""
    num_done: int
    """Optimiser steps since then."""

    @property
    def earliest_N(self) -> Tensor:
        """By the known weights that are nearest to the beginning of the step."""
        return self.current_N if self.start_N is None else self.start_N


def needs_extra_forward(rule: ProximalRule, num_minibatches: int) -> bool:
    """Whether all minibatches need a forward before the first one steps."""
    return rule == "recompute" and num_minibatches > 1


def proximal_logprobs(rule: ProximalRule, inputs: ProximalInputs) -> Tensor:
    """Return the proximal log-probs p [N] of a batch, without gradient.

    A step of M minibatches changes the weights M times. For a token that is `age` optimiser steps
    older than the beginning of the step, in minibatch number k of the step:

        recompute   a forward of every minibatch before the first one steps; none if M = 1, since
                    the only minibatch is computed by the proximal weights themselves
        loglinear   p = r + a * (l - r)     a = age / (age + k)     no extra forward
        recorded    p = r

    `loglinear` is the interpolation of Li, Wu and Shen 2025, "A-3PO" (arXiv 2512.06547),
    a = (v_proximal - v_behaviour) / (v_current - v_behaviour), with versions counted in optimiser
    steps rather than in train steps. So it is exact for the first minibatch (k = 0: p = l) and for
    tokens of the weights that the step began with (age = 0: p = r).
    """
    match rule:
        case "recorded":
            return inputs.recorded_N
        case "recompute":
            assert inputs.start_N is not None, "recomputed before the step"
            return inputs.start_N
        case "loglinear":
            return inputs.current_N if inputs.num_done == 0 else _interpolated(inputs)


def _interpolated(inputs: ProximalInputs) -> Tensor:
    ages_N = inputs.ages_N.to(inputs.current_N.dtype)
    share_N = ages_N / (ages_N + inputs.num_done)
    return torch.lerp(inputs.recorded_N, inputs.current_N, share_N)
