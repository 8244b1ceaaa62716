"""The losses of critics, reward models and preferences; that of a policy is learning/loss.py's.

Each gives a loss for each token or pair, which carries the gradient; who calls it sums them over a
step and divides by their number at all ranks. Invariant: no gradient flows through what was
computed before the step (old values, returns, references). Pure. Driven by the roles.
Shapes: N trained tokens, P pairs.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


class ValueLoss(NamedTuple):
    """Of N tokens."""

    losses_N: Tensor
    is_clipped_N: Tensor
    """Where the clip holds the value back."""


def value_loss(values_N: Tensor, old_N: Tensor, returns_N: Tensor, clip: float) -> ValueLoss:
    """max((v - R)^2, (clamp(v, old - clip, old + clip) - R)^2) / 2, in squared rewards.

    Squared error to the returns (Schulman et al. 2016; 2017, "PPO", eq. 9); the clip is
    that of the authors' code (openai/baselines, ppo2): a value gains nothing by going further than
    `clip` from where the step found it. An infinite `clip` is none.
    """
    bounded_N = values_N.clamp(old_N - clip, old_N + clip)
    free_N = (values_N - returns_N).square()
    held_N = (bounded_N - returns_N).square()
    return ValueLoss(torch.maximum(free_N, held_N) / 2, held_N > free_N)


def preference_margins(logprobs_P2: Tensor, reference_P2: Tensor, beta: float) -> Tensor:
    """[P]: by how much a policy prefers the first of each pair more than its reference does.

    beta * ((l_first - r_first) - (l_second - r_second)), log-probs of whole answers in nats: the
    difference of DPO's implicit rewards (Rafailov et al. 2023, "Direct Preference Optimization",
    eq. 7).
    """
    gains_P2 = logprobs_P2 - reference_P2
    return beta * (gains_P2[:, 0] - gains_P2[:, 1])


def duel_loss(margins_P: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """[P]: -(1 - e) log sigmoid(m) - e log sigmoid(-m), in nats, for margins m and smoothing e.

    The first of each pair is to win, by the model of Bradley and Terry 1952. Of differences of
    rewards it trains a reward model (Ouyang et al. 2022, eq. 1), of DPO's margins a policy.
    `label_smoothing` is the share of pairs thought to be the wrong way round (Mitchell 2023, "A
    note on DPO with noisy preferences").
    """
    return -(1.0 - label_smoothing) * logsigmoid(margins_P) - label_smoothing * logsigmoid(
        -margins_P
    )
