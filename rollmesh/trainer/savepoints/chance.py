"""A process's random generators, out and in: torch's on CPU and GPU, numpy's, Python's.

Invariant: as safetensors, so that nothing is unpickled; what `restore_chance` is given makes the
generators draw what they drew next when `chance_now` looked. Driven by imprint.py.
"""

import random
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError

from rollmesh.core.errors import SavepointError

_TORCH, _CUDA, _NUMPY, _PYTHON = "torch", "cuda", "numpy", "python"
_SMALL = "small"
"""What is no array: JSON, as bytes."""


class _Small(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    numpy_position: int
    numpy_has_gauss: int
    numpy_gauss: float
    python_form: int
    python_gauss: float | None


def chance_now() -> bytes:
    """All states as they are."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    form, words, python_gauss = random.getstate()
    small = _Small(int(position), int(has_gauss), float(gauss), form, python_gauss)
    arrays: dict[str, npt.NDArray[Any]] = {
        _TORCH: torch.get_rng_state().numpy(),
        _NUMPY: np.asarray(keys, np.uint32),
        _PYTHON: np.array(words, np.uint32),
        _SMALL: np.frombuffer(msgspec.json.encode(small), np.uint8),
    }
    for number in range(_num_gpus()):
        arrays[f"{_CUDA}{number}"] = torch.cuda.get_rng_state(number).numpy()
    return safetensors.numpy.save(arrays)


def restore_chance(data: bytes) -> None:
    """Go on from there; SavepointError where it is no such file. A GPU that was not there keeps
    its state."""
    try:
        arrays = safetensors.numpy.load(data)
        small = msgspec.json.decode(arrays[_SMALL].tobytes(), type=_Small)
        torch.set_rng_state(torch.from_numpy(arrays[_TORCH].copy()))
        gauss = (small.numpy_position, small.numpy_has_gauss, small.numpy_gauss)
        np.random.set_state(("MT19937", arrays[_NUMPY], *gauss))
        words = tuple(arrays[_PYTHON].tolist())
        random.setstate((small.python_form, words, small.python_gauss))
        for number in range(_num_gpus()):
            if (state := arrays.get(f"{_CUDA}{number}")) is not None:
                torch.cuda.set_rng_state(torch.from_numpy(state.copy()), number)
    except (KeyError, ValueError, TypeError, SafetensorError, msgspec.MsgspecError) as error:
        raise SavepointError(f"no states of random generators: {error}") from None


def _num_gpus() -> int:
    """That this process has used: to ask the others would take memory on each."""
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.device_count() if is_used else 0
