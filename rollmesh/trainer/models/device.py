"""The device that a trainer computes on, and warnings about settings that do not fit the model.

- A device name that torch does not know, or a device that is missing, is one error line before any
  model is loaded.
"""

from typing import NamedTuple

import torch

from rollmesh.core.config import Config
from rollmesh.core.errors import ConfigError

AUTO = "auto"
LARGE = 100_000_000
"""Parameters of a model that is more than a toy."""
HIGH_RATE = 1e-4
"""From this learning rate on, a pretrained model of that size forgets what it knew."""


def resolve_device(name: str, num_ranks: int = 1) -> torch.device:
    """Return the device called `name`; `auto` is cuda if there is a GPU for each rank.

    Raises ConfigError if there is no such device.
    """
    if name == AUTO:
        return torch.device("cuda" if torch.cuda.device_count() >= num_ranks else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f'device = "{name}": {str(error).splitlines()[0]}') from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f'device = "{name}": torch finds no GPU; "cpu" always works')
    return device


class SettingsWarning(NamedTuple):
    """A warning about settings that do not fit the model: an event, the reason, the remedy."""

    event: str
    why: str
    fix: str


def settings_warnings(
    config: Config, device: torch.device, num_parameters: int
) -> list[SettingsWarning]:
    """Return the warnings for a model of `num_parameters` that trains on `device`."""
    if num_parameters < LARGE:
        return []
    trainer, size = config.trainer, f"{num_parameters / 1e6:,.0f} M parameters"
    found = []
    if trainer.learning_rate >= HIGH_RATE and not trainer.lora_rank:
        why = f"trainer.learning_rate = {trainer.learning_rate:g} for {size}, all of which train"
        fix = "1e-6 to 1e-5 is usual; or set trainer.lora_rank"
        found.append(SettingsWarning("trainer.high_rate", why, fix))
    if device.type == "cpu":
        why = f'a model of {size} trains on the CPU (trainer.device = "{trainer.device}")'
        fix = "install a torch with CUDA, or expect minutes per step"
        found.append(SettingsWarning("trainer.on_cpu", why, fix))
    if not config.engine.urls:
        why = f"the embedded engine samples a model of {size} on the CPU"
        fix = "name SGLang servers in engine.urls"
        found.append(SettingsWarning("engine.on_cpu", why, fix))
    return found
