"""What both roles stand on: one model that all ranks share, asked of rows, and trained on them.

    ask      forward passes without gradient       learn    forward and backward batch by batch, and
                                                            one optimiser step

Invariants: of the losses' sums the step takes the mean over tokens or pairs of all ranks, and so do
its reports, which are the same at all of them; every forward is a collective, so each rank does as
many as the one that has most, blank ones at the end; a frozen model does not learn. Driven by the
roles, on the step thread. Shapes: N trained tokens, K kept positions.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollmesh.core.config import TrainerConfig
from rollmesh.core.errors import ConfigError
from rollmesh.core.types import Json
from rollmesh.trainer.controller.meeting import Place
from rollmesh.trainer.learning.attention import packed_logits, packs
from rollmesh.trainer.learning.descent import Descent
from rollmesh.trainer.models.checkpoint import save_model
from rollmesh.trainer.roles.rows import Row, RowBatch, blank, pack_rows
from rollmesh.trainer.savepoints.imprint import Imprint
from rollmesh.trainer.team import Team, check_finite

Terms = Mapping[str, Tensor]
"""What a batch adds up to by name; `loss` carries the gradient."""


class Learner:
    """See the module."""

    def __init__(
        self, place: Place, model: PreTrainedModel, source: Path, trainer: Mapping[str, Json] | None
    ) -> None:
        """`trainer` are fields of TrainerConfig; without them the model is frozen."""
        self.settings = msgspec.convert(trainer or {}, TrainerConfig)
        self._source = source
        self._device = place.device
        self._ranks = Team(place.mesh["data"])
        self._model = model.to(place.device)
        self._packs = packs(self._model)
        # A batch of one token at most is one of a single group.
        self._max_tokens = self.settings.microbatch_tokens if self._packs else 1
        self._ranks.share(self._model)
        self._place = place
        self._descent = None if trainer is None else Descent(self._model, self.settings)
        self._imprint: Imprint | None = None
        if self._descent:
            self._imprint = Imprint(self._model, self._descent, self._ranks)

    def outputs(self, batch: RowBatch, kept_K: Tensor) -> Tensor:
        """[K, V]: what the model says at the kept positions of the batch, which are in order."""
        if self._packs:
            return packed_logits(self._model, batch.token_ids_T, batch.starts, kept_K)
        told = [
            packed_logits(self._model, own_T, [0, len(own_T)], own_K)
            for own_T, own_K in batch.alone(kept_K)
        ]
        return torch.cat(told)

    @torch.no_grad()
    def ask(
        self, rows: Sequence[Row], told_of: Callable[[RowBatch], Sequence[Tensor]]
    ) -> list[Tensor]:
        """What `told_of` has for each row of a batch, in the order of `rows`, padding's too."""
        told: dict[int, Tensor] = {}
        for batch in self._batches(rows, [1.0] * len(rows), 1):
            told.update(zip(batch.members, told_of(batch), strict=True))
        return [told[at] for at in range(len(rows))]

    def learn(
        self,
        rows: Sequence[Row],
        row_weights: Sequence[float],
        step: int,
        terms_of: Callable[[RowBatch], Terms],
        group_size: int = 1,
    ) -> dict[str, float]:
        """One optimiser step, on tokens or, with groups of two, on pairs; means over all of them.

        `num` is how many there were, `num_skipped` is 1 where the loss or the gradient was not
        finite and nothing changed. Raises ConfigError where the role is frozen, NotFinite where
        too many steps in a row were skipped.
        """
        if self._descent is None:
            raise ConfigError("trainer: a role without it is frozen and does not learn")
        rate = self._descent.warm_up(step)
        batches = self._batches(rows, row_weights or [1.0] * len(rows), group_size)
        counts = (
            len(each.members) // group_size if group_size > 1 else each.num_tokens
            for each in batches
        )
        [num] = self.total([sum(counts)])
        whole = max(1.0, num)
        sums: dict[str, float] = defaultdict(float)
        for batch in batches:
            terms = terms_of(batch)
            torch.autograd.backward(terms["loss"] / whole)
            for name, term in terms.items():
                sums[name] += float(term.detach())
        totals = dict(zip(sums, self.total([*sums.values()]), strict=True))
        norm = self._descent.step(totals["loss"])
        self._descent.check(step)
        means = [each / whole for each in totals.values()]
        told = {
            "num": num,
            "num_skipped": float(norm is None),
            "grad_norm": math.nan if norm is None else norm,
            "learning_rate": rate,
        }
        return dict(zip(sums, means, strict=True)) | told

    def total(self, values: Sequence[float]) -> list[float]:
        """Each added up over all ranks."""
        return self._ranks.total(values)

    def snapshot(self, folder: Path) -> None:
        """Copy what trains, and write it into `folder` beside what comes next."""
        if self._imprint and self._place.is_head:  # those beside a head have the same rows
            check_finite(self._model, self._ranks, folder)
            folder.mkdir(exist_ok=True)
            self._imprint.take(folder)

    def is_snapshot_written(self) -> bool:
        """Of all ranks; a collective."""
        return self._imprint is None or self._imprint.is_written()

    def restore(self, folder: Path) -> None:
        """Have what such a folder holds; SavepointError where it is of another model."""
        if self._imprint:
            self._imprint.restore(folder)

    def save(self, folder: Path) -> None:
        """Write a folder that stock transformers loads, by the first rank; NotFinite for weights
        that hold NaN or infinity."""
        check_finite(self._model, self._ranks, folder)
        state = self._ranks.state(self._model)
        if self._ranks.is_first:
            save_model(self._model, self._source, folder, state)

    def _batches(
        self, rows: Sequence[Row], row_weights: Sequence[float], group_size: int
    ) -> list[RowBatch]:
        """At all ranks as many."""
        batches = [*pack_rows(rows, row_weights, group_size, self._max_tokens, self._device)]
        num_missing = max(1, int(self._ranks.most(len(batches)))) - len(batches)
        return batches + [blank(group_size, self._device)] * num_missing
