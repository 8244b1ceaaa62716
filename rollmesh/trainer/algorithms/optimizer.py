"""The optimiser: AdamW on a rank's part of a model, with gradients clipped over all ranks.

- The weights change in `step` only, which also clears the gradients.
- A gradient is the sum over all backward passes since the last step, and over all ranks (ranks.py).
- A step whose loss or gradient is not finite changes nothing, on any rank, and is counted.
"""

import math

import torch
from torch import Tensor, nn

from rollmesh.core.config import TrainerConfig
from rollmesh.core.errors import NotFinite
from rollmesh.trainer.ranks import full_tensor

BETAS = (0.9, 0.95)
"""AdamW's betas; a short second moment suits a policy whose gradients change scale."""
MAX_SKIPPED = 5
"""Skipped optimiser steps in a row that end the run."""


class ModelOptimizer:
    """AdamW with a warm-up; `settings` has the rates and max_grad_norm."""

    def __init__(self, model: nn.Module, settings: TrainerConfig) -> None:
        """`model` is already sharded over the ranks."""
        self._model = model
        self._settings = settings
        self.num_skipped_in_row = 0
        """Optimiser steps since the last one that changed the weights."""
        self._optimizer = torch.optim.AdamW(
            [each for each in model.parameters() if each.requires_grad],
            lr=settings.learning_rate,
            betas=BETAS,
            weight_decay=settings.weight_decay,
        )

    def warm_up(self, step: int) -> float:
        """Set and return the learning rate of train step `step`, which counts from 0."""
        rise = min(1.0, (step + 1) / max(1, self._settings.warmup_steps))
        rate = self._settings.learning_rate * rise
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """AdamW's state of a parameter: exp_avg, exp_avg_sq and step, which change in place. It is
        created if there was no step yet."""
        state: dict[str, Tensor] = self._optimizer.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state

    def move(self, device: torch.device) -> None:
        """Move AdamW's state to the device of the model."""
        for state in self._optimizer.state.values():
            for name, each in state.items():
                if each.dim():  # AdamW counts steps on the host
                    state[name] = each.to(device)

    def step(self, loss: float) -> float | None:
        """Change the weights, and return the gradient's norm before clipping; a collective.

        `loss` is that of all ranks. If it or the gradient is not finite, the weights do not change
        and None is returned.
        """
        clipped = torch.nn.utils.clip_grad_norm_(
            self._model.parameters(), self._settings.max_grad_norm
        )
        norm = float(full_tensor(clipped))
        is_finite = math.isfinite(norm) and math.isfinite(loss)
        if is_finite:
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.num_skipped_in_row = 0 if is_finite else self.num_skipped_in_row + 1
        return norm if is_finite else None

    def check(self, step: int) -> None:
        """Raise NotFinite if MAX_SKIPPED steps in a row were skipped, the last in `step`."""
        if self.num_skipped_in_row >= MAX_SKIPPED:
            raise skipped_too_often(self.num_skipped_in_row, step)


def skipped_too_often(num_in_row: int, step: int) -> NotFinite:
    """The error that ends a run whose gradients stay not finite."""
    return NotFinite(
        f"step {step}: the loss or the gradient of the last {num_in_row} optimiser steps was not "
        "finite; the weights did not change. Lower trainer.learning_rate, or check the model's "
        "weights and the rewards; then --resume"
    )
