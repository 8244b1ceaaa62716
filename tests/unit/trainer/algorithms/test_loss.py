"""The loss: its gradient, its clip and truncation, and tokens without a finite log-prob."""

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from rollmesh.core.config import ProximalRule, TrainerConfig
from rollmesh.trainer.algorithms.loss import (
    LossResult,
    ProximalInputs,
    TokenTerms,
    needs_extra_forward,
    ppo_loss,
    proximal_logprobs,
    token_logprobs,
)

SETTINGS = TrainerConfig(clip_low=0.2, clip_high=0.3, max_importance_weight=2.0)


def terms(current: list[float], **given: list[float]) -> TokenTerms:
    """Terms of tokens with weight 1; proximal and recorded default to current."""
    fields = {name: torch.tensor(values) for name, values in given.items()}
    ones = torch.ones(len(current))
    defaults: dict[str, Any] = {
        "logprobs_N": torch.tensor(current, requires_grad=True),
        "entropies_N": ones * 0.0,
        "proximal_N": torch.tensor(current),
        "recorded_N": fields.get("proximal_N", torch.tensor(current)),
        "advantages_N": ones,
        "weights_N": ones,
        "samples_N": torch.zeros(len(current), dtype=torch.int64),
    }
    return TokenTerms(**(defaults | fields))


def gradient(
    some: TokenTerms, settings: TrainerConfig = SETTINGS
) -> tuple[LossResult, list[float]]:
    loss = ppo_loss(some, settings)
    torch.autograd.backward(loss.value)
    assert isinstance(some.logprobs_N.grad, Tensor)
    return loss, some.logprobs_N.grad.tolist()


def test_on_policy_gradient_is_minus_weighted_advantage() -> None:
    some = terms([-1.0, -2.0], advantages_N=[3.0, -0.5], weights_N=[0.25, 0.5])
    loss, grad = gradient(some)
    assert grad == pytest.approx([-0.75, 0.25])
    assert loss.value.item() == pytest.approx(-0.5)
    assert loss.num_clipped == 0


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "is_stopped"),
    [
        (0.5, 1.0, True),
        (0.2, 1.0, False),
        (-0.5, 1.0, False),
        (-0.5, -1.0, True),
        (-0.1, -1.0, False),
        (0.5, -1.0, False),
    ],
)
def test_the_gradient_is_zero_beyond_the_clip(
    log_ratio: float, advantage: float, is_stopped: bool
) -> None:
    loss, grad = gradient(terms([-1.0 + log_ratio], proximal_N=[-1.0], advantages_N=[advantage]))
    assert (grad[0] == 0.0) is is_stopped
    assert loss.num_clipped == int(is_stopped)


def test_stale_tokens_are_weighted_by_their_ratio_up_to_the_bound() -> None:
    some = terms([-1.0, -1.0, -1.0], recorded_N=[-1.0, -1.0 - 0.4, -1.0 - 5.0])
    _, grad = gradient(some)
    assert grad == pytest.approx([-1.0, -(2.718281828**0.4), -2.0])


def test_entropy_bonus_is_weighted_and_rewards_spread() -> None:
    entropies_N = torch.tensor([0.5, 1.5], requires_grad=True)
    some = terms([-1.0, -1.0], advantages_N=[0.0, 0.0], weights_N=[1.0, 2.0])
    some = some._replace(entropies_N=entropies_N)
    with_bonus = msgspec.structs.replace(SETTINGS, entropy_coef=0.1)
    loss, _ = gradient(some, with_bonus)
    assert loss.value.item() == pytest.approx(-0.1 * (0.5 + 3.0))
    assert entropies_N.grad is not None
    assert entropies_N.grad.tolist() == pytest.approx([-0.1, -0.2])


def test_a_loss_reports_importance_and_truncation() -> None:
    some = terms([-1.0, -1.0, -1.0], recorded_N=[-1.0, -1.0 - 0.4, -1.0 - 5.0])
    loss = ppo_loss(some, SETTINGS)
    assert loss.importance_N.tolist() == pytest.approx([1.0, 2.718281828**0.4, 2.0])
    assert loss.is_truncated_N.tolist() == [False, False, True]
    assert not loss.importance_N.requires_grad


RECORDED = msgspec.structs.replace(SETTINGS, proximal="recorded")


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "slope"),
    [
        (0.1, 1.0, 2.718281828**0.1),  # plain PPO
        (0.5, 1.0, 0.0),
        (0.5, -1.0, -(2.718281828**0.5)),
        (0.8, -1.0, -2.0),  # no more than max_importance_weight
        (30.0, -1.0, -2.0),
        (-0.5, -1.0, 0.0),
        (-200.0, 1.0, 0.0),
    ],
)
def test_without_a_third_policy_the_whole_ratio_is_truncated(
    log_ratio: float, advantage: float, slope: float
) -> None:
    some = terms([-1.0 + log_ratio], proximal_N=[-1.0], advantages_N=[advantage])
    loss, grad = gradient(some, RECORDED)
    assert grad == pytest.approx([-slope])
    assert loss.importance_N.item() == pytest.approx(min(2.718281828**log_ratio, 2.0))
    assert loss.is_truncated_N.item() is (log_ratio > 0.7)


@pytest.mark.parametrize("proximal", ["recompute", "recorded"])
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize(("far_N", "recorded_N"), [("proximal_N", -500.0), ("recorded_N", 300.0)])
def test_a_far_logprob_gives_a_finite_gradient(
    far_N: str, recorded_N: float, advantage: float, proximal: ProximalRule
) -> None:
    far = {far_N: [recorded_N, -1.0]}
    some = terms([-1.0, -1.0], advantages_N=[advantage, advantage], **far)
    loss, grad = gradient(some, msgspec.structs.replace(SETTINGS, proximal=proximal))
    assert torch.isfinite(loss.value)
    assert torch.isfinite(torch.tensor(grad)).all()
    assert grad[1] == pytest.approx(-advantage)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("proximal", ["recompute", "recorded"])
def test_a_token_without_a_finite_recording_has_weight_0(
    value: float, proximal: ProximalRule
) -> None:
    settings = msgspec.structs.replace(SETTINGS, proximal=proximal, entropy_coef=0.1)
    known = {"proximal_N": [value, -1.0]} if proximal == "recorded" else {"proximal_N": [-1.0] * 2}
    loss, grad = gradient(terms([-1.0, -1.0], recorded_N=[value, -1.0], **known), settings)
    assert grad == pytest.approx([0.0, -1.0])
    assert loss.value.item() == pytest.approx(-1.0)


def test_no_gradient_flows_through_recorded_logprobs() -> None:
    recorded_N = torch.tensor([-1.5])
    some = terms([-1.0])._replace(recorded_N=recorded_N)
    gradient(some)
    assert recorded_N.grad is None
    assert not some.proximal_N.requires_grad


def test_logprobs_are_of_the_tempered_distribution() -> None:
    logits_NV = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    logprobs_N, entropies_N = token_logprobs(
        logits_NV, torch.tensor([2, 0]), torch.tensor([1.0, 0.5])
    )
    plain, sharp = torch.softmax(logits_NV[0], -1), torch.softmax(logits_NV[0] * 2, -1)
    assert logprobs_N.tolist() == pytest.approx([plain[2].log().item(), sharp[0].log().item()])
    expected = [-(p * p.log()).sum().item() for p in (plain, sharp)]
    assert entropies_N.tolist() == pytest.approx(expected)


def proximal_inputs(
    ages: list[int], num_done: int, start: list[float] | None = None
) -> ProximalInputs:
    """Tokens whose log-prob was -2 when recorded and is -1 now."""
    return ProximalInputs(
        current_N=torch.full((len(ages),), -1.0),
        start_N=None if start is None else torch.tensor(start),
        recorded_N=torch.full((len(ages),), -2.0),
        ages_N=torch.tensor(ages),
        num_done=num_done,
    )


@pytest.mark.parametrize(
    ("rule", "num_minibatches", "is_needed"),
    [("recompute", 2, True), ("recompute", 1, False), ("loglinear", 4, False), ("recorded", 4, 0)],
)
def test_an_extra_forward_is_only_for_recomputing_several_minibatches(
    rule: ProximalRule, num_minibatches: int, is_needed: bool
) -> None:
    assert needs_extra_forward(rule, num_minibatches) is bool(is_needed)


def test_recomputed_logprobs_are_those_of_the_start_of_the_step() -> None:
    logprobs = proximal_logprobs("recompute", proximal_inputs([0, 9], 3, start=[-1.5, -1.25]))
    assert logprobs.tolist() == [-1.5, -1.25]


def test_recorded_logprobs_are_used_unchanged() -> None:
    assert proximal_logprobs(
        "recorded", proximal_inputs([0, 9], 3, start=[-1.5, -1.5])
    ).tolist() == [-2, -2]


def test_the_first_minibatch_is_computed_by_its_proximal_weights() -> None:
    assert proximal_logprobs("loglinear", proximal_inputs([0, 1, 8], 0)).tolist() == [
        -1.0,
        -1.0,
        -1.0,
    ]


def test_loglinear_interpolates_by_the_age_at_the_start_of_the_step() -> None:
    logprobs = proximal_logprobs("loglinear", proximal_inputs([0, 1, 3, 9], 1))
    assert logprobs.tolist() == pytest.approx([-2.0, -1.5, -1.25, -1.1])
    later = proximal_logprobs("loglinear", proximal_inputs([0, 1, 3, 9], 3))
    assert later.tolist() == pytest.approx([-2.0, -1.75, -1.5, -1.25])
