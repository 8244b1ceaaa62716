"""Packed batches: samples of one optimiser step as tensors, without padding.

- Minibatches are chosen on the whole batch as whole groups, so neither a minibatch nor a weight
  depends on the number of ranks. The weights of a minibatch add up to 1 over all ranks.
- Each trained token of each sample has exactly one entry; each token of a sequence is in one batch.
- Samples with equal tokens share one sequence: siblings often have the same answer, which is then
  computed once. Sequences of similar length are neighbours, as attention.py needs.

Shapes: T input tokens of S sequences (the last token of a sample is a target only), K kept
positions, N trained tokens.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollmesh.core.config import LossWeight
from rollmesh.core.errors import ConfigError
from rollmesh.core.ids import GroupId
from rollmesh.serve.client.samples import Sample


class TokenBatch(NamedTuple):
    """The inputs of one forward pass and of its loss."""

    token_ids_T: Tensor
    """int64."""
    starts: tuple[int, ...]
    """Start of each sequence, and T."""
    kept_K: Tensor
    """int64: positions whose logits are needed."""
    targets_K: Tensor
    """int64: the token after each kept position."""
    temperatures_K: Tensor
    kept_index_N: Tensor
    """int64: for each trained token, sample by sample, the index in kept_K of the position before
    it."""
    recorded_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    policy_versions_N: Tensor
    """int32."""
    samples_N: Tensor
    """int64: index of the sample that a token belongs to."""


def pack(
    samples: Sequence[Sample],
    advantages: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32],
    max_tokens: int,
    device: torch.device | str,
) -> Iterator[TokenBatch]:
    """Yield batches of at most `max_tokens` tokens, short sequences first; a longer sequence has a
    batch of its own.

    `samples` are those of one optimiser step. Each has an advantage, and a weight for each of its
    trained tokens. Raises ConfigError for a temperature of 0.
    """
    equals: dict[tuple[bytes, float], list[int]] = {}
    for at, sample in enumerate(samples):
        _check(sample)
        equals.setdefault((sample.token_ids.tobytes(), sample.temperature), []).append(at)
    rows = sorted(equals.values(), key=lambda members: len(samples[members[0]].token_ids))
    for part in _cut(rows, samples, max_tokens):
        yield _PackedRow(samples, part).tensors(advantages, weights, device)


def empty_batch(device: torch.device | str) -> TokenBatch:
    """A batch of one token that does not train, for a rank with fewer batches than another."""
    one, ones = torch.zeros(1, dtype=torch.int64), torch.ones(1)
    none, floats = one[:0], ones[:0]
    batch = TokenBatch(one, (0, 1), one, one, ones, none, floats, floats, floats, none.int(), none)
    return _moved(batch, device)


def _check(sample: Sample) -> None:
    assert not sample.loss_mask[0], "a sampled token has a token before it"
    assert sample.loss_mask.any(), "a sample has a token that trains"
    if sample.temperature <= 0.0:
        raise ConfigError("sampling.temperature must be above 0: training needs random samples")


def _cut(
    rows: list[list[int]], samples: Sequence[Sample], max_tokens: int
) -> Iterator[list[list[int]]]:
    """Split `rows` into parts of at most `max_tokens` tokens."""
    part: list[list[int]] = []
    num_tokens = 0
    for members in rows:
        num_more = len(samples[members[0]].token_ids) - 1
        if part and num_tokens + num_more > max_tokens:
            yield part
            part, num_tokens = [], 0
        part.append(members)
        num_tokens += num_more
    if part:
        yield part


class _PackedRow:
    """The sequences of one batch, each with the samples that share it."""

    def __init__(self, samples: Sequence[Sample], members: list[list[int]]) -> None:
        self._sequences = [samples[equal[0]] for equal in members]
        self._starts = np.cumsum([0, *[len(each.token_ids) - 1 for each in self._sequences]])
        self._start_of_each = np.repeat(self._starts[:-1], list(map(len, members)))
        self._order = [at for equal in members for at in equal]
        self._chosen = [samples[at] for at in self._order]
        self._counts = [int(sample.loss_mask.sum()) for sample in self._chosen]

    def tensors(
        self,
        advantages: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32],
        device: torch.device | str,
    ) -> TokenBatch:
        """Return the batch, on `device`."""
        inside = zip(self._start_of_each, self._chosen, strict=True)
        positions_N = [start + np.flatnonzero(each.loss_mask) - 1 for start, each in inside]
        kept_K, kept_index_N = np.unique(np.concatenate(positions_N), return_inverse=True)
        arrays = {
            "token_ids_T": self._tokens(slice(None, -1)),
            "kept_K": kept_K,
            "targets_K": self._tokens(slice(1, None))[kept_K],
            "temperatures_K": self._temperatures()[kept_K],
            "kept_index_N": kept_index_N,
            "recorded_N": self._recorded("logprobs"),
            "advantages_N": self._per_token(advantages),
            "weights_N": self._per_token(weights),
            "policy_versions_N": self._recorded("policy_versions"),
            "samples_N": np.repeat(np.array(self._order, np.int64), self._counts),
        }
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return _moved(TokenBatch(starts=tuple(self._starts.tolist()), **tensors), device)

    def _tokens(self, which: slice) -> npt.NDArray[np.int64]:
        """[T]: the slice `which` of each sequence's tokens."""
        tokens = [each.token_ids[which] for each in self._sequences]
        return np.concatenate(tokens).astype(np.int64)

    def _temperatures(self) -> npt.NDArray[np.float32]:
        each = np.array([sample.temperature for sample in self._sequences], np.float32)
        return np.repeat(each, np.diff(self._starts))

    def _per_token(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """[N]: a sample's value at each of its trained tokens."""
        return np.repeat(values[self._order], self._counts)

    def _recorded(self, name: str) -> npt.NDArray[np.generic]:
        """[N]: the field `name` of the samples at each trained token."""
        return np.concatenate([getattr(sample, name)[sample.loss_mask] for sample in self._chosen])


def _moved(batch: TokenBatch, device: torch.device | str) -> TokenBatch:
    moved = {n: each.to(device) for n, each in batch._asdict().items() if n != "starts"}
    return batch._replace(**moved)


def assign_minibatches(samples: Sequence[Sample], num: int) -> list[int]:
    """Return the minibatch of each sample, of at most `num`; groups are dealt in turn."""
    turns: dict[GroupId, int] = {}
    return [turns.setdefault(sample.group_id, len(turns)) % num for sample in samples]


def token_weights(
    samples: Sequence[Sample], rule: LossWeight
) -> tuple[npt.NDArray[np.float32], float]:
    """Return the weight of a trained token of each sample [len(samples)], and their sum.

        token     1 / trained tokens of the minibatch     Yu et al. 2025, "DAPO", eq. 8: all tokens
                                                          of a minibatch have the same weight
        rollout   1 / rollouts of the minibatch, spread   GRPO (Shao et al. 2024, "DeepSeekMath",
                  evenly over the rollout's tokens        eq. 3); a rollout may be several samples

    `samples` are one rank's part of a minibatch; the caller divides by the sum over all ranks. A
    rollout has the same weight however many samples it was cut into, since each of its tokens
    trains in one of them. Tokens that are masked later are counted, so the rest gains no weight.
    """
    counts = np.array([sample.loss_mask.sum() for sample in samples], np.float32)
    if rule == "token":
        return np.ones(len(samples), np.float32), float(counts.sum())
    shares = np.array([sample.weight for sample in samples], np.float32)
    return shares / counts, float(len({sample.rollout_id for sample in samples}))
