"""The proximal policy's log-probs: of the weights as a train step began, or what stands in.

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

from rollmesh.core.config import ProximalRule


class Sight(NamedTuple):
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


def needs_forward(rule: ProximalRule, num_minibatches: int) -> bool:
    """Whether a step has to look at its minibatches before the first one steps."""
    return rule == "recompute" and num_minibatches > 1


def proximal_logprobs(rule: ProximalRule, sight: Sight) -> Tensor:
    """[N], as the module says."""
    match rule:
        case "recorded":
            return sight.recorded_N
        case "recompute":
            assert sight.began_N is not None, "recomputed before the step"
            return sight.began_N
        case "loglinear":
            return sight.now_N if sight.num_done == 0 else _between(sight)


def _between(sight: Sight) -> Tensor:
    ages_N = sight.ages_N.to(sight.now_N.dtype)
    return torch.lerp(sight.recorded_N, sight.now_N, ages_N / (ages_N + sight.num_done))
