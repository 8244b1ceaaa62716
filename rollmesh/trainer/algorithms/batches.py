"""Samples to tensors: sequences one after the other without padding, an entry per trained token.

Invariants: each trained token of each sample has exactly one entry, with its sample's weight (see
minibatches.py); of every sequence each token is in exactly one batch, and nothing else is. Samples
of equal tokens share one sequence: siblings often say the same, and then the model need not say it
twice. Sequences of like length stand together, as attention.py wants them. Driven by the policy,
per optimiser step.
Shapes: T input tokens of S sequences (the last token of a sample is a target only), K kept
positions, N trained tokens.

Which samples make one optimiser step, and what a token of each weighs in its loss.

    token     1 / trained tokens of the minibatch     Yu et al. 2025, "DAPO", eq. 8: every token of
                                                      a minibatch counts as much as any other
    rollout   1 / rollouts of the minibatch, spread   GRPO (Shao et al. 2024, "DeepSeekMath", eq. 3)
              evenly over the rollout's tokens        over rollouts that may be cut into samples

Both count over all ranks. Invariants: a minibatch is whole groups, chosen on the whole batch, so
that neither it nor any weight depends on the number of ranks; a rollout's weight does not grow
with the samples that its graph was cut into, since each of its tokens trains in one of them; the
weights of a minibatch add up to 1. Tokens that are masked later are counted, as zeros: what is
left weighs no more because of them. Pure; driven by the policy.
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
    """What one forward pass takes, and what its loss needs."""

    token_ids_T: Tensor
    """int64."""
    starts: tuple[int, ...]
    """Where each sequence begins, and T."""
    kept_K: Tensor
    """int64: positions whose logits some sample needs."""
    targets_K: Tensor
    """int64: the tokens after them."""
    temperatures_K: Tensor
    places_N: Tensor
    """int64: of each trained token, sample by sample, where in kept_K the position before it is."""
    recorded_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    policy_versions_N: Tensor
    """int32."""
    samples_N: Tensor
    """int64: which of the given samples a token belongs to."""


def pack(
    samples: Sequence[Sample],
    advantages: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32],
    max_tokens: int,
    device: torch.device | str,
) -> Iterator[TokenBatch]:
    """Batches of at most `max_tokens` tokens (one longer sequence makes its own), short first.

    `samples` are those of one optimiser step; each has its advantage, and a weight for each of its
    trained tokens.
    """
    equals: dict[tuple[bytes, float], list[int]] = {}
    for at, sample in enumerate(samples):
        _check(sample)
        equals.setdefault((sample.token_ids.tobytes(), sample.temperature), []).append(at)
    rows = sorted(equals.values(), key=lambda members: len(samples[members[0]].token_ids))
    for part in _cut(rows, samples, max_tokens):
        yield _PackedRow(samples, part).tensors(advantages, weights, device)


def empty_batch(device: torch.device | str) -> TokenBatch:
    """A batch of one token that trains none: for a rank that has less to do than another."""
    one, ones = torch.zeros(1, dtype=torch.int64), torch.ones(1)
    none, floats = one[:0], ones[:0]
    batch = TokenBatch(one, (0, 1), one, one, ones, none, floats, floats, floats, none.int(), none)
    return _moved(batch, device)


def _check(sample: Sample) -> None:
    assert not sample.loss_mask[0], "a sampled token has a token before it"
    assert sample.loss_mask.any(), "a sample has a token that trains"
    if sample.temperature <= 0.0:
        raise ConfigError("sampling.temperature must be above 0: training needs chance")


def _cut(
    rows: list[list[int]], samples: Sequence[Sample], max_tokens: int
) -> Iterator[list[list[int]]]:
    """`rows` in runs whose tokens are within the bound."""
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
    """The sequences of one batch: for each, the samples that share it."""

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
        """All of it as tensors on `device`."""
        inside = zip(self._start_of_each, self._chosen, strict=True)
        positions_N = [start + np.flatnonzero(each.loss_mask) - 1 for start, each in inside]
        kept_K, places_N = np.unique(np.concatenate(positions_N), return_inverse=True)
        arrays = {
            "token_ids_T": self._tokens(slice(None, -1)),
            "kept_K": kept_K,
            "targets_K": self._tokens(slice(1, None))[kept_K],
            "temperatures_K": self._temperatures()[kept_K],
            "places_N": places_N,
            "recorded_N": self._recorded("logprobs"),
            "advantages_N": self._per_token(advantages),
            "weights_N": self._per_token(weights),
            "policy_versions_N": self._recorded("policy_versions"),
            "samples_N": np.repeat(np.array(self._order, np.int64), self._counts),
        }
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return _moved(TokenBatch(starts=tuple(self._starts.tolist()), **tensors), device)

    def _tokens(self, which: slice) -> npt.NDArray[np.int64]:
        """[T]: `which` of each sequence."""
        tokens = [each.token_ids[which] for each in self._sequences]
        return np.concatenate(tokens).astype(np.int64)

    def _temperatures(self) -> npt.NDArray[np.float32]:
        """[T]"""
        each = np.array([sample.temperature for sample in self._sequences], np.float32)
        return np.repeat(each, np.diff(self._starts))

    def _per_token(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """[N]: a sample's value at each of its trained tokens."""
        return np.repeat(values[self._order], self._counts)

    def _recorded(self, name: str) -> npt.NDArray[np.generic]:
        """[N]: what the samples hold for each trained token."""
        return np.concatenate([getattr(sample, name)[sample.loss_mask] for sample in self._chosen])


def _moved(batch: TokenBatch, device: torch.device | str) -> TokenBatch:
    moved = {n: each.to(device) for n, each in batch._asdict().items() if n != "starts"}
    return batch._replace(**moved)


def assign_minibatches(samples: Sequence[Sample], num: int) -> list[int]:
    """Which of at most `num` minibatches each of a batch's samples is in; groups in turn."""
    turns: dict[GroupId, int] = {}
    return [turns.setdefault(sample.group_id, len(turns)) % num for sample in samples]


def token_weights(
    samples: Sequence[Sample], rule: LossWeight
) -> tuple[npt.NDArray[np.float32], float]:
    """What a trained token of each sample weighs [len(samples)], and what all of them add up to.

    One rank's part of a minibatch; its weights are yet to be divided by the sum over all ranks.
    """
    counts = np.array([sample.loss_mask.sum() for sample in samples], np.float32)
    if rule == "token":
        return np.ones(len(samples), np.float32), float(counts.sum())
    shares = np.array([sample.weight for sample in samples], np.float32)
    return shares / counts, float(len({sample.rollout_id for sample in samples}))
