"""One step of each common recipe, as calls of roles; and the roles as one subject of checkpoints.

    recipe    roles                       rows
    ppo       actor, reference, critic    reward
    grpo      actor, reference            reward, group: siblings, whose rewards are compared
    dpo       actor, reference            pairs, the better one first
    sft       actor
    reward    scorer                      pairs, the better one first

- Rows are those of learner.py with handles for tensors. Results of roles become columns, again as
  handles, so no tensor passes through this process.
- A step gives the same result on any number of ranks. Its tensors are tagged with the step, and the
  caller frees them by `end_step(step)`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from rollmesh.core.config import TrainerConfig
from rollmesh.core.errors import CallFailed, CheckpointError, ConfigError
from rollmesh.core.types import Json, reward_fault
from rollmesh.trainer.algorithms.advantages import grpo as grpo_advantages
from rollmesh.trainer.controller.controller import RoleCall
from rollmesh.trainer.controller.dispatch import DispatchRule
from rollmesh.trainer.controller.spec import RoleSpec
from rollmesh.trainer.roles.learner import Row
from rollmesh.trainer.roles.losses import NO_LOSS

Rows = Sequence[Row]
Report = dict[str, float]

LANGUAGE = "rollmesh.trainer.roles.models:LanguageModel"
SCALAR = "rollmesh.trainer.roles.models:ScalarModel"
SCALARS = ("critic", "scorer")
PPO_EPOCHS = 2
"""Optimiser steps on one batch."""


class RoleCaller(Protocol):
    """A TrainController or a PlainRank."""

    def call(self, what: RoleCall | str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a role; see TrainController.call."""


def ppo(trainer: RoleCaller, rows: Rows, step: int) -> Report:
    """PPO (Schulman et al. 2017): clipped ratios, advantages against a critic that trains too."""
    rows = _with(
        rows,
        proximal=_columns_of(trainer, "actor.logprobs", rows, step),
        reference=_columns_of(trainer, "reference.logprobs", rows, step),
    )
    _check_rewards(row["reward"] for row in rows)
    rows = _with(rows, **_columns_of(trainer, "critic.advantages", rows, step))
    for _ in range(PPO_EPOCHS):
        values = _train(trainer, "critic.train_values", rows, step)
        policy = _train(trainer, "actor.train_policy", rows, step)
    return policy | {"value_loss": values["loss"]}


def grpo(trainer: RoleCaller, rows: Rows, step: int) -> Report:
    """GRPO (Shao et al. 2024): advantages against siblings in place of a critic."""
    rows = _with(
        rows,
        advantages=_over_siblings(rows),
        reference=_columns_of(trainer, "reference.logprobs", rows, step),
    )
    return _train(trainer, "actor.train_policy", rows, step)


def dpo(trainer: RoleCaller, rows: Rows, step: int) -> Report:
    """DPO (Rafailov et al. 2023): preferences without a reward model."""
    rows = _with(rows, reference=_columns_of(trainer, "reference.logprobs", rows, step))
    return _train(trainer, "actor.train_preference", rows, step, group_size=2)


def sft(trainer: RoleCaller, rows: Rows, step: int) -> Report:
    """Supervised fine-tuning on texts."""
    return _train(trainer, "actor.train_text", rows, step)


def reward(trainer: RoleCaller, rows: Rows, step: int) -> Report:
    """Reward model (Ouyang et al. 2022): which of two answers is better."""
    return _train(trainer, "scorer.train_rewards", rows, step, group_size=2)


class Recipe(NamedTuple):
    """The function of a step, and the roles that it calls."""

    step: Callable[[RoleCaller, Rows, int], Report]
    roles: tuple[str, ...]


RECIPES = {
    "ppo": Recipe(ppo, ("actor", "reference", "critic")),
    "grpo": Recipe(grpo, ("actor", "reference")),
    "dpo": Recipe(dpo, ("actor", "reference")),
    "sft": Recipe(sft, ("actor",)),
    "reward": Recipe(reward, ("scorer",)),
}


def role_specs(
    names: Iterable[str],
    path: str,
    settings: TrainerConfig,
    losses: Mapping[str, Mapping[str, Json]] | None = None,
) -> dict[str, RoleSpec]:
    """Return the roles of a RankPlan, each made from the model in the folder `path`.

    The reference is frozen. `losses` has, by role, fields of its LanguageTerms or ScalarTerms.
    Raises ConfigError for a loss that would train nothing.
    """
    specs = {}
    for name in names:
        role_settings: dict[str, Any] = {"path": path, "losses": dict((losses or {}).get(name, {}))}
        if role_settings["losses"].get("kl_estimate") == "k1":
            raise ConfigError(f"losses of the role {name}: {NO_LOSS}")
        if name != "reference":
            role_settings["trainer"] = msgspec.to_builtins(settings)
        specs[name] = RoleSpec(make=SCALAR if name in SCALARS else LANGUAGE, settings=role_settings)
    return specs


def _columns_of(trainer: RoleCaller, method: str, rows: Rows, step: int) -> Any:
    """Call `method`; return its columns, as handles of this step."""
    return trainer.call(RoleCall(method, step, DispatchRule(uneven="pad")), rows)


def _train(trainer: RoleCaller, method: str, rows: Rows, step: int, group_size: int = 1) -> Report:
    rule = DispatchRule(group_size=group_size, uneven="pad")
    report: Report = trainer.call(RoleCall(method, step, rule), rows, step)
    return report


def _with(rows: Rows, **columns: Sequence[Any]) -> Rows:
    """The rows, with the columns added."""
    added = [
        dict(zip(columns, entries, strict=True)) for entries in zip(*columns.values(), strict=True)
    ]
    return [{**row, **entries} for row, entries in zip(rows, added, strict=True)]


def _check_rewards(rewards: Iterable[float]) -> None:
    """Raise ConfigError for a reward that is not finite or too large."""
    for reward in rewards:
        if fault := reward_fault(float(reward)):
            raise ConfigError(f"reward: {fault}")


def _over_siblings(rows: Rows) -> list[float]:
    """The GRPO advantage of each row within its group."""
    groups: dict[Any, list[int]] = {}
    for at, row in enumerate(rows):
        groups.setdefault(row["group"], []).append(at)
    advantages = [0.0] * len(rows)
    for members in groups.values():
        _check_rewards([rows[at]["reward"] for at in members])
        group = grpo_advantages([rows[at]["reward"] for at in members])
        for at, advantage in zip(members, group, strict=True):
            advantages[at] = advantage
    return advantages


class SavedRoles:
    """The roles of a trainer as one Subject of checkpoints, each in a folder of its own.

        checkpoint/actor/model/...  checkpoint/critic/model/...

    A frozen role has nothing to save. All is of one moment, between two calls.
    """

    def __init__(self, trainer: RoleCaller, roles: Sequence[str]) -> None:
        """`roles` are the names of the roles that train."""
        self._trainer = trainer
        self._roles = roles

    def snapshot(self, folder: Path) -> None:
        """Copy the state of all roles, and write it in the background."""
        for role in self._roles:
            self._trainer.call(f"{role}.snapshot", str(folder.absolute() / role))

    def is_snapshot_written(self) -> bool:
        """Whether every role has written its part."""
        written = [self._trainer.call(f"{role}.is_snapshot_written") for role in self._roles]
        return all(written)

    def restore(self, folder: Path) -> None:
        """Read the state of all roles; raise CheckpointError if one cannot."""
        try:
            for role in self._roles:
                self._trainer.call(f"{role}.restore", str(folder.absolute() / role))
        except CallFailed as error:
            raise CheckpointError(str(error)) from None
