"""Rows as a role is handed them, several packed into one forward pass without padding.

A row is a dict: `token_ids` [T], maybe `loss_mask` [T] (which tokens train; default: all but the
first), and columns, which say something of its trained tokens: a tensor with one entry for each of
them [N], or for each token [T], or a number for all. What a role answers of tokens is [N] again, so
it can stand in the row as a column of the next call.

Invariants: rows of a group stand in one batch, in their order; a row that weighs nothing is in no
batch; the same rows are packed alike everywhere. Driven by learner.py.
Shapes: T tokens (of a row, or of all rows of a batch), N trained tokens, S sequences, P pairs.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from rollmesh.core.errors import ConfigError

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


def blank(num_rows: int, device: str) -> RowBatch:
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
