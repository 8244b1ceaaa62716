"""What a trainer computes on, as the settings name it.

Invariant: a name that torch does not know, or a device that is not there, is one line before any
model is loaded. Driven by process.py, and by each rank.
"""

import torch

from rollmesh.core.errors import ConfigError


def device_of(name: str) -> torch.device:
    """ConfigError where there is no such device."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f'device = "{name}": {str(error).splitlines()[0]}') from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f'device = "{name}": torch sees no GPU here; "cpu" is always there')
    return device
