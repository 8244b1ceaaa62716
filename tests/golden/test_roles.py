"""The losses of critics, reward models and preferences, against references and frozen numbers."""

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from rollmesh.core.config import TrainerConfig
from rollmesh.core.errors import ConfigError
from rollmesh.trainer.roles.losses import (
    Estimate,
    divergence,
    duel_loss,
    gae,
    preference_margins,
    token_rewards,
    value_loss,
)
from rollmesh.trainer.roles.models import LanguageTerms
from rollmesh.trainer.roles.recipes import role_specs

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("roles.json").read_text())
NUM = 40
Reference = tuple[list[float], list[float]]
"""The losses, and each loss's slope in its input."""


def drawn(seed: int, *spreads: float) -> list[Any]:
    """Arrays of float32 values, so that both sides compute from the same numbers."""
    chance = np.random.default_rng(seed)
    return [chance.normal(0, spread, NUM).astype(np.float32) for spread in spreads]


def losses_and_slopes(given: Any, losses_of: Any) -> Reference:
    """The losses and slopes of rollmesh, by autograd."""
    variable = torch.from_numpy(given).requires_grad_()
    losses: Tensor = losses_of(variable)
    torch.autograd.backward(losses.sum())
    assert variable.grad is not None
    return losses.tolist(), variable.grad.tolist()


def assert_equal(ours: Reference, reference: Reference, name: str) -> None:
    """Compare both with each other, and the reference with its frozen sums."""
    for one, other, frozen in zip(ours, reference, GOLDEN[name], strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=2e-6)
        assert math.fsum(map(abs, other)) == pytest.approx(frozen, rel=1e-9)


def test_a_value_loss_pulls_to_the_return_and_clips_near_the_old_value() -> None:
    values, olds, returns = drawn(1, 1.0, 1.0, 2.0)
    losses, slopes, num_held = [], [], 0
    for value, old, target in zip(
        *(each.tolist() for each in (values, olds, returns)), strict=True
    ):
        bounded = min(max(value, old - 0.5), old + 0.5)
        is_held = (bounded - target) ** 2 > (value - target) ** 2
        losses.append(((bounded if is_held else value) - target) ** 2 / 2)
        slopes.append(0.0 if is_held else value - target)
        num_held += is_held
    old_N, returns_N = torch.from_numpy(olds), torch.from_numpy(returns)
    result = value_loss(torch.from_numpy(values), old_N, returns_N, 0.5)
    ours = losses_and_slopes(
        values,
        lambda values_N: value_loss(values_N, old_N, returns_N, 0.5).losses_N,
    )
    assert_equal(ours, (losses, slopes), "value")
    assert int(result.is_clipped_N.sum()) == num_held
    assert 0 < num_held < NUM


def test_a_value_without_a_clip_has_the_plain_squared_error() -> None:
    values, olds, returns = map(torch.from_numpy, drawn(1, 1.0, 1.0, 2.0))
    result = value_loss(values, olds, returns, math.inf)
    assert torch.equal(result.losses_N, (values - returns).square() / 2)
    assert not result.is_clipped_N.any()


@pytest.mark.parametrize("which", ["k1", "k2", "k3"])
def test_the_divergence_is_schulmans_estimate(which: Estimate) -> None:
    logprobs, references = drawn(2, 1.0, 1.0)
    losses, slopes = [], []
    for now, reference in zip(logprobs.tolist(), references.tolist(), strict=True):
        ratio = math.exp(reference) / math.exp(now)  # of probabilities, as in Schulman's post
        losses.append(
            {
                "k1": -math.log(ratio),
                "k2": math.log(ratio) ** 2 / 2,
                "k3": (ratio - 1) - math.log(ratio),
            }[which]
        )
        slopes.append({"k1": 1.0, "k2": now - reference, "k3": 1.0 - ratio}[which])
    ours = losses_and_slopes(
        logprobs, lambda now: divergence(now, torch.from_numpy(references), which)
    )
    assert_equal(ours, (losses, slopes), which)


@pytest.mark.parametrize("which", ["k1", "k3"])
def test_the_mean_of_an_unbiased_estimate_is_the_divergence(which: Estimate) -> None:
    policy, reference = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.5, 0.3])
    expected = float((policy * (policy / reference).log()).sum())
    mean = (policy * divergence(policy.log(), reference.log(), which)).sum()
    assert float(mean) == pytest.approx(expected, rel=1e-6)


def mean_gradient(which: Estimate) -> torch.Tensor:
    """[V]: the expected gradient of the estimate as a loss, by the logits, over sampled tokens."""
    logits_V = torch.tensor([1.0, 0.2, -0.6, -2.0], dtype=torch.float64, requires_grad=True)
    logprobs_V = logits_V.log_softmax(-1)
    loss = (logprobs_V.exp().detach() * divergence(logprobs_V, REFERENCE_V, which)).sum()
    return torch.autograd.grad(loss, logits_V)[0]


def exact_gradient() -> torch.Tensor:
    """[V]: the gradient of KL(policy || reference) itself."""
    logits_V = torch.tensor([1.0, 0.2, -0.6, -2.0], dtype=torch.float64, requires_grad=True)
    logprobs_V = logits_V.log_softmax(-1)
    kl = (logprobs_V.exp() * (logprobs_V - REFERENCE_V)).sum()
    return torch.autograd.grad(kl, logits_V)[0]


REFERENCE_V = torch.tensor([-1.0, 0.1, 1.5, 0.8], dtype=torch.float64).log_softmax(-1)


def test_the_default_estimate_has_the_gradient_of_the_divergence_and_k3_has_not() -> None:
    default: Estimate = LanguageTerms().kl_estimate
    torch.testing.assert_close(mean_gradient(default), exact_gradient())
    k3 = torch.cosine_similarity(mean_gradient("k3"), exact_gradient(), dim=0)
    assert float(k3) < 0.9


def test_k1_as_a_loss_has_no_expected_gradient_and_is_refused_in_one_line() -> None:
    assert float(mean_gradient("k1").abs().max()) < 1e-12
    with pytest.raises(msgspec.ValidationError, match="expected gradient is 0") as caught:
        msgspec.convert({"kl_estimate": "k1"}, LanguageTerms)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"role actor: kl_estimate = .k1. trains nothing"):
        role_specs(["actor"], "model", TrainerConfig(), {"actor": {"kl_estimate": "k1"}})


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_preference_loss_compares_the_gains_of_both_answers(smoothing: float) -> None:
    first, second, first_before, second_before = drawn(3, 9.0, 9.0, 9.0, 9.0)
    losses, slopes = [], []
    for l1, l2, r1, r2 in zip(
        *(each.tolist() for each in (first, second, first_before, second_before)), strict=True
    ):
        margin = 0.1 * ((l1 - r1) - (l2 - r2))
        wins = 1 / (1 + math.exp(-margin))
        losses.append(-(1 - smoothing) * math.log(wins) - smoothing * math.log(1 - wins))
        slopes.append(0.1 * (wins - (1 - smoothing)))
    before = torch.from_numpy(np.stack([first_before, second_before], 1))
    ours = losses_and_slopes(
        first,
        lambda l1: duel_loss(
            preference_margins(torch.stack([l1, torch.from_numpy(second)], 1), before, 0.1),
            smoothing,
        ),
    )
    assert_equal(ours, (losses, slopes), f"preference {smoothing}")


@pytest.mark.parametrize(("discount", "trace"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.0)])
def test_advantages_are_discounted_sums_of_td_errors(discount: float, trace: float) -> None:
    values, drifts = drawn(5, 1.0, 0.5)
    rewards = [-0.02 * drift for drift in drifts.tolist()]
    rewards[-1] += 3.0
    ahead = [*values.tolist(), 0.0]
    surprises = [rewards[t] + discount * ahead[t + 1] - ahead[t] for t in range(NUM)]
    # As in the paper, each step's sum by itself: O(n^2), and no recursion.
    advantages = [
        math.fsum((discount * trace) ** (at - t) * surprises[at] for at in range(t, NUM))
        for t in range(NUM)
    ]
    returns = [a + v for a, v in zip(advantages, ahead, strict=False)]
    given = token_rewards(3.0, torch.from_numpy(drifts), 0.02)
    ours = gae(given, torch.from_numpy(values), discount, trace)
    reference = (advantages, returns)
    assert_equal((ours[0].tolist(), ours[1].tolist()), reference, f"returns {discount} {trace}")


def test_with_lambda_one_a_tokens_return_is_the_sum_of_later_rewards() -> None:
    rewards, values = torch.tensor([0.0, 0.0, 2.0]), torch.tensor([0.5, -1.0, 1.5])
    result = gae(rewards, values, 1.0, 1.0)
    assert result.returns_N.tolist() == [2.0, 2.0, 2.0]
    assert result.advantages_N.tolist() == [1.5, 3.0, 0.5]


def test_a_rollout_without_trained_tokens_has_no_returns() -> None:
    none = torch.zeros(0)
    result = gae(token_rewards(1.0, none, 0.1), none, 1.0, 0.95)
    assert (len(result.advantages_N), len(result.returns_N)) == (0, 0)
