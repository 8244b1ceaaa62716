"""The two roles of the recipes: a language model, and a model that returns numbers.

    LanguageModel   logprobs            log-probs of the trained tokens; also of a frozen reference
                    train_policy        PPO and GRPO: the loss of trainer.loss, and a KL penalty
                    train_preference    DPO, on pairs: the first of each two rows is the better one
                    train_text          SFT: cross-entropy of the trained tokens
    ScalarModel     values              the expected reward before each trained token
                    advantages          GAE against the critic's values, with a KL penalty
                    train_values        a step of the critic
                    rewards             the reward of a whole row, at its last token
                    train_rewards       a step of a reward model, on pairs like those of DPO

- Log-probs are of softmax(logits / temperature) over the whole vocabulary, with the row's
  temperature (default: 1).
- Advantages have mean 0 and standard deviation 1 over the trained tokens of all ranks.
- The folder of a ScalarModel may be a language model's: then the head is new and returns 0.

Shapes: N trained tokens, S rows, P pairs.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from rollmesh.core.types import Json
from rollmesh.trainer.algorithms.loss import TokenTerms, token_logprobs
from rollmesh.trainer.algorithms.registry import find_loss
from rollmesh.trainer.controller.rendezvous import RankContext
from rollmesh.trainer.models.folders import load_model, load_scorer
from rollmesh.trainer.roles.learner import LearnedModel, Learner, Row, RowBatch, Terms
from rollmesh.trainer.roles.losses import (
    NO_LOSS,
    Estimate,
    Returns,
    divergence,
    duel_loss,
    gae,
    preference_margins,
    token_rewards,
    value_loss,
)


class LanguageTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the losses beside those of TrainerConfig."""

    kl_coef: float = 0.0
    """Weight of the divergence from the reference in the policy's loss (default: 0)."""
    kl_estimate: Estimate = "k2"
    """Estimate of that divergence: `k2` (default) or `k3`; see losses.divergence."""
    beta: float = 0.1
    """Strength of the reference in DPO (default: 0.1)."""
    label_smoothing: float = 0.0
    """Assumed share of swapped pairs in DPO (default: 0)."""

    def __post_init__(self) -> None:
        if self.kl_estimate == "k1":
            raise ValueError(NO_LOSS)


class LanguageModel(LearnedModel):
    """One language model on all ranks; its methods are those above."""

    def __init__(
        self,
        context: RankContext,
        path: str,
        trainer: Mapping[str, Json] | None = None,
        losses: Mapping[str, Json] | None = None,
    ) -> None:
        """Load the model in the folder `path`; it is frozen without `trainer`.

        `trainer` has fields of TrainerConfig. Used are the rates, max_grad_norm, loss, clips,
        max_importance_weight, entropy_coef and microbatch_tokens. `losses` has fields of
        LanguageTerms. Raises ModelError for a folder without a model, ValidationError for an
        unknown or refused field, ConfigError for an unknown loss.
        """
        self._terms = msgspec.convert(losses or {}, LanguageTerms)
        super().__init__(Learner(context, load_model(Path(path)), Path(path), trainer))
        self._settings = self._learner.settings
        self._loss = find_loss(self._settings.loss)

    def logprobs(self, rows: Sequence[Row], row_weights: Sequence[float] = ()) -> list[Tensor]:
        """[N] of each row, in nats."""
        del row_weights
        return self._learner.infer(rows, lambda batch: batch.split(self._logprobs(batch)[0]))

    def train_text(
        self, rows: Sequence[Row], step: int, row_weights: Sequence[float] = ()
    ) -> dict[str, float]:
        """Do a step of supervised training; `loss` is the mean cross-entropy, in nats."""
        return self._learner.train(rows, row_weights, step, self._text)

    def train_preference(
        self, rows: Sequence[Row], step: int, row_weights: Sequence[float] = ()
    ) -> dict[str, float]:
        """Do a step of DPO. Column: `reference`. `won` is the share of pairs whose better row
        gained more than the other."""
        return self._learner.train(rows, row_weights, step, self._preference, group_size=2)

    def train_policy(
        self, rows: Sequence[Row], step: int, row_weights: Sequence[float] = ()
    ) -> dict[str, float]:
        """Do a step of PPO or GRPO. Columns: `advantages`, and optionally `proximal` (as the train
        step began), `logprobs` (as recorded when sampled) and `reference`."""
        return self._learner.train(rows, row_weights, step, self._policy)

    def _logprobs(self, batch: RowBatch) -> tuple[Tensor, Tensor]:
        """(log-probs [N], entropies [N])."""
        logits_NV = self._learner.outputs(batch, batch.before_N)
        temperatures_N = batch.column("temperature", torch.ones_like(logits_NV[:, 0]))
        return token_logprobs(logits_NV, batch.targets_N, temperatures_N)

    def _text(self, batch: RowBatch) -> Terms:
        return {"loss": -self._logprobs(batch)[0].sum()}

    def _preference(self, batch: RowBatch) -> Terms:
        logprobs_N, _ = self._logprobs(batch)
        now_P2 = batch.sums(logprobs_N).view(-1, 2)
        reference_P2 = batch.sums(batch.column("reference")).view(-1, 2)
        margins_P = preference_margins(now_P2, reference_P2, self._terms.beta)
        losses_P = duel_loss(margins_P, self._terms.label_smoothing)
        return {"loss": losses_P.sum(), "won": (margins_P > 0).sum(), "margin": margins_P.sum()}

    def _policy(self, batch: RowBatch) -> Terms:
        logprobs_N, entropies_N = self._logprobs(batch)
        before_N = logprobs_N.detach()
        is_plain = self._settings.proximal == "recorded"
        proximal_N = batch.column("logprobs" if is_plain else "proximal", before_N)
        terms = TokenTerms(
            logprobs_N=logprobs_N,
            entropies_N=entropies_N if self._settings.entropy_coef else entropies_N.detach(),
            proximal_N=proximal_N,
            recorded_N=batch.column("logprobs", proximal_N),
            advantages_N=batch.column("advantages"),
            weights_N=torch.ones_like(before_N),
            samples_N=batch.rows_N(),
        )
        loss = self._loss(terms, self._settings)
        reference_N = batch.column("reference", before_N)
        kl = divergence(logprobs_N, reference_N, self._terms.kl_estimate).sum()
        return {
            "loss": loss.value + self._terms.kl_coef * kl,
            "kl": kl,
            "entropy": entropies_N.sum(),
            "clip_fraction": torch.tensor(loss.num_clipped),
        }


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
