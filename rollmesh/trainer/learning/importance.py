"""What staleness does to a step: how much its tokens weigh for being of older weights, by age.

    weight      min(w, C), as loss.py has it
    mean        of the weights; 1 in expectation as long as none is truncated
    truncated   the share of tokens whose w is past C
    effective   (sum of weights)^2 / (N * sum of weights^2): so many of N tokens, weighed alike,
                would say as much (the effective sample size of Kish 1965, "Survey Sampling")

Age is in train steps, from the weights that sampled a token to those that the step began with.
Invariants: tokens that weigh nothing in the loss are not counted; sums are over all ranks, and the
rows of the ages add up to the whole. Pure; driven by the policy. Shapes: N trained tokens.
"""

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollmesh.trainer.team import Ranks

MAX_AGE = 63
"""Older tokens are counted with those of this age."""
DIGITS = 5


class Importance(msgspec.Struct, frozen=True):
    """Of tokens that have something in common."""

    num_tokens: int
    mean: float | None
    """None of no tokens, as are the others."""
    truncated: float | None
    effective: float | None


class Moment(msgspec.Struct, frozen=True):
    """When a step is, and so how old what it trains on."""

    step: int
    step_of_version: Mapping[int, int]
    """After how many train steps each policy version was made; what is not in it is not old."""

    def ages(self, policy_versions_N: Tensor) -> Tensor:
        """[N], int64, in train steps."""
        versions, places_N = torch.unique(policy_versions_N, return_inverse=True)
        made = (self.step_of_version.get(each, self.step) for each in versions.tolist())
        ages = [min(max(0, self.step - each), MAX_AGE) for each in made]
        return torch.tensor(ages, dtype=torch.int64, device=places_N.device)[places_N]


class ImportanceMeter:
    """Sums over the batches of one train step."""

    def __init__(self) -> None:
        self._sums = np.zeros((0, 4))
        """By age: tokens, weights, their squares, truncated ones."""

    def add(self, ages_N: Tensor, importance_N: Tensor, is_truncated_N: Tensor) -> None:
        """Tokens that train."""
        ages = ages_N.cpu().numpy()
        weights = importance_N.double().cpu().numpy()
        columns = (np.ones(len(ages)), weights, weights**2, is_truncated_N.cpu().numpy())
        num_ages = max(len(self._sums), int(ages.max(initial=-1)) + 1)
        self._sums = _longer(self._sums, num_ages)
        for at, column in enumerate(columns):
            self._sums[:, at] += np.bincount(ages, column, num_ages)

    def told(self, ranks: Ranks) -> tuple[Importance, dict[str, Importance]]:
        """Of all tokens of all ranks, and by age; a collective."""
        num_ages = int(ranks.most(len(self._sums)))
        sums = np.array(ranks.total(_longer(self._sums, num_ages).ravel().tolist()))
        by_age = {str(age): _of(each) for age, each in enumerate(sums.reshape(-1, 4)) if each[0]}
        return _of(sums.reshape(-1, 4).sum(0)), by_age


def _longer(sums: npt.NDArray[np.float64], num_ages: int) -> npt.NDArray[np.float64]:
    return np.pad(sums, ((0, num_ages - len(sums)), (0, 0)))


def _of(sums: npt.NDArray[np.float64]) -> Importance:
    num, total, squares, num_truncated = sums.tolist()
    if not num:
        return Importance(0, None, None, None)
    effective = total**2 / (num * squares) if squares else 0.0
    shares = (total / num, num_truncated / num, effective)
    return Importance(int(num), *[round(each, DIGITS) for each in shares])
