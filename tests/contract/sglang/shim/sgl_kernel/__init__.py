"""A stub of SGLang's kernels: every name can be imported, and raises when it is called.

Their CPU wheel is not published. On a CPU without AMX SGLang uses torch's own operators instead,
but still imports the kernels' names. Nothing here computes anything, so a path that needs a kernel
fails rather than answers wrongly.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import NoReturn

import torch
import unpinned  # noqa: F401 - memory for adapters

PARTS = ("elementwise", "flash_attn", "flash_mla", "kvcacheio", "mamba", "quantization")
FETCHED = (
    "sigmoid_mul qk_gemma_rmsnorm qk_gemma_rmsnorm_with_gate qkvzba_split_reshape_cat_contiguous"
)
"""Operators, fused_*_cpu, that the multimodal Qwens fetch when their module is imported."""


def absent(name: str) -> Callable[..., NoReturn]:
    """Return a function of that name that raises; private names are really missing."""
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called, and this machine has no kernels")

    return kernel


__getattr__ = absent
for part in PARTS:
    module = sys.modules[f"{__name__}.{part}"] = ModuleType(f"{__name__}.{part}")
    vars(module)["__getattr__"] = absent
for part in FETCHED.split():  # no other modules: SGLang checks whether they exist
    setattr(torch.ops.sgl_kernel, f"fused_{part}_cpu", absent(f"fused_{part}_cpu"))
