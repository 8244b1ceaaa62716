"""SGLang's kernels, absent: every name can be imported, and says so when it is called.

Their CPU wheel is not published. On a CPU without AMX SGLang takes torch's own operators instead,
but imports the kernels' names all the same. Invariant: nothing here computes anything, so a path
that would need a kernel fails rather than answer wrongly.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import NoReturn

PARTS = ("elementwise", "flash_attn", "flash_mla", "kvcacheio", "mamba", "quantization")


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
