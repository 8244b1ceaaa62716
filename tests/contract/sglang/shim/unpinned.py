"""Pinned memory, absent: what asks for it gets plain memory.

SGLang's adapters pin theirs, for copies to an accelerator, and torch refuses where there is none.
Where memory lies changes no number. Imported by sgl_kernel, which all processes of SGLang import.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch


def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same, but for `pin_memory`."""

    @functools.wraps(make)
    def plain(*args: Any, pin_memory: bool = False, **fields: Any) -> torch.Tensor:
        return make(*args, **fields)

    return plain


def keep(tensor: torch.Tensor, *_args: object) -> torch.Tensor:
    """Tensor.pin_memory."""
    return tensor


if not torch.accelerator.is_available():
    torch.Tensor.pin_memory = keep  # type: ignore[assignment,method-assign]
    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, unpinned(getattr(torch, name)))
