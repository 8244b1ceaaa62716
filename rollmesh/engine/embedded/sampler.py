"""Draws next tokens for all rows at once, each from its own seed, and says how likely they were.

Invariant: a row's draw depends on its logits, its parameters, its seed and its position alone,
never on what else is in the batch or on earlier draws, so a generation that is cut and resumed from
its exact tokens goes on as if it had not been cut. Driven by the Runner.

Log-probs are of the distribution that temperature gives, before top-k and top-p cut it: SGLang's
default (its sampler takes the logarithm of softmax(logits / temperature); only with
SGLANG_RETURN_ORIGINAL_LOGPROB are they of the raw logits). Greedy rows (temperature 0) count as
temperature 1, there as here.

Shapes: R rows that draw, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.engine.embedded.request import Sampling, Top

_U64 = NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_DRAW_BITS = 48  # so few that draw * total, rounded, stays below the total


def draw(
    logits_RV: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Tokens and their log-probs; `positions[r]` is where row r's token will stand."""
    logprobs_RV = tempered(logits_RV, samplings)
    greedy = [s.temperature == 0 or s.top_k == 1 for s in samplings]
    if all(greedy):
        tokens_R1 = logprobs_RV.argmax(dim=-1, keepdim=True)
    else:
        seeds = np.array([s.seed & 0xFFFFFFFFFFFFFFFF for s in samplings], dtype=np.uint64)
        draws_R = uniforms(seeds, np.array(positions, dtype=np.uint64))
        probs_RV = cut_tails(logprobs_RV.exp(), samplings)
        tokens_R1 = invert_cdf(probs_RV, torch.from_numpy(draws_R))
        if any(greedy):
            best_R1 = logprobs_RV.argmax(dim=-1, keepdim=True)
            tokens_R1 = torch.where(torch.tensor(greedy).unsqueeze(1), best_R1, tokens_R1)
    picked_R1 = logprobs_RV.gather(1, tokens_R1)
    return tokens_R1.squeeze(1).tolist(), picked_R1.squeeze(1).tolist()


def tempered(logits_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Log-probs of the distributions that are drawn from, before anything is cut off."""
    temperatures = [s.temperature or 1.0 for s in samplings]
    if any(t != 1.0 for t in temperatures):
        logits_RV = logits_RV / torch.tensor(temperatures).unsqueeze(1)
    return logits_RV.log_softmax(dim=-1)


def likeliest(logprobs_RV: Tensor, counts: Sequence[int]) -> list[Top]:
    """The `counts[r]` likeliest tokens of each row; what is impossible has the least float's."""
    most = min(max(counts), logprobs_RV.shape[1])
    values_RK, tokens_RK = logprobs_RV.clamp(min=torch.finfo(torch.float32).min).topk(most)
    rows = zip(values_RK.tolist(), tokens_RK.tolist(), counts, strict=True)
    return [list(zip(values[:n], tokens[:n], strict=True)) for values, tokens, n in rows]


def invert_cdf(probs_RV: Tensor, draws_R: Tensor) -> Tensor:
    """The first token whose cumulated probability exceeds the draw: (R, 1).

    Summed in float64, as float32 would shift the borders of a large vocabulary.
    """
    cumulated_RV = probs_RV.double().cumsum(dim=-1)
    targets_R1 = draws_R.unsqueeze(1) * cumulated_RV[:, -1:]
    return torch.searchsorted(cumulated_RV, targets_R1, right=True)


def cut_tails(probs_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Zero what top-k, top-p and min-p exclude, in the rows that ask for it; not renormalised.

    All are cut from the full distribution, as SGLang's torch backend does: a token stays if it is
    among the k likeliest, the likelier ones before it do not exceed p, and it is at least min_p
    times as likely as the likeliest.
    """
    vocab_size = probs_RV.shape[1]
    rows = [
        r
        for r, s in enumerate(samplings)
        if s.top_p < 1.0 or 1 < s.top_k < vocab_size or s.min_p > 0
    ]
    if not rows:
        return probs_RV
    top_p = torch.tensor([samplings[r].top_p for r in rows]).unsqueeze(1)
    top_k = torch.tensor(
        [k if (k := samplings[r].top_k) > 0 else vocab_size for r in rows]
    ).unsqueeze(1)
    min_p = torch.tensor([samplings[r].min_p for r in rows]).unsqueeze(1)
    sorted_RV, order_RV = probs_RV[rows].sort(dim=-1, descending=True, stable=True)
    before_RV = sorted_RV.double().cumsum(dim=-1) - sorted_RV
    excluded_RV = (before_RV > top_p) | (torch.arange(vocab_size) >= top_k)
    excluded_RV |= sorted_RV < sorted_RV[:, :1] * min_p
    kept_RV = torch.zeros_like(sorted_RV).scatter(
        1, order_RV, sorted_RV.masked_fill(excluded_RV, 0)
    )
    return probs_RV.index_copy(0, torch.tensor(rows), kept_RV)


def uniforms(seeds: _U64, positions: _U64) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), as from a counter-based generator.

    SplitMix64's finaliser (Steele, Lea and Flood, 2014) over the seed, then over its sum with the
    position's multiple of the golden ratio.
    """
    mixed = mix(mix(seeds + _GOLDEN) + positions * _GOLDEN)
    return (mixed >> np.uint64(64 - _DRAW_BITS)).astype(np.float64) * 2.0**-_DRAW_BITS


def mix(values: _U64) -> _U64:
    """SplitMix64's finaliser: every input bit flips every output bit with probability one half."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
