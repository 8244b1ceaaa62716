"""A model that gives numbers as a role: a critic, which foresees rewards, or a reward model.

    values           what is foreseen before each trained token
    advantages       that against what came, with a price for leaving the reference: GAE
    train_values     the critic learns the returns
    rewards          what a whole row is worth, at its last token
    train_rewards    a reward model, on pairs: the first of each two rows is the better

Invariants: those of learner.py; advantages have mean 0 and spread 1 over the trained tokens of all
ranks. A folder of a language model will do: its body, and a head that says 0 of everything. Driven
by rank.py, as a role of a RankPlan. Shapes: N trained tokens, S rows, P pairs.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from rollmesh.core.types import Json
from rollmesh.trainer.controller.rendezvous import RankContext
from rollmesh.trainer.models.folders import load_scorer
from rollmesh.trainer.roles.learner import Learner, Row, RowBatch, Terms
from rollmesh.trainer.roles.losses import (
    Returns,
    divergence,
    duel_loss,
    gae,
    token_rewards,
    value_loss,
)

SPREAD_FLOOR = 1e-8


class ScalarTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What its losses and advantages take."""

    discount: float = 1.0
    """Of a reward that comes a token later."""
    trace: float = 0.95
    """GAE's lambda: 0 trusts the next value, 1 only what came."""
    value_clip: float = 0.2
    """How far a value may usefully go from where the step found it."""
    kl_coef: float = 0.0
    """What a nat of divergence from the reference costs, in rewards."""


class ScalarModel:
    """See the module."""

    def __init__(
        self,
        place: RankContext,
        path: str,
        trainer: Mapping[str, Json] | None = None,
        losses: Mapping[str, Json] | None = None,
    ) -> None:
        """The model in the folder `path`; frozen without `trainer`.

        `trainer` are fields of TrainerConfig, of which it heeds the rates, max_grad_norm and
        microbatch_tokens; `losses` those of ScalarTerms. Errors as of LanguageModel.
        """
        self._terms = msgspec.convert(losses or {}, ScalarTerms)
        model, is_new = load_scorer(Path(path))
        self._learner = Learner(place, model, Path(path), trainer)
        if is_new:
            # Only now: of a head that says 0 whatever it reads, packing could not be proven.
            torch.nn.init.zeros_(model.score.weight)

    def values(self, rows: Sequence[Row], row_weights: Sequence[float] = ()) -> list[Tensor]:
        """[N] of each row."""
        del row_weights
        return self._learner.ask(rows, lambda batch: batch.split(self._values(batch)))

    def advantages(
        self, rows: Sequence[Row], row_weights: Sequence[float] = ()
    ) -> dict[str, list[Tensor]]:
        """Columns `values`, `advantages` and `returns`. `reward` of each row is wanted, a number;
        with `kl_coef` also the columns `proximal` and `reference`."""
        values = self.values(rows)
        told = [self._returns(row, each) for row, each in zip(rows, values, strict=True)]
        weights = row_weights or [1.0] * len(rows)
        real = [each.advantages_N for each, weight in zip(told, weights, strict=True) if weight]
        mean, spread = self._moments(real)
        return {
            "values": values,
            "advantages": [(each.advantages_N - mean) / spread for each in told],
            "returns": [each.returns_N for each in told],
        }

    def rewards(self, rows: Sequence[Row], row_weights: Sequence[float] = ()) -> list[float]:
        """Of each row."""
        del row_weights
        told = self._learner.ask(rows, lambda batch: self._rewards(batch).cpu().unbind())
        return [float(each) for each in told]

    def train_values(
        self, rows: Sequence[Row], step: int, row_weights: Sequence[float] = ()
    ) -> dict[str, float]:
        """A step of the critic. Columns: `returns`, and `values` as the train step began."""
        return self._learner.learn(rows, row_weights, step, self._value_terms)

    def train_rewards(
        self, rows: Sequence[Row], step: int, row_weights: Sequence[float] = ()
    ) -> dict[str, float]:
        """A step of the reward model; `won` is the share of pairs that it has the right way."""
        return self._learner.learn(rows, row_weights, step, self._duel_terms, group_size=2)

    def snapshot(self, folder: str) -> None:
        """Copy what trains, and write it beside what comes next."""
        self._learner.snapshot(Path(folder))

    def is_snapshot_written(self) -> bool:
        """Whether all ranks have."""
        return self._learner.is_snapshot_written()

    def restore(self, folder: str) -> None:
        """Read this rank's rows of what any number of them wrote."""
        self._learner.restore(Path(folder))

    def save(self, folder: str) -> None:
        """Write the model."""
        self._learner.save(Path(folder))

    def _returns(self, row: Row, values_N: Tensor) -> Returns:
        kl_N = torch.zeros_like(values_N)
        if self._terms.kl_coef:
            kl_N = divergence(row["proximal"], row["reference"], "k1")
        rewards_N = token_rewards(row["reward"], kl_N, self._terms.kl_coef)
        return gae(rewards_N, values_N, self._terms.discount, self._terms.trace)

    def _moments(self, parts: Sequence[Tensor]) -> tuple[float, float]:
        """(mean, standard deviation) over all ranks."""
        all_N = torch.cat([torch.zeros(0), *parts]).double()
        sums = [len(all_N), float(all_N.sum()), float(all_N.square().sum())]
        num, first, second = self._learner.total(sums)
        mean = first / max(1, num)
        return mean, math.sqrt(max(0.0, second / max(1, num) - mean**2)) + SPREAD_FLOOR

    def _values(self, batch: RowBatch) -> Tensor:
        return self._learner.outputs(batch, batch.before_N)[:, 0].float()

    def _rewards(self, batch: RowBatch) -> Tensor:
        return self._learner.outputs(batch, batch.ends())[:, 0].float()

    def _value_terms(self, batch: RowBatch) -> Terms:
        values_N = self._values(batch)
        old_N = batch.column("values", values_N.detach())
        told = value_loss(values_N, old_N, batch.column("returns"), self._terms.value_clip)
        return {"loss": told.losses_N.sum(), "clip_fraction": told.is_clipped_N.sum()}

    def _duel_terms(self, batch: RowBatch) -> Terms:
        rewards_P2 = self._rewards(batch).view(-1, 2)
        margins_P = rewards_P2[:, 0] - rewards_P2[:, 1]
        won = (margins_P > 0).sum()
        return {"loss": duel_loss(margins_P).sum(), "won": won, "margin": margins_P.sum()}
