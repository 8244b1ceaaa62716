"""The report of one train step, and the sums over batches and ranks that become it.

- Means are over trained tokens of all ranks, in whatever batch they were. Tokens with weight 0 are
  in no importance figure.
- Log-prob gaps are measured by the weights that the step began with, and only where these were
  computed.
- Ages are in train steps, from the weights that sampled a token to those that the step began with;
  the rows by age add up to the total.

Shapes: N trained tokens.
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
from rollmesh.trainer.algorithms.loss import LossResult, TokenTerms
from rollmesh.trainer.algorithms.packing import TokenBatch
from rollmesh.trainer.ranks import Ranks
from rollmesh.trainer.reports.exactness import Gaps, GapStats, exact_gap, is_masked, measure

MAX_AGE = 63
"""Older tokens are counted with those of this age."""
DIGITS = 5


class ImportanceStats(msgspec.Struct, frozen=True):
    """Importance weights min(w, C) (loss.py) of a set of tokens; None if there are none."""

    num_tokens: int
    mean: float | None
    """1 in expectation if none is truncated."""
    truncated: float | None
    """Share of tokens with w > C."""
    effective: float | None
    """(sum of weights)^2 / (N * sum of weights^2): the effective sample size of Kish 1965, "Survey
    Sampling", as a share of N."""


class TokenAges(msgspec.Struct, frozen=True):
    """The ages of tokens as a train step begins."""

    step: int
    step_of_version: Mapping[int, int]
    """Train steps after which each policy version was made; other versions have age 0."""

    def ages(self, policy_versions_N: Tensor) -> Tensor:
        """[N], int64, in train steps."""
        versions, index_N = torch.unique(policy_versions_N, return_inverse=True)
        steps = (self.step_of_version.get(each, self.step) for each in versions.tolist())
        ages = [min(max(0, self.step - each), MAX_AGE) for each in steps]
        return torch.tensor(ages, dtype=torch.int64, device=index_N.device)[index_N]


class ImportanceMeter:
    """Sums of importance weights over the batches of one train step."""

    def __init__(self) -> None:
        self._sums = np.zeros((0, 4))
        """[ages, 4]: number of tokens, sum of weights, of their squares, number truncated."""

    def add(self, ages_N: Tensor, importance_N: Tensor, is_truncated_N: Tensor) -> None:
        """Add the trained tokens of a batch."""
        ages = ages_N.cpu().numpy()
        weights = importance_N.double().cpu().numpy()
        columns = (np.ones(len(ages)), weights, weights**2, is_truncated_N.cpu().numpy())
        num_ages = max(len(self._sums), int(ages.max(initial=-1)) + 1)
        self._sums = _padded(self._sums, num_ages)
        for at, column in enumerate(columns):
            self._sums[:, at] += np.bincount(ages, column, num_ages)

    def totals(self, ranks: Ranks) -> tuple[ImportanceStats, dict[str, ImportanceStats]]:
        """The figures of all tokens of all ranks, and by age; a collective."""
        num_ages = int(ranks.max(len(self._sums)))
        sums = np.array(ranks.sum(_padded(self._sums, num_ages).ravel().tolist()))
        by_age = {str(age): _stats(each) for age, each in enumerate(sums.reshape(-1, 4)) if each[0]}
        return _stats(sums.reshape(-1, 4).sum(0)), by_age


def _padded(sums: npt.NDArray[np.float64], num_ages: int) -> npt.NDArray[np.float64]:
    return np.pad(sums, ((0, num_ages - len(sums)), (0, 0)))


def _stats(sums: npt.NDArray[np.float64]) -> ImportanceStats:
    num, total, squares, num_truncated = sums.tolist()
    if not num:
        return ImportanceStats(0, None, None, None)
    effective = total**2 / (num * squares) if squares else 0.0
    shares = (total / num, num_truncated / num, effective)
    return ImportanceStats(int(num), *[round(each, DIGITS) for each in shares])


NO_VERSION = -1
"""A policy version that no token has."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one train step; means over trained tokens, as their minibatch began."""

    loss: float
    """Mean over the minibatches that changed the weights; NaN if none did."""
    entropy: float
    """Nats."""
    kl: float
    """From the recorded to the current policy: mean of exp(d) - 1 - d, d = current - recorded
    (Schulman 2020, "Approximating KL divergence"); current as the step began, if that was
    computed."""
    clip_fraction: float
    importance_mean: float | None
    """This and the next two: see ImportanceStats."""
    truncated_fraction: float | None
    effective_fraction: float | None
    importance_by_age: dict[str, ImportanceStats]
    grad_norm: float
    """Before clipping; a mean over the same minibatches as `loss`."""
    learning_rate: float
    logprob_gap_mean: float | None
    """|recorded - recomputed| over tokens of the weights held as the step began; None if there are
    none."""
    logprob_gap_max: float | None
    num_tokens: int
    num_masked: int
    """Samples masked because their mean gap was too large."""
    num_masked_tokens: int
    """Tokens of other samples masked because their own gap was too large or their recorded log-prob
    is not finite."""
    num_skipped: int
    """Optimiser steps whose loss or gradient was not finite; they changed nothing."""
    num_skipped_in_row: int
    """Such steps since the last one that changed the weights."""
    held_policy_version: int | None
    """Version of the weights held as the step began; None if they were not published."""
    gaps: list[Gaps]
    """|recorded - recomputed| of each sample, in order, of any version; empty for a sample whose
    gaps were not measured before the weights changed."""

    def figures(self) -> dict[str, Any]:
        """Plain values of all fields except the gaps, which exactness.py summarises."""
        row = msgspec.structs.asdict(self)
        del row["gaps"], row["num_skipped_in_row"]
        by_age: dict[str, Any] = msgspec.to_builtins(self.importance_by_age)
        return row | {"importance_by_age": by_age}


class StepMeter:
    """Sums over the batches of one train step."""

    def __init__(self, samples: Sequence[Sample], token_ages: TokenAges, held: int | None) -> None:
        """`held` is the version of the weights that the step begins with, if they have one."""
        self.token_ages = token_ages
        self._grad_norms: list[float] = []
        """Gradient norms of the minibatches that changed the weights."""
        self._num_skipped = 0
        self.minibatch_loss = 0.0
        """This rank's part of the loss of the current minibatch."""
        self._samples = samples
        self._held = held
        self._gaps: list[Gaps] = [[] for _ in samples]
        self._own = GapStats()
        """Tokens of the weights that the step began with."""
        self._importance = ImportanceMeter()
        self._num_masked = 0
        self._num_masked_tokens = 0
        self._num_tokens = 0
        self._num_clipped = 0
        self._loss = 0.0
        self._entropy = 0.0
        self._kl = 0.0

    def mask(self, batch: TokenBatch, start_N: Tensor | None, settings: TrainerConfig) -> Tensor:
        """Return which trained tokens of the batch are masked [N], and record their gaps.

        `start_N` are log-probs by the weights that the step began with. Without them nothing is
        measured, and only tokens whose recorded log-prob is not finite are masked.
        """
        of_token_N = ~torch.isfinite(batch.recorded_N)
        of_sample_N = torch.zeros_like(of_token_N)
        if start_N is not None:
            gaps_N = (start_N - batch.recorded_N).abs()
            is_exact_N = batch.policy_versions_N == (
                NO_VERSION if self._held is None else self._held
            )
            of_token_N |= is_exact_N & ~(gaps_N <= settings.max_token_gap)
            masked = sorted(self._masked_samples(batch, gaps_N, settings))
            self._num_masked += len(masked)
            masked_samples = torch.tensor(masked, dtype=torch.int64, device=gaps_N.device)
            of_sample_N = torch.isin(batch.samples_N, masked_samples)
        self._num_masked_tokens += int((of_token_N & ~of_sample_N).sum())
        return of_token_N | of_sample_N

    def _masked_samples(
        self, batch: TokenBatch, gaps_N: Tensor, settings: TrainerConfig
    ) -> set[int]:
        """Record the gaps of the batch, and return the samples that are masked."""
        rows_N = batch.samples_N.cpu().numpy()
        rows = rows_N[np.flatnonzero(np.diff(rows_N, prepend=-1))].tolist()
        samples = [self._samples[row] for row in rows]
        masked = set()
        measured = measure(gaps_N.cpu().numpy(), samples, settings.max_token_gap)
        for row, gaps in zip(rows, measured, strict=True):
            self._gaps[row] = gaps
            self._own.add(exact_gap(self._samples[row], gaps, self._held))
            if is_masked(self._samples[row], gaps, self._held, settings.max_logprob_gap):
                masked.add(row)
        return masked

    def add(
        self, batch: TokenBatch, terms: TokenTerms, earliest_N: Tensor, loss: LossResult
    ) -> None:
        """Add a batch; `earliest_N` has the log-probs nearest to the start of the step."""
        drift_N = earliest_N - terms.recorded_N
        self._num_tokens += len(drift_N)
        self._num_clipped += loss.num_clipped
        self.minibatch_loss += float(loss.value.detach())
        self._entropy += float(terms.entropies_N.detach().sum())
        self._kl += float((torch.expm1(drift_N) - drift_N).sum())
        trains_N = terms.weights_N > 0
        ages_N = self.token_ages.ages(batch.policy_versions_N[trains_N])
        self._importance.add(ages_N, loss.importance_N[trains_N], loss.is_truncated_N[trains_N])

    def end_minibatch(self, grad_norm: float | None) -> None:
        """Count an optimiser step; `grad_norm` is None if its loss or gradient was not finite."""
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
        # NaN counts as the largest, also in a collective.
        gap_max = ranks.max(math.inf if math.isnan(own.largest) else own.largest)
        importance, by_age = self._importance.totals(ranks)
        num = max(1, num_tokens)
        # Without minibatches the loss is 0; if all minibatches were skipped, it is NaN.
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
