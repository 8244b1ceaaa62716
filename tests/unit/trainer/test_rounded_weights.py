"""Forwards with rounded weights are those of a coarser engine, and leave the weights alone."""

import pytest
import torch
from torch import nn

from rollmesh.trainer.policy import rounded_weights


class Broken(nn.Linear):
    """A model whose forward fails."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"cannot take {input.shape}")


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in model.parameters()]


def test_forward_computes_with_the_rounded_weights_and_restores_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 3))
    before, ids = weights_of(model), torch.tensor([0, 3])
    with torch.no_grad(), rounded_weights(model, torch.bfloat16):
        output = model(ids)
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(model), strict=True))
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
    assert torch.equal(output, model(ids))


def test_weights_that_are_used_twice_are_restored() -> None:
    first, second = (nn.Linear(4, 4, bias=False) for _ in range(2))
    second.weight = first.weight
    model = nn.Sequential(first, second)
    [before] = weights_of(model)
    with torch.no_grad(), rounded_weights(model, torch.bfloat16):
        model(torch.ones(4))
    assert torch.equal(before, first.weight)


def test_weights_are_restored_if_the_forward_fails() -> None:
    model = Broken(4, 4)
    before = weights_of(model)
    with pytest.raises(RuntimeError), torch.no_grad(), rounded_weights(model, torch.bfloat16):
        model(torch.ones(4))
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(model), strict=True))
