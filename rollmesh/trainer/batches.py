"""Samples to tensors: rows of like length, right padding, and one flat entry per trained token.

Invariants: each trained token of each sample has exactly one entry, whose weight is its sample's
share of the rollout spread evenly over the sample's trained tokens, so that every rollout weighs
the same, whatever its length and however many samples its graph was cut into. Samples of equal
tokens share one row: siblings often say the same, and then the model need not say it twice.
Padding stands on the right, where causal attention never looks, so no attention mask is needed.
Driven by the policy, per optimiser step.
Shapes: B rows, T input tokens (the last token of a sample is a target only), K kept positions,
N trained tokens.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollmesh.core.errors import ConfigError
from rollmesh.serve.client.samples import Sample


class TokenBatch(NamedTuple):
    """What one forward pass takes, and what its loss needs."""

    token_ids_BT: Tensor
    """int64; 0 where padded."""
    kept_K: Tensor
    """int64: positions whose logits some row needs."""
    rows_N: Tensor
    """int64: the row that each trained token stands in."""
    columns_N: Tensor
    """int64: where in kept_K the position before it stands; its logits are at (row, column)."""
    targets_N: Tensor
    """int64: the trained tokens, sample by sample."""
    recorded_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    temperatures_N: Tensor
    policy_versions_N: Tensor
    """int32."""
    samples_N: Tensor
    """int64: which of the given samples a token belongs to."""


def pack(
    samples: Sequence[Sample], advantages: npt.NDArray[np.float32], max_tokens: int, device: str
) -> Iterator[TokenBatch]:
    """Batches of at most `max_tokens` padded tokens (one longer sample makes its own), short first.

    `samples` are those of one optimiser step, `advantages` theirs; the weights add up to 1.
    """
    num_rollouts = len({sample.rollout_id for sample in samples})
    equals: dict[bytes, list[int]] = {}
    for at, sample in enumerate(samples):
        equals.setdefault(sample.token_ids.tobytes(), []).append(at)
    rows = sorted(equals.values(), key=lambda members: len(samples[members[0]].token_ids))
    for part in _cut(rows, samples, max_tokens):
        batch = _Rows(samples, part)
        yield batch.tensors(advantages, num_rollouts, device)


def nothing(device: str) -> TokenBatch:
    """A batch of one token that trains none: for a rank that has less to do than another."""
    one = torch.zeros(1, dtype=torch.int64)
    none, floats = one[:0], torch.zeros(0)
    batch = TokenBatch(
        one[None], one, none, none, none, floats, floats, floats, floats, none.int(), none
    )
    return TokenBatch(*[each.to(device) for each in batch])


def _cut(
    rows: list[list[int]], samples: Sequence[Sample], max_tokens: int
) -> Iterator[list[list[int]]]:
    """`rows`, which are by length, in runs whose padded size is within the bound."""
    part: list[list[int]] = []
    for members in rows:
        if part and (len(part) + 1) * len(samples[members[0]].token_ids) > max_tokens:
            yield part
            part = []
        part.append(members)
    if part:
        yield part


class _Rows:
    """The rows of one batch: for each, the samples that share it."""

    def __init__(self, samples: Sequence[Sample], members: list[list[int]]) -> None:
        self._rows = [samples[row[0]].token_ids for row in members]
        self._row_of_each = np.repeat(np.arange(len(members)), list(map(len, members)))
        self._order = [at for row in members for at in row]
        self._chosen = [samples[at] for at in self._order]
        for sample in self._chosen:
            assert not sample.loss_mask[0], "a sampled token has a token before it"
            if sample.temperature <= 0.0:
                raise ConfigError("sampling.temperature must be above 0: training needs chance")
        self._counts = [int(sample.loss_mask.sum()) for sample in self._chosen]
        assert all(self._counts), "a sample has a token that trains"

    def tensors(
        self, advantages: npt.NDArray[np.float32], num_rollouts: int, device: str
    ) -> TokenBatch:
        """All of it as tensors on `device`."""
        chosen, counts = self._chosen, self._counts
        positions_N = np.concatenate([np.flatnonzero(s.loss_mask) for s in chosen]) - 1
        kept_K, columns_N = np.unique(positions_N, return_inverse=True)
        shares = [s.weight / (num * num_rollouts) for s, num in zip(chosen, counts, strict=True)]
        arrays = {
            "token_ids_BT": self._token_ids()[:, :-1],
            "kept_K": kept_K,
            "rows_N": self._per_token(self._row_of_each, np.int64),
            "columns_N": columns_N,
            "targets_N": self._recorded("token_ids").astype(np.int64),
            "recorded_N": self._recorded("logprobs"),
            "advantages_N": self._per_token(advantages[self._order], np.float32),
            "weights_N": self._per_token(shares, np.float32),
            "temperatures_N": self._per_token([s.temperature for s in chosen], np.float32),
            "policy_versions_N": self._recorded("policy_versions"),
            "samples_N": self._per_token(self._order, np.int64),
        }
        return TokenBatch(**{name: torch.from_numpy(a).to(device) for name, a in arrays.items()})

    def _token_ids(self) -> npt.NDArray[np.int64]:
        token_ids_BT = np.zeros((len(self._rows), max(map(len, self._rows))), np.int64)
        for row, token_ids in enumerate(self._rows):
            token_ids_BT[row, : len(token_ids)] = token_ids
        return token_ids_BT

    def _per_token(self, values: npt.ArrayLike, kind: type[np.generic]) -> npt.NDArray[np.generic]:
        """[N]: a sample's value at each of its trained tokens."""
        return np.repeat(np.asarray(values, kind), self._counts)

    def _recorded(self, name: str) -> npt.NDArray[np.generic]:
        """[N]: what the samples hold for each trained token."""
        return np.concatenate([getattr(sample, name)[sample.loss_mask] for sample in self._chosen])
