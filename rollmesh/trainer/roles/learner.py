"""Rows as a role is handed them, several packed into one forward pass without padding.

A row is a dict: `token_ids` [T], maybe `loss_mask` [T] (which tokens train; default: all but the
first), and columns, which say something of its trained tokens: a tensor with one entry for each of
them [N], or for each token [T], or a number for all. What a role answers of tokens is [N] again, so
it can stand in the row as a column of the next call.

Invariants: rows of a group stand in one batch, in their order; a row that weighs nothing is in no
batch; the same rows are packed alike everywhere. Driven by learner.py.
Shapes: T tokens (of a row, or of all rows of a batch), N trained tokens, S sequences, P pairs.

What both roles stand on: one model that all ranks share, asked of rows, and trained on them.

    ask      forward passes without gradient       learn    forward and backward batch by batch, and
                                                            one optimiser step

Invariants: of the losses' sums the step takes the mean over tokens or pairs of all ranks, and so do
its reports, which are the same at all of them; every forward is a collective, so each rank does as
many as the one that has most, blank ones at the end; a frozen model does not learn. Driven by the
roles, on the step thread. Shapes: N trained tokens, K kept positions.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollmesh.core.config import TrainerConfig
from rollmesh.core.errors import ConfigError
from rollmesh.core.types import Json
from rollmesh.trainer.algorithms.attention import enable_packing, packed_logits
from rollmesh.trainer.algorithms.optimizer import ModelOptimizer
from rollmesh.trainer.controller.rendezvous import RankContext
from rollmesh.trainer.models.folders import save_model
from rollmesh.trainer.ranks import ShardedRanks, check_finite
from rollmesh.trainer.savepoints.imprint import Imprint

Row = Mapping[str, Any]


class RowBatch:
    """See the module."""

    def __init__(self, rows: Sequence[Row], members: Sequence[int], device: str) -> None:
        """`members` says which rows of a call `rows` are; ConfigError names a key that is amiss."""
        self.members = tuple(members)
        masks = [_mask(row) for row in rows]
        token_ids_T = torch.cat([row["token_ids"].long() for row in rows])
        trained_N = torch.cat(masks).nonzero()[:, 0]
        self.starts = (0, *accumulate(map(len, masks)))
        """Where each row begins, and T at the end."""
        self.token_ids_T = token_ids_T.to(device)
        self.targets_N = token_ids_T[trained_N].to(device)
        self.before_N = (trained_N - 1).to(device)
        """Where the model is asked for each trained token: at the one before it."""
        self._device = device
        # Of a blank batch's rows nobody asks, and they train nothing.
        self._rows = [*zip(rows, masks, strict=True)][: len(members)]
        self._counts = [int(mask.sum()) for _, mask in self._rows]

    @property
    def num_tokens(self) -> int:
        """That train."""
        return len(self.targets_N)

    def ends(self) -> Tensor:
        """[S]: each row's last position."""
        ends = [end - 1 for end in self.starts[1:]]
        return torch.tensor(ends[: len(self.members)], dtype=torch.int64, device=self._device)

    def alone(self, kept_K: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(its tokens [T], the kept positions in it) of each row."""
        for start, end in pairwise(self.starts):
            own_K = kept_K[(kept_K >= start) & (kept_K < end)]
            yield self.token_ids_T[start:end], own_K - start

    def column(self, name: str, otherwise: Tensor | None = None) -> Tensor:
        """[N] float32: what the rows say of their trained tokens; `otherwise`, where one does not.

        ConfigError for an entry that does not fit, and for one that lacks without `otherwise`.
        """
        usual = [None] * len(self._rows) if otherwise is None else self.split(otherwise)
        entries = [
            _entries(name, row, mask_T) if usual_N is None or name in row else usual_N
            for (row, mask_T), usual_N in zip(self._rows, usual, strict=True)
        ]
        return torch.cat([torch.zeros(0), *entries]).to(self._device)

    def sums(self, values_N: Tensor) -> Tensor:
        """[S]: added up within each row."""
        counts_S = torch.tensor(self._counts, dtype=torch.int64)
        rows_N = torch.arange(len(counts_S)).repeat_interleave(counts_S).to(self._device)
        return values_N.new_zeros(len(counts_S)).index_add(0, rows_N, values_N)

    def split(self, values_N: Tensor) -> Sequence[Tensor]:
        """Each row's own, on the host."""
        return torch.split(values_N.cpu(), self._counts)


def blank_batch(num_rows: int, device: str) -> RowBatch:
    """A batch that trains nothing, for a rank that has less to do than another."""
    token_ids, mask = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
    return RowBatch([{"token_ids": token_ids, "loss_mask": mask}] * num_rows, (), device)


def pack_rows(
    rows: Sequence[Row], row_weights: Sequence[float], group_size: int, max_tokens: int, device: str
) -> Iterator[RowBatch]:
    """Batches of at most `max_tokens` tokens, rows of like length together; a group that is longer
    has its own."""
    groups = [range(at, at + group_size) for at in range(0, len(rows), group_size)]
    real = [group for group in groups if any(row_weights[at] for at in group)]
    sizes = {group: sum(len(rows[at]["token_ids"]) for at in group) for group in real}
    members: list[int] = []
    num_tokens = 0
    for group in sorted(real, key=sizes.__getitem__):
        if members and num_tokens + sizes[group] > max_tokens:
            yield RowBatch([rows[at] for at in members], members, device)
            members, num_tokens = [], 0
        members += group
        num_tokens += sizes[group]
    if members:
        yield RowBatch([rows[at] for at in members], members, device)


def _mask(row: Row) -> Tensor:
    """[T] bool: which tokens train."""
    length = len(row["token_ids"])
    if not length:
        raise ConfigError("token_ids: a row has no token")
    mask_T: Tensor | None = row.get("loss_mask")
    if mask_T is None:
        return torch.arange(length) > 0
    if len(mask_T) != length:
        raise ConfigError(f"loss_mask: {len(mask_T)} entries for a row of {length} tokens")
    if mask_T[0]:
        raise ConfigError("loss_mask: a row's first token has nothing before it and cannot train")
    return mask_T.bool()


def _entries(name: str, row: Row, mask_T: Tensor) -> Tensor:
    """[N] float32."""
    if name not in row:
        raise ConfigError(f"{name}: a row lacks it; it has {', '.join(row)}")
    told, num = row[name], int(mask_T.sum())
    if not isinstance(told, Tensor):
        return torch.full((num,), float(told))
    if told.shape == mask_T.shape:
        return told[mask_T].float()
    if told.shape != (num,):
        shape = f"{list(told.shape)} entries for a row of {len(mask_T)} tokens, {num} trained"
        raise ConfigError(f"{name}: {shape}")
    return told.float()


Terms = Mapping[str, Tensor]
"""What a batch adds up to by name; `loss` carries the gradient."""


class Learner:
    """See the module."""

    def __init__(
        self,
        place: RankContext,
        model: PreTrainedModel,
        source: Path,
        trainer: Mapping[str, Json] | None,
    ) -> None:
        """`trainer` are fields of TrainerConfig; without them the model is frozen."""
        self.settings = msgspec.convert(trainer or {}, TrainerConfig)
        self._source = source
        self._device = place.device
        self._ranks = ShardedRanks(place.mesh["data"])
        self._model = model.to(place.device)
        self._packs = enable_packing(self._model)
        # A batch of one token at most is one of a single group.
        self._max_tokens = self.settings.microbatch_tokens if self._packs else 1
        self._ranks.shard(self._model)
        self._place = place
        self._descent = None if trainer is None else ModelOptimizer(self._model, self.settings)
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
        return self._ranks.sum(values)

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
        state = self._ranks.full_state(self._model)
        if self._ranks.is_first:
            save_model(self._model, self._source, folder, state)

    def _batches(
        self, rows: Sequence[Row], row_weights: Sequence[float], group_size: int
    ) -> list[RowBatch]:
        """At all ranks as many."""
        batches = [*pack_rows(rows, row_weights, group_size, self._max_tokens, self._device)]
        num_missing = max(1, int(self._ranks.max(len(batches)))) - len(batches)
        return batches + [blank_batch(group_size, self._device)] * num_missing
