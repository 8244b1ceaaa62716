"""Losses and advantages by name: `trainer.loss` and `trainer.advantage`.

A name is one of LOSSES or ADVANTAGES, or `package.module:function` of the user's own; modules in
the working directory are found too.
"""

import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollmesh.core.config import TrainerConfig
from rollmesh.core.errors import ConfigError
from rollmesh.core.text import close_names
from rollmesh.trainer.algorithms.advantages import Advantage, grpo, leave_one_out, mean_centred
from rollmesh.trainer.algorithms.gspo import gspo_loss
from rollmesh.trainer.algorithms.loss import LossResult, TokenTerms, ppo_loss

Loss = Callable[[TokenTerms, TrainerConfig], LossResult]
"""The loss of one batch; see docs/howto/losses.md."""

LOSSES: Mapping[str, Loss] = {"ppo": ppo_loss, "gspo": gspo_loss}
ADVANTAGES: Mapping[str, Advantage] = {
    "grpo": grpo,
    "mean": mean_centred,
    "leave_one_out": leave_one_out,
}


def find_loss(name: str) -> Loss:
    """Return the loss that `trainer.loss` names; raise ConfigError if there is none."""
    loss: Loss = _find("trainer.loss", name, LOSSES)
    return loss


def find_advantage(name: str) -> Advantage:
    """Return the advantage that `trainer.advantage` names; raise ConfigError if there is none.

    The result of a user's own function is checked: one finite number for each reward.
    """
    function: Advantage = _find("trainer.advantage", name, ADVANTAGES)
    return function if name in ADVANTAGES else _checked(name, function)


def _checked(name: str, function: Advantage) -> Advantage:
    def checked(rewards: Sequence[float]) -> Sequence[float]:
        advantages = [float(each) for each in function(rewards)]
        if len(advantages) != len(rewards) or not all(map(math.isfinite, advantages)):
            raise ConfigError(
                f'trainer.advantage = "{name}": returned {advantages} for {len(rewards)} rewards; '
                "return one finite number for each"
            )
        return advantages

    return checked


def _find(key: str, name: str, known: Mapping[str, Any]) -> Any:
    if name in known:
        return known[name]
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        close = close_names(name, known)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f'{key} = "{name}" is neither built in ({", ".join(sorted(known))}) nor of the form '
            f'"package.module:function"{hint}'
        )
    cwd = os.getcwd()
    if cwd not in sys.path and "" not in sys.path:
        sys.path.append(cwd)  # last, so that a user's file shadows no installed module
    try:
        function = getattr(importlib.import_module(module_name), function_name, None)
    except (Exception, SystemExit) as error:  # door: a user's module may raise anything
        first_line = next(iter(str(error).splitlines()), "")
        raise ConfigError(
            f'{key} = "{name}" cannot be imported: {type(error).__name__}: {first_line}'
        ) from error
    if not callable(function):
        raise ConfigError(
            f'{key} = "{name}": module {module_name} has no function {function_name}; '
            f"built in are {', '.join(sorted(known))}"
        )
    return function
