"""A role that learns to continue sequences, on any number of ranks.

- Every rank holds the same weights and gets its own rows.
- The loss is divided by the tokens of all ranks and gradients are summed over them, so the number
  of ranks changes only the duration of a step.
- `rollmesh.trainer.controller` creates the role in each rank's process.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollmesh.trainer.controller.rendezvous import RankContext


class Writer:
    """A small recurrent language model and its optimiser."""

    def __init__(
        self, context: RankContext, vocab_size: int, learning_rate: float, seed: int
    ) -> None:
        torch.manual_seed(seed)
        self._heads = context.mesh.get_group("data")
        self._embed = nn.Embedding(vocab_size, 32)
        self._body = nn.GRU(32, 64, batch_first=True)
        self._out = nn.Linear(64, vocab_size)
        self._optimizer = torch.optim.AdamW(self._parameters(), lr=learning_rate)

    def train(
        self, token_ids: Sequence[Tensor], row_weights: Sequence[float] = ()
    ) -> dict[str, float]:
        """Train one step on whole sequences; return this rank's part of the mean loss, and its
        tokens.
        """
        weights = list(row_weights) or [1.0] * len(token_ids)
        own = sum((len(ids) - 1) * w for ids, w in zip(token_ids, weights, strict=True))
        num_tokens = torch.tensor(float(own))
        dist.all_reduce(num_tokens, group=self._heads)
        loss = torch.zeros(())
        for ids, weight in zip(token_ids, weights, strict=True):
            loss = loss + weight * self._surprises(ids.long()).sum() / num_tokens
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        for each in self._parameters():
            dist.all_reduce(each.grad, group=self._heads)
        self._optimizer.step()
        return {"loss": float(loss.detach()), "num_tokens": own}

    @torch.no_grad()
    def score(self, token_ids: Sequence[Tensor], row_weights: Sequence[float] = ()) -> list[Tensor]:
        """Surprise of each token, in nats: [T - 1] for each row, including padding."""
        del row_weights
        return [self._surprises(ids.long()) for ids in token_ids]

    def _surprises(self, ids_T: Tensor) -> Tensor:
        hidden_TD, _ = self._body(self._embed(ids_T[:-1]))
        return nn.functional.cross_entropy(self._out(hidden_TD), ids_T[1:], reduction="none")

    def _parameters(self) -> Iterable[nn.Parameter]:
        for part in (self._embed, self._body, self._out):
            yield from part.parameters()
