"""The floor of packing.py: a train step on rows that are filled up to the longest of their batch.

What the trainer was before it packed: rows by length, padding on the right, where causal attention
never looks; samples of equal tokens share a row; logits are kept at the positions that any row of
the batch needs. Invariant: the same model, loss and optimiser as Policy; one minibatch, each
rollout weighing the same. Driven by packing.py.
Shapes: B rows, T tokens, K kept positions, N trained tokens, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollmesh.core.config import TrainerConfig
from rollmesh.serve.client.samples import Sample
from rollmesh.trainer.algorithms.advantages import sample_advantages
from rollmesh.trainer.algorithms.loss import TokenTerms, ppo_loss, token_logprobs
from rollmesh.trainer.algorithms.optimizer import ModelOptimizer
from rollmesh.trainer.algorithms.registry import find_advantage
from rollmesh.trainer.models.folders import load_model


class PaddedPolicy:
    """See the module."""

    def __init__(self, folder: Path, settings: TrainerConfig) -> None:
        self._settings = settings
        self._model = load_model(folder)
        self._descent = ModelOptimizer(self._model, settings)
        self.num_tokens = 0
        """Of the forwards of the last step, padding and all."""

    def step(self, samples: Sequence[Sample], step: int) -> float:
        """Train once; the gradient's norm."""
        self._descent.warm_up(step)
        self.num_tokens = 0
        for batch in self._batches(samples):
            self.num_tokens += batch["token_ids_BT"].numel()
            logits_BKV = self._model(
                input_ids=batch["token_ids_BT"], use_cache=False, logits_to_keep=batch["kept_K"]
            ).logits
            logprobs_N, entropies_N = token_logprobs(
                logits_BKV[batch["rows_N"], batch["columns_N"]],
                batch["targets_N"],
                torch.ones(len(batch["targets_N"])),
            )
            terms = TokenTerms(
                logprobs_N=logprobs_N,
                entropies_N=entropies_N.detach(),
                proximal_N=logprobs_N.detach(),
                recorded_N=batch["recorded_N"],
                advantages_N=batch["advantages_N"],
                weights_N=batch["weights_N"],
                samples_N=batch["rows_N"],
            )
            torch.autograd.backward(ppo_loss(terms, self._settings).value)
        return self._descent.step(loss=0.0) or math.nan

    def _batches(self, samples: Sequence[Sample]) -> Iterator[dict[str, Tensor]]:
        advantages = sample_advantages(samples, find_advantage(self._settings.advantage))
        equals: dict[bytes, list[int]] = {}
        for at, sample in enumerate(samples):
            equals.setdefault(sample.token_ids.tobytes(), []).append(at)
        rows = sorted(equals.values(), key=lambda members: len(samples[members[0]].token_ids))
        part: list[list[int]] = []
        for row in rows:
            length = len(samples[row[0]].token_ids)
            if part and (len(part) + 1) * length > self._settings.microbatch_tokens:
                yield padded(samples, part, advantages)
                part = []
            part.append(row)
        yield padded(samples, part, advantages)


def padded(
    samples: Sequence[Sample], rows: list[list[int]], advantages: np.ndarray[Any, Any]
) -> dict[str, Tensor]:
    """The tensors of one forward; the last token of a sample is a target only."""
    token_ids_BT = np.zeros((len(rows), max(len(samples[r[0]].token_ids) for r in rows)), np.int64)
    for row, members in enumerate(rows):
        token_ids = samples[members[0]].token_ids
        token_ids_BT[row, : len(token_ids)] = token_ids
    order = [at for members in rows for at in members]
    chosen = [samples[at] for at in order]
    counts = [int(sample.loss_mask.sum()) for sample in chosen]
    shares = [1 / (num * len(samples)) for num in counts]
    positions_N = np.concatenate([np.flatnonzero(each.loss_mask) for each in chosen]) - 1
    kept_K, columns_N = np.unique(positions_N, return_inverse=True)
    row_of_each = np.repeat(np.arange(len(rows)), [len(members) for members in rows])
    arrays = {
        "token_ids_BT": token_ids_BT[:, :-1],
        "kept_K": kept_K,
        "rows_N": np.repeat(row_of_each, counts),
        "columns_N": columns_N,
        "targets_N": np.concatenate([s.token_ids[s.loss_mask] for s in chosen]).astype(np.int64),
        "recorded_N": np.concatenate([s.logprobs[s.loss_mask] for s in chosen]),
        "advantages_N": np.repeat(advantages[order], counts),
        "weights_N": np.repeat(np.array(shares, np.float32), counts),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
