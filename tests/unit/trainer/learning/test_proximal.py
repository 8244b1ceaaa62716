"""Proximal log-probs: recomputed, interpolated between what is known, or those recorded."""

import pytest
import torch

from rollmesh.core.config import ProximalRule
from rollmesh.trainer.algorithms.loss import ProximalInputs, needs_extra_forward, proximal_logprobs


def sight(ages: list[int], num_done: int, began: list[float] | None = None) -> ProximalInputs:
    """Tokens recorded at -2 that are at -1 now."""
    return ProximalInputs(
        now_N=torch.full((len(ages),), -1.0),
        began_N=None if began is None else torch.tensor(began),
        recorded_N=torch.full((len(ages),), -2.0),
        ages_N=torch.tensor(ages),
        num_done=num_done,
    )


@pytest.mark.parametrize(
    ("rule", "num_minibatches", "is_needed"),
    [("recompute", 2, True), ("recompute", 1, False), ("loglinear", 4, False), ("recorded", 4, 0)],
)
def test_a_forward_more_is_for_recomputing_several_minibatches_alone(
    rule: ProximalRule, num_minibatches: int, is_needed: bool
) -> None:
    assert needs_extra_forward(rule, num_minibatches) is bool(is_needed)


def test_recomputed_ones_are_what_the_step_began_with() -> None:
    told = proximal_logprobs("recompute", sight([0, 9], 3, began=[-1.5, -1.25]))
    assert told.tolist() == [-1.5, -1.25]


def test_recorded_ones_stand_in_as_they_are() -> None:
    assert proximal_logprobs("recorded", sight([0, 9], 3, began=[-1.5, -1.5])).tolist() == [-2, -2]


def test_the_first_minibatch_meets_its_proximal_weights() -> None:
    assert proximal_logprobs("loglinear", sight([0, 1, 8], 0)).tolist() == [-1.0, -1.0, -1.0]


def test_between_lies_as_much_of_the_way_as_was_gone_when_the_step_began() -> None:
    told = proximal_logprobs("loglinear", sight([0, 1, 3, 9], 1))
    assert told.tolist() == pytest.approx([-2.0, -1.5, -1.25, -1.1])
    later = proximal_logprobs("loglinear", sight([0, 1, 3, 9], 3))
    assert later.tolist() == pytest.approx([-2.0, -1.75, -1.5, -1.25])
