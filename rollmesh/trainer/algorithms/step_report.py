"""What staleness does to a step: how much its tokens weigh for being of older weights, by age.

    weight      min(w, C), as loss.py has it
    mean        of the weights; 1 in expectation as long as none is truncated
    truncated   the share of tokens whose w is past C
    effective   (sum of weights)^2 / (N * sum of weights^2): so many of N tokens, weighed alike,
                would say as much (the effective sample size of Kish 1965, "Survey Sampling")

Age is in train steps, from the weights that sampled a token to those that the step began with.
Invariants: tokens that weigh nothing in the loss are not counted; sums are over all ranks, and the
rows of the ages add up to the whole. Pure; driven by the policy. Shapes: N trained tokens.

What one train step did: a report of all ranks, and the sums that become it.

Invariants: means are over trained tokens, whatever batch or rank they were in; gaps are told of the
samples that were looked at with the weights that the step began with, and of no others. Driven by
the policy, batch by batch. Shapes: N trained tokens.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollmesh.core.config import TrainerConfig
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.algorithms.batches import TokenBatch
from rollmesh.trainer.algorithms.loss import LossResult, TokenTerms
from rollmesh.trainer.meter.exactness import Cell, Gaps, exact_gap, is_masked, measure
from rollmesh.trainer.ranks import Ranks

MAX_AGE = 63
"""Older tokens are counted with those of this age."""
DIGITS = 5


class ImportanceStats(msgspec.Struct, frozen=True):
    """Of tokens that have something in common."""

    num_tokens: int
    mean: float | None
    """None of no tokens, as are the others."""
    truncated: float | None
    effective: float | None


class TokenAges(msgspec.Struct, frozen=True):
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

    def told(self, ranks: Ranks) -> tuple[ImportanceStats, dict[str, ImportanceStats]]:
        """Of all tokens of all ranks, and by age; a collective."""
        num_ages = int(ranks.max(len(self._sums)))
        sums = np.array(ranks.sum(_longer(self._sums, num_ages).ravel().tolist()))
        by_age = {str(age): _of(each) for age, each in enumerate(sums.reshape(-1, 4)) if each[0]}
        return _of(sums.reshape(-1, 4).sum(0)), by_age


def _longer(sums: npt.NDArray[np.float64], num_ages: int) -> npt.NDArray[np.float64]:
    return np.pad(sums, ((0, num_ages - len(sums)), (0, 0)))


def _of(sums: npt.NDArray[np.float64]) -> ImportanceStats:
    num, total, squares, num_truncated = sums.tolist()
    if not num:
        return ImportanceStats(0, None, None, None)
    effective = total**2 / (num * squares) if squares else 0.0
    shares = (total / num, num_truncated / num, effective)
    return ImportanceStats(int(num), *[round(each, DIGITS) for each in shares])


NO_VERSION = -1
"""A policy version that no token has."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one train step did; means over trained tokens, by the weights that met them."""

    loss: float
    """The mean over the step's minibatches that changed the weights; NaN where none did."""
    entropy: float
    """Nats."""
    kl: float
    """From the recorded to the current policy: mean of exp(d) - 1 - d, d = current - recorded
    (Schulman 2020, "Approximating KL divergence"); current as the step began, where that is
    known (proximal.py)."""
    clip_fraction: float
    importance_mean: float | None
    """This and the next two as importance.py has them; None of a step without tokens."""
    truncated_fraction: float | None
    effective_fraction: float | None
    importance_by_age: dict[str, ImportanceStats]
    grad_norm: float
    """Before clipping; a mean as of `loss`."""
    learning_rate: float
    logprob_gap_mean: float | None
    """|recorded - recomputed| over tokens of the weights held as the step began; None if no token
    is of them."""
    logprob_gap_max: float | None
    num_tokens: int
    num_masked: int
    """Samples left out because the mean of that gap was too large."""
    num_masked_tokens: int
    """Tokens of other samples left out because their own gap was too large, or because their
    recording is not finite."""
    num_skipped: int
    """Optimiser steps whose loss or gradient was not finite: they changed nothing."""
    num_skipped_in_row: int
    """Such steps since the last one that changed the weights."""
    held_policy_version: int | None
    """Of the weights held as the step began; None where they have no name."""
    gaps: list[Gaps]
    """Of each sample given, in order: |recorded - recomputed|, of whatever version; nothing of one
    that was not looked at before the weights moved."""

    def figures(self) -> dict[str, Any]:
        """All but the gaps, which exactness.py tells in fewer words; plain values."""
        row = msgspec.structs.asdict(self)
        del row["gaps"], row["num_skipped_in_row"]
        by_age: dict[str, Any] = msgspec.to_builtins(self.importance_by_age)
        return row | {"importance_by_age": by_age}


class StepMeter:
    """Sums over the batches of one train step."""

    def __init__(self, samples: Sequence[Sample], moment: TokenAges, held: int | None) -> None:
        """`held` is the version of the weights that the step begins with, if they have a name."""
        self.moment = moment
        self._grad_norms: list[float] = []
        """Norms of the minibatches that changed the weights."""
        self._num_skipped = 0
        self.minibatch_loss = 0.0
        """This rank's part of the loss of the minibatch that is under way."""
        self._samples = samples
        self._held = held
        self._gaps: list[Gaps] = [[] for _ in samples]
        self._own = Cell()
        """Tokens of the very weights that the step began with."""
        self._importance = ImportanceMeter()
        self._num_masked = 0
        self._num_masked_tokens = 0
        self._num_tokens = 0
        self._num_clipped = 0
        self._loss = 0.0
        self._entropy = 0.0
        self._kl = 0.0

    def masked(self, batch: TokenBatch, began_N: Tensor | None, settings: TrainerConfig) -> Tensor:
        """Return which trained tokens of the batch do not train [N], and book their gaps.

        `began_N` are log-probs by the weights that the step began with. Without them nothing is
        measured, and only tokens whose recording is not finite are masked.
        """
        of_token_N = ~torch.isfinite(batch.recorded_N)
        of_sample_N = torch.zeros_like(of_token_N)
        if began_N is not None:
            gaps_N = (began_N - batch.recorded_N).abs()
            is_exact_N = batch.policy_versions_N == (
                NO_VERSION if self._held is None else self._held
            )
            of_token_N |= is_exact_N & ~(gaps_N <= settings.max_token_gap)
            strange = sorted(self._measured(batch, gaps_N, settings))
            self._num_masked += len(strange)
            strangers = torch.tensor(strange, dtype=torch.int64, device=gaps_N.device)
            of_sample_N = torch.isin(batch.samples_N, strangers)
        self._num_masked_tokens += int((of_token_N & ~of_sample_N).sum())
        return of_token_N | of_sample_N

    def _measured(self, batch: TokenBatch, gaps_N: Tensor, settings: TrainerConfig) -> set[int]:
        """Book the gaps of the batch; the samples that do not train."""
        rows_N = batch.samples_N.cpu().numpy()
        rows = rows_N[np.flatnonzero(np.diff(rows_N, prepend=-1))].tolist()
        samples = [self._samples[row] for row in rows]
        strange = set()
        told = measure(gaps_N.cpu().numpy(), samples, settings.max_token_gap)
        for row, gaps in zip(rows, told, strict=True):
            self._gaps[row] = gaps
            self._own.add(exact_gap(self._samples[row], gaps, self._held))
            if is_masked(self._samples[row], gaps, self._held, settings.max_logprob_gap):
                strange.add(row)
        return strange

    def add(
        self, batch: TokenBatch, terms: TokenTerms, earliest_N: Tensor, loss: LossResult
    ) -> None:
        """A batch; `earliest_N` are log-probs by the weights nearest to the step's beginning."""
        drift_N = earliest_N - terms.recorded_N
        self._num_tokens += len(drift_N)
        self._num_clipped += loss.num_clipped
        self.minibatch_loss += float(loss.value.detach())
        self._entropy += float(terms.entropies_N.detach().sum())
        self._kl += float((torch.expm1(drift_N) - drift_N).sum())
        trains_N = terms.weights_N > 0
        ages_N = self.moment.ages(batch.policy_versions_N[trains_N])
        self._importance.add(ages_N, loss.importance_N[trains_N], loss.is_truncated_N[trains_N])

    def end_minibatch(self, grad_norm: float | None) -> None:
        """Count an optimiser step; None where its loss or gradient was not finite."""
        if grad_norm is None:
            self._num_skipped += 1
        else:
            self._grad_norms.append(grad_norm)
            self._loss += self.minibatch_loss
        self.minibatch_loss = 0.0

    def report(self, learning_rate: float, num_skipped_in_row: int, ranks: Ranks) -> StepReport:
        """Return the report of all ranks; a collective."""
        own = self._own
        masked = (self._num_masked, self._num_masked_tokens)
        counts = [self._num_tokens, self._num_clipped, own.num_tokens, *masked]
        num_tokens, num_clipped, num_own, *num_masked = map(int, ranks.sum(counts))
        loss, entropy, kl, gap = ranks.sum([self._loss, self._entropy, self._kl, own.total])
        # One that is no number is the largest of all, also for a collective.
        gap_max = ranks.max(math.inf if math.isnan(own.largest) else own.largest)
        importance, by_age = self._importance.told(ranks)
        num = max(1, num_tokens)
        # A step without minibatches is no loss; one whose minibatches all were skipped has none.
        num_done = len(self._grad_norms) or (math.nan if self._num_skipped else 1)
        return StepReport(
            loss=loss / num_done,
            entropy=entropy / num,
            kl=kl / num,
            clip_fraction=num_clipped / num,
            importance_mean=importance.mean,
            truncated_fraction=importance.truncated,
            effective_fraction=importance.effective,
            importance_by_age=by_age,
            grad_norm=sum(self._grad_norms) / num_done,
            learning_rate=learning_rate,
            logprob_gap_mean=gap / num_own if num_own else None,
            logprob_gap_max=gap_max if num_own else None,
            num_tokens=num_tokens,
            num_masked=num_masked[0],
            num_masked_tokens=num_masked[1],
            num_skipped=self._num_skipped,
            num_skipped_in_row=num_skipped_in_row,
            held_policy_version=self._held,
            gaps=self._gaps,
        )
