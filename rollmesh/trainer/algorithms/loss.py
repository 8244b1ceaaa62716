"""The policy-gradient loss on exact tokens, clipped and importance-weighted.

For a token n with advantage A and log-probs l (now), p (proximal: as the train step began, or what
stands in for it, proximal.py) and r (recorded when it was sampled, maybe by older weights), and
C = max_importance_weight:

    ratio = exp(l - p)        w = exp(p - r)        importance = min(w, C)
    gain  = min(ratio * A, clamp(ratio, 1 - clip_low, 1 + clip_high) * A)
    loss  = - sum over n of weight * (importance * gain + entropy_coef * entropy)

The decoupled objective is that of Hilton et al. 2021, "Batch size-invariance for policy
optimization", used for stale rollouts by Fu et al. 2025, "AReaL"; the truncated weight that of
Espeholt et al. 2018, "IMPALA", per token as in Yao et al. 2025, "Your Efficient RL Framework
Secretly Brings You Off-Policy RL Training" (TIS); the clip that of Schulman et al. 2017, "PPO", its
upper bound apart as in Yu et al. 2025, "DAPO"; the entropy bonus that of Mnih et al. 2016, "A3C".
With one optimiser step per train step l = p: nothing clips, and the gradient is TIS's,
importance * A * grad l.

With trainer.proximal = "recorded" there is no third policy: p = r, and this is plain PPO. Its ratio
is the whole weight then, w = exp(l - r), which the clip leaves unbounded where A < 0; importance is
min(w, C) / w, so that no token's gradient is that of more than C either.

Invariants: no gradient flows through p, r or importance; no ratio is past e^20, whose gradient is
whole; a token whose recording is no finite number weighs nothing. Driven by the policy, batch by
batch. Shapes: N trained tokens, V vocabulary.

The proximal policy's log-probs: of the weights as a train step began, or what stands in.

A step of M minibatches moves the weights M times. Of a token that is `age` optimiser steps older
than the step's beginning, before the minibatch that is number k of the step, with log-probs l (now)
and r (recorded):

    recompute   a forward of every minibatch before the first one steps; none where M = 1, since
                the only one meets the very weights that are proximal to it
    loglinear   p = r + a * (l - r)     a = age / (age + k)     no forward more
    recorded    p = r: no third policy (loss.py)

`loglinear` is the interpolation of Li, Wu and Shen 2025, "A-3PO" (arXiv 2512.06547),
a = (v_proximal - v_behaviour) / (v_current - v_behaviour), with versions counted in optimiser steps
rather than in train steps: so it is exact for the first minibatch (k = 0: p = l) and for tokens of
the very weights that the step began with (age = 0: p = r), and lies between in between.

Invariant: no gradient flows through what is told here. Pure; driven by the policy, per batch.
Shapes: N trained tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rollmesh.core.config import ProximalRule, TrainerConfig

MAX_LOG_RATIO = 20.0
"""e^20 is 5e8: past every clip and every bound, and far from what float32 cannot hold."""


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


class LossResult(NamedTuple):
    """The loss of a batch, how far the clip reached, and what staleness made of the tokens."""

    value: Tensor
    """A scalar: a sum, so that batches of one optimiser step add up."""
    num_clipped: int
    """Tokens whose gain the clip holds down."""
    importance_N: Tensor
    """min(w, C)."""
    is_truncated_N: Tensor
    """Whether w is past C."""


def token_logprobs(
    logits_NV: Tensor, targets_N: Tensor, temperatures_N: Tensor
) -> tuple[Tensor, Tensor]:
    """(log-probs of the targets [N], entropies [N]) of softmax(logits / temperature), float32."""
    scaled_NV = logits_NV.float() / temperatures_N[:, None]
    all_NV = torch.log_softmax(scaled_NV, dim=-1)
    entropies_N = -(all_NV.exp() * all_NV).sum(-1)
    return all_NV.gather(-1, targets_N[:, None])[:, 0], entropies_N


def ppo_loss(terms: TokenTerms, settings: TrainerConfig) -> LossResult:
    """The formula above; `settings` gives clip_low, clip_high and the rest by name."""
    terms = _of_numbers(terms)
    ratio_N = _ratio(terms.logprobs_N, terms.proximal_N)
    clipped_N = ratio_N.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    free_gain_N = ratio_N * terms.advantages_N
    clipped_gain_N = clipped_N * terms.advantages_N
    gain_N = torch.minimum(free_gain_N, clipped_gain_N)
    most = settings.max_importance_weight
    if settings.proximal == "recorded":
        whole_N = ratio_N.detach()
        factor_N = (most / whole_N).clamp(max=1.0)
    else:
        whole_N = _ratio(terms.proximal_N, terms.recorded_N).detach()
        factor_N = whole_N.clamp(max=most)
    total_N = factor_N * gain_N + settings.entropy_coef * terms.entropies_N
    return LossResult(
        value=-(terms.weights_N * total_N).sum(),
        num_clipped=int((clipped_gain_N < free_gain_N).sum()),
        importance_N=whole_N.clamp(max=most),
        is_truncated_N=whole_N > most,
    )


def _of_numbers(terms: TokenTerms) -> TokenTerms:
    """Tokens whose recording is none are taken to be as they are now, and weigh nothing."""
    is_number_N = torch.isfinite(terms.recorded_N) & torch.isfinite(terms.proximal_N)
    now_N = terms.logprobs_N.detach()
    return terms._replace(
        proximal_N=torch.where(is_number_N, terms.proximal_N, now_N),
        recorded_N=torch.where(is_number_N, terms.recorded_N, now_N),
        weights_N=terms.weights_N.masked_fill(~is_number_N, 0.0),
    )


def _ratio(above_N: Tensor, below_N: Tensor) -> Tensor:
    """exp(above - below), at most e^20, with the gradient of what it is there."""
    log_N = above_N - below_N
    held_N = log_N.detach().clamp(max=MAX_LOG_RATIO)
    return torch.exp(held_N + (log_N - log_N.detach()))


class ProximalInputs(NamedTuple):
    """What is known of a batch's tokens before its minibatch steps; none of it has a gradient."""

    now_N: Tensor
    began_N: Tensor | None
    """By the weights as the train step began; None where nobody computed them."""
    recorded_N: Tensor
    ages_N: Tensor
    """In optimiser steps, at the step's beginning."""
    num_done: int
    """Optimiser steps since then."""

    @property
    def earliest_N(self) -> Tensor:
        """By the weights that are nearest to those of the step's beginning."""
        return self.now_N if self.began_N is None else self.began_N


def needs_extra_forward(rule: ProximalRule, num_minibatches: int) -> bool:
    """Whether a step has to look at its minibatches before the first one steps."""
    return rule == "recompute" and num_minibatches > 1


def proximal_logprobs(rule: ProximalRule, sight: ProximalInputs) -> Tensor:
    """[N], as the module says."""
    match rule:
        case "recorded":
            return sight.recorded_N
        case "recompute":
            assert sight.began_N is not None, "recomputed before the step"
            return sight.began_N
        case "loglinear":
            return sight.now_N if sight.num_done == 0 else _between(sight)


def _between(sight: ProximalInputs) -> Tensor:
    ages_N = sight.ages_N.to(sight.now_N.dtype)
    return torch.lerp(sight.recorded_N, sight.now_N, ages_N / (ages_N + sight.num_done))
