"""GSPO: the clipped loss with one ratio for a whole sequence in place of one for each token.

For the trained tokens y of one sample, with log-probs l, p and r as in loss.py:

    s = exp(mean over y of (l - p))        w = exp(mean over y of (p - r))

The objective is that of loss.py with ratio = s and w at every token of the sample. s is the
sequence ratio of Zheng et al. 2025, "Group Sequence Policy Optimization" (arXiv 2507.18071), eq. 7;
its clip is eq. 5. The paper has no third policy: that is trainer.proximal = "recorded" (p = r).

- trainer.loss_weight = "rollout" gives each rollout the same weight, as the paper does; with
  "token" a long answer has more weight.
- A mean of many tokens varies far less than one token, so the clip must be narrow: the paper has
  clip_low = 3e-4 and clip_high = 4e-4.
- A rollout that was cut into several samples has a ratio for each of them.
- Tokens with weight 0 are in no mean.
"""

import torch
from torch import Tensor

from rollmesh.core.config import TrainerConfig
from rollmesh.trainer.algorithms.loss import (
    LossResult,
    TokenTerms,
    clipped_loss,
    mask_not_finite,
)


def gspo_loss(terms: TokenTerms, settings: TrainerConfig) -> LossResult:
    """Return the loss; the formulas are in the module docstring."""
    terms = mask_not_finite(terms)
    return clipped_loss(
        terms,
        _sample_means(terms.logprobs_N - terms.proximal_N, terms),
        _sample_means(terms.proximal_N - terms.recorded_N, terms),
        settings,
    )


def _sample_means(values_N: Tensor, terms: TokenTerms) -> Tensor:
    """[N]: at each token the mean of its sample's values, over tokens with a weight."""
    samples, index_N = torch.unique(terms.samples_N, return_inverse=True)
    counts_N = (terms.weights_N > 0).to(values_N.dtype)
    zeros_S = values_N.new_zeros(len(samples))
    sums_S = zeros_S.index_add(0, index_N, values_N * counts_N)
    counts_S = zeros_S.index_add(0, index_N, counts_N)
    return (sums_S / counts_S.clamp(min=1.0))[index_N]
