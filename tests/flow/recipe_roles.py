"""One small model that can be an actor, a critic or a reference, for tests of whole recipes.

Rows are dicts with `token_ids` [T] and what was computed of them. Losses are divided by the rows or
pairs of all ranks and gradients are summed over them. Shapes: T tokens, V vocabulary, D width.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from rollmesh.trainer.controller.meeting import Place

Row = dict[str, Any]
BETA, CLIP = 0.1, 0.2


class Tiny:
    """A recurrent language model with a head for values."""

    def __init__(self, place: Place, vocab_size: int, seed: int) -> None:
        torch.manual_seed(seed)
        self._place = place
        self._parts = nn.ModuleDict(
            {
                "embed": nn.Embedding(vocab_size, 16),
                "body": nn.GRU(16, 16, batch_first=True),
                "out": nn.Linear(16, vocab_size),
                "value": nn.Linear(16, 1),
            }
        )
        self._optimizer = torch.optim.AdamW(self._parts.parameters(), lr=0.02)

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Row], row_weights: Sequence[float]) -> list[Tensor]:
        """[T - 1] of each row's tokens but the first."""
        return [self._logprobs(row) for row in rows]

    @torch.no_grad()
    def values(self, rows: Sequence[Row], row_weights: Sequence[float]) -> list[Tensor]:
        """[T - 1] of each row."""
        return [self._values(row) for row in rows]

    def train_text(self, rows: Sequence[Row], row_weights: Sequence[float]) -> dict[str, float]:
        """Supervised: each row's tokens become likelier."""
        return self._learn([-self._logprobs(row).mean() for row in rows], row_weights)

    def train_policy(
        self,
        rows: Sequence[Row],
        old: Sequence[Tensor],
        reference: Sequence[Tensor],
        values: Sequence[Tensor],
        row_weights: Sequence[float],
    ) -> dict[str, float]:
        """Proximal policy optimisation, with a penalty for leaving the reference."""
        losses = []
        for row, old_T, reference_T, values_T in zip(rows, old, reference, values, strict=True):
            now_T = self._logprobs(row)
            ratio_T = torch.exp(now_T - old_T)
            gain_T = row["reward"] - values_T
            clipped_T = ratio_T.clamp(1 - CLIP, 1 + CLIP)
            losses.append(
                -torch.minimum(ratio_T * gain_T, clipped_T * gain_T).mean()
                + BETA * (now_T - reference_T).mean()
            )
        return self._learn(losses, row_weights)

    def train_values(self, rows: Sequence[Row], row_weights: Sequence[float]) -> dict[str, float]:
        """The critic's part: values come closer to rewards."""
        losses = [(self._values(row) - row["reward"]).square().mean() for row in rows]
        return self._learn(losses, row_weights)

    def train_preference(
        self, rows: Sequence[Row], reference: Sequence[Tensor], row_weights: Sequence[float]
    ) -> dict[str, float]:
        """Direct preference optimisation: of each two rows the first is the better."""
        gains = [
            self._logprobs(row).sum() - before_T.sum()
            for row, before_T in zip(rows, reference, strict=True)
        ]
        return self._learn(_duels([BETA * each for each in gains]), row_weights[::2])

    def train_reward(self, rows: Sequence[Row], row_weights: Sequence[float]) -> dict[str, float]:
        """A reward model: of each two rows the first has the higher last value."""
        return self._learn(_duels([self._values(row)[-1] for row in rows]), row_weights[::2])

    def _learn(self, losses: Sequence[Tensor], weights: Sequence[float]) -> dict[str, float]:
        total = torch.tensor(float(sum(weights)))
        dist.all_reduce(total, group=self._place.mesh.get_group("data"))
        loss = torch.stack([a * w for a, w in zip(losses, weights, strict=True)]).sum() / total
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        for each in self._parts.parameters():
            each.grad = torch.zeros_like(each) if each.grad is None else each.grad
            dist.all_reduce(each.grad, group=self._place.mesh.get_group("data"))
        self._optimizer.step()
        return {"loss": float(loss.detach()), "num": float(sum(weights))}

    def _hidden(self, row: Row) -> Tensor:
        hidden_TD: Tensor = self._parts["body"](self._parts["embed"](row["token_ids"][:-1].long()))[
            0
        ]
        return hidden_TD

    def _logprobs(self, row: Row) -> Tensor:
        logits_TV = self._parts["out"](self._hidden(row))
        targets_T = row["token_ids"][1:].long()
        return -functional.cross_entropy(logits_TV, targets_T, reduction="none")

    def _values(self, row: Row) -> Tensor:
        values_T: Tensor = self._parts["value"](self._hidden(row))[:, 0]
        return values_T


def _duels(scores: Sequence[Tensor]) -> list[Tensor]:
    pairs = zip(scores[::2], scores[1::2], strict=True)
    return [-functional.logsigmoid(better - worse) for better, worse in pairs]
