"""A model that returns numbers as a role: a critic, or a reward model.

    values           the expected reward before each trained token
    advantages       GAE against the critic's values, with a KL penalty
    train_values     a step of the critic
    rewards          the reward of a whole row, at its last token
    train_rewards    a step of a reward model, on pairs: the first of each two is the better one

- Advantages have mean 0 and standard deviation 1 over the trained tokens of all ranks.
- The folder may be a language model's: then the head is new and returns 0.

Shapes: N trained tokens, S rows, P pairs.
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
from rollmesh.trainer.roles.learner import LearnedModel, Learner, Row, RowBatch, Terms
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
    """Settings of the losses and advantages."""

    discount: float = 1.0
    """Discount per token (default: 1)."""
    trace: float = 0.95
    """GAE's lambda: 0 uses the next value only, 1 the rewards only (default: 0.95)."""
    value_clip: float = 0.2
    """Clip of a value's change in a step (default: 0.2)."""
    kl_coef: float = 0.0
    """Penalty of a nat of divergence from the reference, in rewards (default: 0)."""


class ScalarModel(LearnedModel):
    """One scalar model on all ranks; its methods are those above."""

    def __init__(
        self,
        context: RankContext,
        path: str,
        trainer: Mapping[str, Json] | None = None,
        losses: Mapping[str, Json] | None = None,
    ) -> None:
        """Load the model in the folder `path`; it is frozen without `trainer`.

        `trainer` has fields of TrainerConfig; used are the rates, max_grad_norm and
        microbatch_tokens. `losses` has fields of ScalarTerms. Raises as LanguageModel does.
        """
        self._terms = msgspec.convert(losses or {}, ScalarTerms)
        model, is_new = load_scorer(Path(path))
        super().__init__(Learner(context, model, Path(path), trainer))
        if is_new:
            # After Learner: with a head that always returns 0, packing could not be tested.
            torch.nn.init.zeros_(model.score.weight)

    def values(self, rows: Sequence[Row], row_weights: Sequence[float] = ()) -> list[Tensor]:
        """[N] of each row."""
        del row_weights
        return self._learner.infer(rows, lambda batch: batch.split(self._values(batch)))

    def advantages(
        self, rows: Sequence[Row], row_weights: Sequence[float] = ()
    ) -> dict[str, list[Tensor]]:
        """Columns `values`, `advantages` and `returns`. `reward` of each row is wanted, a number;
        with `kl_coef` also the columns `proximal` and `reference`."""
        values = self.values(rows)
        estimates = [self._returns(row, each) for row, each in zip(rows, values, strict=True)]
        weights = row_weights or [1.0] * len(rows)
        real = [
            each.advantages_N for each, weight in zip(estimates, weights, strict=True) if weight
        ]
        mean, spread = self._moments(real)
        return {
            "values": values,
            "advantages": [(each.advantages_N - mean) / spread for each in estimates],
            "returns": [each.returns_N for each in estimates],
        }

    def rewards(self, rows: Sequence[Row], row_weights: Sequence[float] = ()) -> list[float]:
        """The reward of each row."""
        del row_weights
        rewards = self._learner.infer(rows, lambda batch: self._rewards(batch).cpu().unbind())
        return [float(each) for each in rewards]

    def train_values(
        self, rows: Sequence[Row], step: int, row_weights: Sequence[float] = ()
    ) -> dict[str, float]:
        """Do a step of the critic. Columns: `returns`, and `values` as the train step began."""
        return self._learner.train(rows, row_weights, step, self._value_terms)

    def train_rewards(
        self, rows: Sequence[Row], step: int, row_weights: Sequence[float] = ()
    ) -> dict[str, float]:
        """Do a step of the reward model; `won` is the share of pairs that it orders correctly."""
        return self._learner.train(rows, row_weights, step, self._duel_terms, group_size=2)

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
        num, first, second = self._learner.sum(sums)
        mean = first / max(1, num)
        return mean, math.sqrt(max(0.0, second / max(1, num) - mean**2)) + SPREAD_FLOOR

    def _values(self, batch: RowBatch) -> Tensor:
        return self._learner.outputs(batch, batch.before_N)[:, 0].float()

    def _rewards(self, batch: RowBatch) -> Tensor:
        return self._learner.outputs(batch, batch.ends())[:, 0].float()

    def _value_terms(self, batch: RowBatch) -> Terms:
        values_N = self._values(batch)
        old_N = batch.column("values", values_N.detach())
        loss = value_loss(values_N, old_N, batch.column("returns"), self._terms.value_clip)
        return {"loss": loss.losses_N.sum(), "clip_fraction": loss.is_clipped_N.sum()}

    def _duel_terms(self, batch: RowBatch) -> Terms:
        rewards_P2 = self._rewards(batch).view(-1, 2)
        margins_P = rewards_P2[:, 0] - rewards_P2[:, 1]
        won = (margins_P > 0).sum()
        return {"loss": duel_loss(margins_P).sum(), "won": won, "margin": margins_P.sum()}
