"""The common base of both roles: one sharded model, and rows packed into forwards without padding.

A row is a dict: `token_ids` [T], optionally `loss_mask` [T] (which tokens train; default: all but
the first), and columns with values for its trained tokens: a tensor with one entry for each of them
[N], or for each token [T], or one number for all. A role's result per token is [N], so it can be a
column of the next call.

- Rows of a group are in one batch, in order; a row with weight 0 is in no batch.
- A loss and each report are means over tokens or pairs of all ranks, and equal on all of them.
- Every forward is a collective: each rank does as many as the one with the most, blank ones last.

Shapes: T tokens (of a row, or of all rows of a batch), K kept positions, N trained tokens, S
sequences, P pairs.
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
from rollmesh.trainer.algorithms.optimizer import ModelOptimizer
from rollmesh.trainer.algorithms.packing import enable_packing, packed_logits
from rollmesh.trainer.checkpoints.snapshot import RankSnapshot
from rollmesh.trainer.controller.rendezvous import RankContext
from rollmesh.trainer.models.folders import save_model
from rollmesh.trainer.ranks import ShardedRanks, check_finite

Row = Mapping[str, Any]


class RowBatch:
    """Rows of one forward pass, one after the other."""

    def __init__(self, rows: Sequence[Row], members: Sequence[int], device: str) -> None:
        """`members` are the indices of `rows` in their call; raise ConfigError for a bad row."""
        self.members = tuple(members)
        masks = [_mask(row) for row in rows]
        token_ids_T = torch.cat([row["token_ids"].long() for row in rows])
        trained_N = torch.cat(masks).nonzero()[:, 0]
        self.starts = (0, *accumulate(map(len, masks)))
        """Start of each row, and T at the end."""
        self.token_ids_T = token_ids_T.to(device)
        self.targets_N = token_ids_T[trained_N].to(device)
        self.before_N = (trained_N - 1).to(device)
        """The position before each trained token, whose logits predict it."""
        self._device = device
        # The rows of a blank batch have no members, and do not train.
        self._rows = [*zip(rows, masks, strict=True)][: len(members)]
        self._counts = [int(mask.sum()) for _, mask in self._rows]

    @property
    def num_tokens(self) -> int:
        """Number of trained tokens."""
        return len(self.targets_N)

    def ends(self) -> Tensor:
        """[S]: the last position of each row."""
        ends = [end - 1 for end in self.starts[1:]]
        return torch.tensor(ends[: len(self.members)], dtype=torch.int64, device=self._device)

    def alone(self, kept_K: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (tokens [T], kept positions within them) of each row."""
        for start, end in pairwise(self.starts):
            own_K = kept_K[(kept_K >= start) & (kept_K < end)]
            yield self.token_ids_T[start:end], own_K - start

    def column(self, name: str, default: Tensor | None = None) -> Tensor:
        """[N] float32: the column `name` at the trained tokens; `default` for a row without it.

        Raises ConfigError for an entry of the wrong shape, or a missing one without `default`.
        """
        defaults = [None] * len(self._rows) if default is None else self.split(default)
        entries = [
            _entries(name, row, mask_T) if default_N is None or name in row else default_N
            for (row, mask_T), default_N in zip(self._rows, defaults, strict=True)
        ]
        return torch.cat([torch.zeros(0), *entries]).to(self._device)

    def sums(self, values_N: Tensor) -> Tensor:
        """[S]: the sum within each row."""
        return values_N.new_zeros(len(self._counts)).index_add(0, self.rows_N(), values_N)

    def rows_N(self) -> Tensor:
        """[N]: the row of each trained token, as its index in the batch."""
        counts_S = torch.tensor(self._counts, dtype=torch.int64)
        return torch.arange(len(counts_S)).repeat_interleave(counts_S).to(self._device)

    def split(self, values_N: Tensor) -> Sequence[Tensor]:
        """The values of each row, on the host."""
        return torch.split(values_N.cpu(), self._counts)


def blank_batch(num_rows: int, device: str) -> RowBatch:
    """A batch that does not train, for a rank with fewer batches than another."""
    token_ids, mask = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
    return RowBatch([{"token_ids": token_ids, "loss_mask": mask}] * num_rows, (), device)


def pack_rows(
    rows: Sequence[Row], row_weights: Sequence[float], group_size: int, max_tokens: int, device: str
) -> Iterator[RowBatch]:
    """Yield batches of at most `max_tokens` tokens, rows of similar length together; a longer group
    has a batch of its own."""
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
    if name not in row:
        raise ConfigError(f"{name}: a row has no such column; it has {', '.join(row)}")
    entry, num = row[name], int(mask_T.sum())
    if not isinstance(entry, Tensor):
        return torch.full((num,), float(entry))
    if entry.shape == mask_T.shape:
        return entry[mask_T].float()
    if entry.shape != (num,):
        shape = f"{list(entry.shape)} entries for a row of {len(mask_T)} tokens, {num} trained"
        raise ConfigError(f"{name}: {shape}")
    return entry.float()


Terms = Mapping[str, Tensor]
"""Sums over a batch by name; `loss` carries the gradient."""


class Learner:
    """One model that all ranks share: `infer` is a forward without gradient, `train` a step."""

    def __init__(
        self,
        context: RankContext,
        model: PreTrainedModel,
        source: Path,
        trainer: Mapping[str, Json] | None,
    ) -> None:
        """`trainer` has fields of TrainerConfig; without it the model is frozen."""
        self.settings = msgspec.convert(trainer or {}, TrainerConfig)
        self._source = source
        self._device = context.device
        self._ranks = ShardedRanks(context.mesh["data"])
        self._model = model.to(context.device)
        self._packs = enable_packing(self._model)
        # A limit of one token makes each group a batch of its own.
        self._max_tokens = self.settings.microbatch_tokens if self._packs else 1
        self._ranks.shard(self._model)
        self._context = context
        self._optimizer = None if trainer is None else ModelOptimizer(self._model, self.settings)
        self._imprint: RankSnapshot | None = None
        if self._optimizer:
            self._imprint = RankSnapshot(self._model, self._optimizer, self._ranks)

    def outputs(self, batch: RowBatch, kept_K: Tensor) -> Tensor:
        """[K, V]: the model's outputs at the kept positions of the batch, which are in order."""
        if self._packs:
            return packed_logits(self._model, batch.token_ids_T, batch.starts, kept_K)
        outputs = [
            packed_logits(self._model, own_T, [0, len(own_T)], own_K)
            for own_T, own_K in batch.alone(kept_K)
        ]
        return torch.cat(outputs)

    @torch.no_grad()
    def infer(
        self, rows: Sequence[Row], function: Callable[[RowBatch], Sequence[Tensor]]
    ) -> list[Tensor]:
        """Return the result of `function` for each row, in their order, also for padding."""
        results: dict[int, Tensor] = {}
        for batch in self._batches(rows, [1.0] * len(rows), 1):
            results.update(zip(batch.members, function(batch), strict=True))
        return [results[at] for at in range(len(rows))]

    def train(
        self,
        rows: Sequence[Row],
        row_weights: Sequence[float],
        step: int,
        terms_of: Callable[[RowBatch], Terms],
        group_size: int = 1,
    ) -> dict[str, float]:
        """Do one optimiser step on tokens or, with groups of two, on pairs; return means over them.

        `num` is their number; `num_skipped` is 1 if the loss or the gradient was not finite and
        nothing changed. Raises ConfigError if the role is frozen, NotFinite after too many skipped
        steps in a row.
        """
        if self._optimizer is None:
            raise ConfigError("trainer: a role without it is frozen and cannot train")
        rate = self._optimizer.warm_up(step)
        batches = self._batches(rows, row_weights or [1.0] * len(rows), group_size)
        counts = (
            len(each.members) // group_size if group_size > 1 else each.num_tokens
            for each in batches
        )
        [num] = self.sum([sum(counts)])
        whole = max(1.0, num)
        sums: dict[str, float] = defaultdict(float)
        for batch in batches:
            terms = terms_of(batch)
            torch.autograd.backward(terms["loss"] / whole)
            for name, term in terms.items():
                sums[name] += float(term.detach())
        totals = dict(zip(sums, self.sum([*sums.values()]), strict=True))
        norm = self._optimizer.step(totals["loss"])
        self._optimizer.check(step)
        means = [each / whole for each in totals.values()]
        report = {
            "num": num,
            "num_skipped": float(norm is None),
            "grad_norm": math.nan if norm is None else norm,
            "learning_rate": rate,
        }
        return dict(zip(sums, means, strict=True)) | report

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over all ranks."""
        return self._ranks.sum(values)

    def snapshot(self, folder: Path) -> None:
        """Copy the training state, and write it into `folder` in the background."""
        if self._imprint and self._context.is_head:  # the others of its group have the same rows
            check_finite(self._model, self._ranks, folder)
            folder.mkdir(exist_ok=True)
            self._imprint.take(folder)

    def is_snapshot_written(self) -> bool:
        """Whether all ranks have written; a collective."""
        return self._imprint is None or self._imprint.is_written()

    def restore(self, folder: Path) -> None:
        """Read such a folder; raise CheckpointError if it is of another model."""
        if self._imprint:
            self._imprint.restore(folder)

    def save(self, folder: Path) -> None:
        """Write a folder that stock transformers loads, on the first rank; raise NotFinite for
        weights that hold NaN or infinity."""
        check_finite(self._model, self._ranks, folder)
        state = self._ranks.full_state(self._model)
        if self._ranks.is_first:
            save_model(self._model, self._source, folder, state)

    def _batches(
        self, rows: Sequence[Row], row_weights: Sequence[float], group_size: int
    ) -> list[RowBatch]:
        """The batches of `rows`; every rank has the same number."""
        batches = [*pack_rows(rows, row_weights, group_size, self._max_tokens, self._device)]
        num_missing = max(1, int(self._ranks.max(len(batches)))) - len(batches)
        return batches + [blank_batch(group_size, self._device)] * num_missing


class LearnedModel:
    """The methods of a role that save and restore its learner."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def snapshot(self, folder: str) -> None:
        """Copy the training state, and write it in the background."""
        self._learner.snapshot(Path(folder))

    def is_snapshot_written(self) -> bool:
        """Whether all ranks have written it."""
        return self._learner.is_snapshot_written()

    def restore(self, folder: str) -> None:
        """Read this rank's rows; any number of ranks may have written them."""
        self._learner.restore(Path(folder))

    def save(self, folder: str) -> None:
        """Write the model folder."""
        self._learner.save(Path(folder))
