"""SGLang's kernels, absent: every name can be imported, and says so when it is called.

Their CPU wheel is not published. On a CPU without AMX SGLang takes torch's own operators instead,
but imports the kernels' names all the same. Invariant: nothing here computes anything, so a path
that would need a kernel fails rather than answer wrongly.
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
    """A function of that name that tells its absence; private names are truly missing."""
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called, and this machine has no kernels")

    return kernel


__getattr__ = absent
for part in PARTS:
    module = sys.modules[f"{__name__}.{part}"] = ModuleType(f"{__name__}.{part}")
    vars(module)["__getattr__"] = absent
for part in FETCHED.split():  # no others: SGLang asks of them whether they are there
    setattr(torch.ops.sgl_kernel, f"fused_{part}_cpu", absent(f"fused_{part}_cpu"))
