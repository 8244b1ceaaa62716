"""Replace pinned memory by plain memory.

SGLang's adapters pin theirs, for copies to an accelerator, and torch refuses without one. Where
memory is allocated changes no number. Imported by sgl_kernel, which all processes of SGLang import.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch


def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a function to ignore `pin_memory`."""

    @functools.wraps(make)
    def plain(*args: Any, pin_memory: bool = False, **fields: Any) -> torch.Tensor:
        return make(*args, **fields)

    return plain


def keep(tensor: torch.Tensor, *_args: object) -> torch.Tensor:
    """A replacement of Tensor.pin_memory."""
    return tensor


if not torch.accelerator.is_available():
    torch.Tensor.pin_memory = keep  # type: ignore[assignment,method-assign]
    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, unpinned(getattr(torch, name)))
