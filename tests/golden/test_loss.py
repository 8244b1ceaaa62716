"""The loss and its gradient: frozen numbers, and a float64 reference written apart from it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.core.config import TrainerConfig
from rollmesh.trainer.loss import TokenTerms, policy_loss, token_logprobs

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("loss.json").read_text())


def inputs(seed: int, num_tokens: int, vocab: int) -> dict[str, np.ndarray[Any, Any]]:
    """Float32 values, so that both sides compute from the same numbers."""
    rng = np.random.default_rng(seed)
    arrays = {
        "logits": rng.normal(0, 2, (num_tokens, vocab)),
        "temperatures": rng.choice([0.7, 1.0, 1.3], num_tokens),
        "shift_proximal": rng.normal(0, 0.3, num_tokens),
        "shift_recorded": rng.normal(0, 0.8, num_tokens),
        "advantages": rng.normal(0, 1, num_tokens),
        "weights": rng.uniform(0, 1 / num_tokens, num_tokens),
    }
    rounded = {name: array.astype(np.float32) for name, array in arrays.items()}
    return rounded | {"targets": rng.integers(0, vocab, num_tokens)}


def reference(given: dict[str, Any], settings: TrainerConfig) -> tuple[float, Any]:
    """(loss, its gradient in the logits) token by token in float64, by hand."""
    loss, grad = 0.0, np.zeros(given["logits"].shape)
    for n, target in enumerate(given["targets"]):
        temperature = float(given["temperatures"][n])
        scaled = given["logits"][n].astype(np.float64) / temperature
        p = np.exp(scaled - scaled.max())
        p /= p.sum()
        logp = np.log(p)
        entropy = -(p * logp).sum()
        # Old log-probs are given as differences, since the current one is computed.
        ratio = np.exp(-float(given["shift_proximal"][n]))
        weighted = np.exp(float(given["shift_proximal"][n]) - float(given["shift_recorded"][n]))
        importance = min(weighted, settings.max_importance_weight)
        advantage = float(given["advantages"][n])
        bounded = min(max(ratio, 1 - settings.clip_low), 1 + settings.clip_high)
        is_held = bounded * advantage < ratio * advantage
        gain = (bounded if is_held else ratio) * advantage
        weight = float(given["weights"][n])
        loss -= weight * (importance * gain + settings.entropy_coef * entropy)
        slope = 0.0 if is_held else importance * ratio * advantage
        one_hot = np.eye(len(p))[target]
        bonus = -settings.entropy_coef * p * (logp + entropy)
        grad[n] = -weight * (slope * (one_hot - p) + bonus) / temperature
    return loss, grad


def ours(given: dict[str, Any], settings: TrainerConfig) -> tuple[float, Any, int]:
    tensors = {name: torch.from_numpy(array) for name, array in given.items()}
    logits = tensors["logits"].requires_grad_()
    logprobs, entropies = token_logprobs(logits, tensors["targets"], tensors["temperatures"])
    current = logprobs.detach()
    terms = TokenTerms(
        logprobs_N=logprobs,
        entropies_N=entropies,
        proximal_N=current + tensors["shift_proximal"],
        recorded_N=current + tensors["shift_recorded"],
        advantages_N=tensors["advantages"],
        weights_N=tensors["weights"],
    )
    loss = policy_loss(terms, settings)
    torch.autograd.backward(loss.value)
    assert logits.grad is not None
    return loss.value.item(), logits.grad.numpy(), loss.num_clipped


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["seed"]))
def test_loss_and_gradient_equal_the_reference_and_the_frozen_numbers(
    case: dict[str, Any],
) -> None:
    given = inputs(case["seed"], case["num_tokens"], case["vocab"])
    settings = TrainerConfig(**case["settings"])
    expected_loss, expected_grad = reference(given, settings)
    loss, grad, num_clipped = ours(given, settings)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert np.abs(grad - expected_grad).max() < 1e-6
    assert expected_loss == pytest.approx(case["loss"], rel=1e-9)
    assert np.abs(expected_grad).sum() == pytest.approx(case["grad_sum"], rel=1e-9)
    assert num_clipped == case["num_clipped"]
