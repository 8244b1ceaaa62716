"""The GPUs of this machine, without torch."""

import itertools
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence

from rollmesh.core.errors import ConfigError

DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
PLACES_VARIABLE = "ROLLMESH_GPU_PLACES"
"""Environment: the places of a process's GPUs among those of its node, such as `2,3`, for a process
whose launch cannot see that node's GPUs."""
_LIST = ("nvidia-smi", "-L")
_LIST_TIMEOUT_S = 30


def visible_gpus(
    environment: Mapping[str, str] = os.environ, list_gpus: Callable[[], str] | None = None
) -> tuple[str, ...]:
    """Return the names of usable GPUs, as CUDA_VISIBLE_DEVICES has them or would have them."""
    visible = environment.get(DEVICES_VARIABLE)
    if visible is None:
        lines = (list_gpus or _listed)().splitlines()
        return tuple(str(at) for at in range(sum(line.startswith("GPU ") for line in lines)))
    words = [word.strip() for word in visible.split(",") if word.strip()]
    # As in CUDA: entries after an invalid one are ignored.
    return tuple(itertools.takewhile(lambda word: not word.startswith("-"), words))


def devices_at(places: str, gpus: Sequence[str]) -> str:
    """Return the GPUs at `places` for CUDA_VISIBLE_DEVICES; ConfigError if one is missing."""
    numbers = [int(word) for word in places.split(",") if word]
    if numbers and max(numbers) >= len(gpus):
        raise ConfigError(
            f"engine.gpus_each: this server has GPU {max(numbers)} of its node, counted from 0, "
            f"which shows {len(gpus)}; start fewer servers on each node"
        )
    return ",".join(gpus[number] for number in numbers)


def _listed() -> str:
    try:
        listed = subprocess.run(
            _LIST, capture_output=True, text=True, timeout=_LIST_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return listed.stdout if listed.returncode == 0 else ""
