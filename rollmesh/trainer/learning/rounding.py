"""Compute with the weights as an engine of a coarser dtype holds them.

- One module's weights are rounded at a time, in place, and restored after its forward, so that the
  memory needed is a copy of the largest module.
- The weights are as they were when the context ends, also where the forward fails.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def rounded(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Round the weights of `model` to `dtype` within; for forwards without gradients alone."""
    kept: dict[nn.Module, list[Tensor]] = {}

    @torch.no_grad()
    def round_weights(module: nn.Module, *_: Any) -> None:
        weights = [*module.parameters(recurse=False)]
        kept[module] = [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.copy_(weight.to(dtype))

    @torch.no_grad()
    def restore(module: nn.Module, *_: Any) -> None:
        for weight, was in zip(module.parameters(recurse=False), kept.pop(module), strict=True):
            weight.copy_(was)

    with ExitStack() as hooks:
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                before = module.register_forward_pre_hook(round_weights)
                after = module.register_forward_hook(restore, always_call=True)
                hooks.callback(before.remove)
                hooks.callback(after.remove)
        yield
