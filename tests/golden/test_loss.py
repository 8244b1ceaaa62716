"""The loss and its gradient match frozen numbers and an independent float64 reference."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.core.config import TrainerConfig
from rollmesh.trainer.algorithms.loss import (
    ProximalInputs,
    TokenTerms,
    ppo_loss,
    proximal_logprobs,
    token_logprobs,
)

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("loss.json").read_text())
EXTREMES = [30.0, -30.0, 400.0, -400.0, math.inf, -math.inf, math.nan]
"""Errors of some recordings."""


def inputs(case: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Float32 values, so that both sides compute from the same numbers."""
    num_tokens, vocab = case["num_tokens"], case["vocab"]
    rng = np.random.default_rng(case["seed"])
    arrays = {
        "logits": rng.normal(0, 2, (num_tokens, vocab)),
        "temperatures": rng.choice([0.7, 1.0, 1.3], num_tokens),
        "shift_proximal": rng.normal(0, 0.3, num_tokens),
        "shift_recorded": rng.normal(0, 0.8, num_tokens),
        "advantages": rng.normal(0, 1, num_tokens),
        "weights": rng.uniform(0, 1 / num_tokens, num_tokens),
    }
    rounded = {name: array.astype(np.float32) for name, array in arrays.items()}
    rounded |= {"targets": rng.integers(0, vocab, num_tokens)}
    rounded["ages"] = rng.integers(0, 4, num_tokens)
    if case.get("has_extremes"):
        rounded["shift_recorded"][: len(EXTREMES)] = EXTREMES
    return rounded


def between(age: int, at: int, num_minibatches: int) -> float:
    """The number of versions between the recording and the start of the step: one for each
    minibatch.
    """
    behaviour, proximal = -age * num_minibatches, 0
    current = proximal + at
    return 1.0 if current == proximal else (proximal - behaviour) / (current - behaviour)


def factors(case: dict[str, Any], given: dict[str, Any], n: int) -> tuple[float, float, float]:
    """(ratio, importance, weight if not truncated) of token n.

    Old log-probs are given as differences to the current one, which is computed.
    """
    most = TrainerConfig(**case["settings"]).max_importance_weight
    rule = case["settings"].get("proximal", "recompute")
    recorded, proximal = float(given["shift_recorded"][n]), float(given["shift_proximal"][n])
    if rule == "recorded":
        ratio = math.exp(min(-recorded, 20.0))
        return ratio, min(ratio, most) / ratio if ratio else 1.0, ratio
    if rule == "loglinear":
        gone = between(int(given["ages"][n]), case["at"], case["settings"]["num_minibatches"])
        proximal = (1.0 - gone) * recorded
    whole = math.exp(min(proximal - recorded, 20.0))
    return math.exp(min(-proximal, 20.0)), min(whole, most), whole


def reference(case: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The loss, its gradient in the logits and the reported values, computed token by token."""
    settings = TrainerConfig(**case["settings"])
    loss, grad, weighed = 0.0, np.zeros(given["logits"].shape), []
    for n, target in enumerate(given["targets"]):
        temperature = float(given["temperatures"][n])
        scaled = given["logits"][n].astype(np.float64) / temperature
        p = np.exp(scaled - scaled.max())
        p /= p.sum()
        logp = np.log(p)
        entropy = -(p * logp).sum()
        if not math.isfinite(given["shift_recorded"][n]):
            continue
        ratio, importance, whole = factors(case, given, n)
        weighed.append(whole)
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
    most = settings.max_importance_weight
    return {
        "loss": loss,
        "grad": grad,
        "importance_sum": sum(min(each, most) for each in weighed),
        "num_truncated": sum(each > most for each in weighed),
    }


def ours(case: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    settings = TrainerConfig(**case["settings"])
    tensors = {name: torch.from_numpy(array) for name, array in given.items()}
    logits = tensors["logits"].requires_grad_()
    logprobs, entropies = token_logprobs(logits, tensors["targets"], tensors["temperatures"])
    current = logprobs.detach()
    recorded = current + tensors["shift_recorded"]
    proximal_inputs = ProximalInputs(
        current_N=current,
        start_N=current + tensors["shift_proximal"] if settings.proximal == "recompute" else None,
        recorded_N=recorded,
        ages_N=tensors["ages"] * settings.num_minibatches,
        num_done=case.get("at", 0),
    )
    terms = TokenTerms(
        logprobs_N=logprobs,
        entropies_N=entropies,
        proximal_N=proximal_logprobs(settings.proximal, proximal_inputs),
        recorded_N=recorded,
        advantages_N=tensors["advantages"],
        weights_N=tensors["weights"],
        samples_N=torch.zeros(case["num_tokens"], dtype=torch.int64),
    )
    loss = ppo_loss(terms, settings)
    torch.autograd.backward(loss.value)
    assert logits.grad is not None
    is_number = torch.isfinite(recorded)
    return {
        "loss": loss.value.item(),
        "grad": logits.grad.numpy(),
        "num_clipped": loss.num_clipped,
        "importance_sum": loss.importance_N[is_number].double().sum().item(),
        "num_truncated": int(loss.is_truncated_N[is_number].sum()),
    }


def name(case: dict[str, Any]) -> str:
    rule = case["settings"].get("proximal", "recompute")
    return f"{rule}-{case.get('at', 0)}-{case['seed']}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_loss_and_gradient_equal_the_reference_and_the_frozen_numbers(
    case: dict[str, Any],
) -> None:
    given = inputs(case)
    expected, actual = reference(case, given), ours(case, given)
    assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    largest = max(1.0, np.abs(expected["grad"]).max())
    assert np.abs(actual["grad"] - expected["grad"]).max() < 1e-6 * largest
    assert actual["importance_sum"] == pytest.approx(expected["importance_sum"], rel=1e-5)
    assert actual["num_truncated"] == expected["num_truncated"] == case["num_truncated"]
    assert expected["loss"] == pytest.approx(case["loss"], rel=1e-9)
    assert np.abs(expected["grad"]).sum() == pytest.approx(case["grad_sum"], rel=1e-9)
    assert expected["importance_sum"] == pytest.approx(case["importance_sum"], rel=1e-9)
    assert actual["num_clipped"] == case["num_clipped"]


def test_the_frozen_numbers_cover_every_rule_and_every_age() -> None:
    rules = {case["settings"].get("proximal", "recompute") for case in CASES}
    assert rules == {"recompute", "loglinear", "recorded"}
    for rule in rules:
        cases = [c for c in CASES if c["settings"].get("proximal", "recompute") == rule]
        assert any(case.get("has_extremes") for case in cases)
    assert all(set(inputs(case)["ages"]) == {0, 1, 2, 3} for case in CASES if "at" in case)
