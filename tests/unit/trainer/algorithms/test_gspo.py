"""GSPO: the ratio of a sequence is the geometric mean of its tokens' ratios."""

import math
import statistics

import msgspec
import pytest
import torch

from rollmesh.core.config import TrainerConfig
from rollmesh.trainer.algorithms.gspo import gspo_loss
from rollmesh.trainer.algorithms.loss import TokenTerms, ppo_loss

SETTINGS = TrainerConfig(clip_low=0.1, clip_high=0.2, max_importance_weight=2.0)
SAMPLES = (3, 3, 3, 0, 0)
CURRENT = (-1.0, -2.0, -0.6, -1.0, -3.0)
PROXIMAL = (-1.1, -1.8, -0.6, -1.4, -3.2)
RECORDED = (-1.2, -2.4, -0.9, -1.4, -5.0)
ADVANTAGES = (1.0, 1.0, 1.0, -0.5, -0.5)
WEIGHTS = (0.1, 0.1, 0.1, 0.3, 0.3)


def terms() -> TokenTerms:
    return TokenTerms(
        logprobs_N=torch.tensor(CURRENT, dtype=torch.float64, requires_grad=True),
        entropies_N=torch.zeros(5, dtype=torch.float64),
        proximal_N=torch.tensor(PROXIMAL, dtype=torch.float64),
        recorded_N=torch.tensor(RECORDED, dtype=torch.float64),
        advantages_N=torch.tensor(ADVANTAGES, dtype=torch.float64),
        weights_N=torch.tensor(WEIGHTS, dtype=torch.float64),
        samples_N=torch.tensor(SAMPLES),
    )


def reference(settings: TrainerConfig) -> tuple[float, list[float]]:
    """Return loss and gradient, computed sequence by sequence from the paper's formulas."""
    loss, gradient = 0.0, [0.0] * len(SAMPLES)
    for sample in set(SAMPLES):
        tokens = [n for n, each in enumerate(SAMPLES) if each == sample]
        advantage, weight = ADVANTAGES[tokens[0]], sum(WEIGHTS[n] for n in tokens)
        is_plain = settings.proximal == "recorded"
        old = RECORDED if is_plain else PROXIMAL
        ratio = math.exp(statistics.fmean(CURRENT[n] - old[n] for n in tokens))
        whole = math.exp(statistics.fmean(PROXIMAL[n] - RECORDED[n] for n in tokens))
        bound = settings.max_importance_weight
        factor = min(1.0, bound / ratio) if is_plain else min(whole, bound)
        clipped = min(max(ratio, 1.0 - settings.clip_low), 1.0 + settings.clip_high)
        loss -= weight * factor * min(ratio * advantage, clipped * advantage)
        if ratio * advantage <= clipped * advantage:
            for n in tokens:
                gradient[n] = -weight * factor * ratio * advantage / len(tokens)
    return loss, gradient


@pytest.mark.parametrize("proximal", ["recompute", "recorded"])
@pytest.mark.parametrize("clip", [0.01, 0.1, 0.9])
def test_loss_and_gradient_equal_the_reference(proximal: str, clip: float) -> None:
    settings = msgspec.convert(
        msgspec.to_builtins(SETTINGS) | {"proximal": proximal, "clip_low": clip, "clip_high": clip},
        TrainerConfig,
    )
    given = terms()
    if proximal == "recorded":
        given = given._replace(proximal_N=given.recorded_N)
    loss = gspo_loss(given, settings)
    torch.autograd.backward(loss.value)
    expected, gradient = reference(settings)
    assert loss.value.item() == pytest.approx(expected)
    assert given.logprobs_N.grad is not None
    assert given.logprobs_N.grad.tolist() == pytest.approx(gradient)


def test_all_tokens_of_a_sequence_are_clipped_together() -> None:
    narrow = msgspec.structs.replace(SETTINGS, clip_low=3e-4, clip_high=4e-4)
    # The first sequence moved down (advantage above 0: free), the second up (below 0: free).
    assert gspo_loss(terms(), narrow).num_clipped == 0
    flipped = terms()._replace(advantages_N=-torch.tensor(ADVANTAGES, dtype=torch.float64))
    assert gspo_loss(flipped, narrow).num_clipped == 5


def test_sequences_of_one_token_are_ppo() -> None:
    alone = terms()._replace(samples_N=torch.arange(5))
    assert gspo_loss(alone, SETTINGS).value.item() == ppo_loss(alone, SETTINGS).value.item()


def test_a_batch_without_trained_tokens_has_loss_0() -> None:
    none = TokenTerms(*[each[:0] for each in terms()])
    assert gspo_loss(none, SETTINGS).value.item() == 0.0
