"""One step of each of the field's recipes, as calls of roles.

    recipe    roles                       rows
    ppo       actor, reference, critic    reward
    grpo      actor, reference            reward, group: siblings, whose rewards are compared
    dpo       actor, reference            pairs, the better one first
    sft       actor
    reward    scorer                      pairs, the better one first

Rows are those of rows.py, whose tensors are handles; what a role computes of them goes into them as
a column, handles again: no tensor passes through here. Invariants: those of the roles, so that a
step is the same on any number of ranks; all that a step makes is tagged by it, and freed by
`end_step(step)`, which is the caller's. Driven by a train loop, on a TrainController or, under a
plain torchrun, on a PlainRank, whose rows are tensors.

The roles of a trainer as one subject of savepoints, each that learns in a folder of its own.

    savepoint/actor/model/...  savepoint/critic/model/...

Invariant: what is saved is of one moment, between two calls; a role that is frozen has nothing to
keep. Driven by savepoints/shelf.py, for a train loop on a TrainController.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from rollmesh.core.config import TrainerConfig
from rollmesh.core.errors import CallFailed, ConfigError, SavepointError
from rollmesh.core.types import Json, reward_fault
from rollmesh.trainer.algorithms.advantages import group_advantages
from rollmesh.trainer.controller.controller import RoleCall
from rollmesh.trainer.controller.dispatch import DispatchRule
from rollmesh.trainer.controller.spec import RoleSpec
from rollmesh.trainer.roles.learner import Row
from rollmesh.trainer.roles.losses import NO_LOSS

Rows = Sequence[Row]
Report = dict[str, float]

LANGUAGE = "rollmesh.trainer.roles.language:LanguageModel"
SCALAR = "rollmesh.trainer.roles.scalar:ScalarModel"
SCALARS = ("critic", "scorer")
PPO_EPOCHS = 2
"""Optimiser steps on one batch."""


class RoleCaller(Protocol):
    """A TrainController or a PlainRank."""

    def call(self, what: RoleCall | str, *args: Any, **kwargs: Any) -> Any:
        """See TrainController."""


def ppo(trainer: RoleCaller, rows: Rows, step: int) -> Report:
    """Schulman et al. 2017: clipped ratios, advantages against a critic that learns beside."""
    rows = _with(
        rows,
        proximal=_told(trainer, "actor.logprobs", rows, step),
        reference=_told(trainer, "reference.logprobs", rows, step),
    )
    _check_rewards(row["reward"] for row in rows)
    rows = _with(rows, **_told(trainer, "critic.advantages", rows, step))
    for _ in range(PPO_EPOCHS):
        values = _trained(trainer, "critic.train_values", rows, step)
        policy = _trained(trainer, "actor.train_policy", rows, step)
    return policy | {"value_loss": values["loss"]}


def grpo(trainer: RoleCaller, rows: Rows, step: int) -> Report:
    """Shao et al. 2024: a rollout's advantage is over its siblings, so that no critic is needed."""
    rows = _with(
        rows,
        advantages=_over_siblings(rows),
        reference=_told(trainer, "reference.logprobs", rows, step),
    )
    return _trained(trainer, "actor.train_policy", rows, step)


def dpo(trainer: RoleCaller, rows: Rows, step: int) -> Report:
    """Rafailov et al. 2023: a policy learns preferences without a reward model."""
    rows = _with(rows, reference=_told(trainer, "reference.logprobs", rows, step))
    return _trained(trainer, "actor.train_preference", rows, step, group_size=2)


def sft(trainer: RoleCaller, rows: Rows, step: int) -> Report:
    """Supervised training on texts."""
    return _trained(trainer, "actor.train_text", rows, step)


def reward(trainer: RoleCaller, rows: Rows, step: int) -> Report:
    """Ouyang et al. 2022: a model learns which of two answers is worth more."""
    return _trained(trainer, "scorer.train_rewards", rows, step, group_size=2)


class Recipe(NamedTuple):
    """What a step is, and who plays in it."""

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

    The reference stays that model. `losses` has, by role, fields of its LanguageTerms or
    ScalarTerms. ConfigError where the actor's loss is one that trains nothing.
    """
    specs = {}
    for name in names:
        given: dict[str, Any] = {"path": path, "losses": dict((losses or {}).get(name, {}))}
        if given["losses"].get("kl_estimate") == "k1":
            raise ConfigError(f"losses of the role {name}: {NO_LOSS}")
        if name != "reference":
            given["trainer"] = msgspec.to_builtins(settings)
        specs[name] = RoleSpec(make=SCALAR if name in SCALARS else LANGUAGE, settings=given)
    return specs


def _told(trainer: RoleCaller, method: str, rows: Rows, step: int) -> Any:
    """Columns, handles of this step."""
    return trainer.call(RoleCall(method, step, DispatchRule(uneven="pad")), rows)


def _trained(
    trainer: RoleCaller, method: str, rows: Rows, step: int, group_size: int = 1
) -> Report:
    rule = DispatchRule(group_size=group_size, uneven="pad")
    report: Report = trainer.call(RoleCall(method, step, rule), rows, step)
    return report


def _with(rows: Rows, **columns: Sequence[Any]) -> Rows:
    """The rows, and in each what the columns have for it."""
    added = [
        dict(zip(columns, entries, strict=True)) for entries in zip(*columns.values(), strict=True)
    ]
    return [{**row, **entries} for row, entries in zip(rows, added, strict=True)]


def _check_rewards(rewards: Iterable[float]) -> None:
    """ConfigError for a reward that cannot be trained on."""
    for reward in rewards:
        if fault := reward_fault(float(reward)):
            raise ConfigError(f"reward: {fault}")


def _over_siblings(rows: Rows) -> list[float]:
    """Each row's reward against those of its group."""
    groups: dict[Any, list[int]] = {}
    for at, row in enumerate(rows):
        groups.setdefault(row["group"], []).append(at)
    advantages = [0.0] * len(rows)
    for members in groups.values():
        _check_rewards([rows[at]["reward"] for at in members])
        told = group_advantages([rows[at]["reward"] for at in members], "grpo")
        for at, advantage in zip(members, told, strict=True):
            advantages[at] = advantage
    return advantages


class SavedRoles:
    """See the module; a Subject."""

    def __init__(self, trainer: RoleCaller, roles: Sequence[str]) -> None:
        """The `roles` that learn, by their names."""
        self._trainer = trainer
        self._roles = roles

    def snapshot(self, folder: Path) -> None:
        """As Subject has it."""
        for role in self._roles:
            self._trainer.call(f"{role}.snapshot", str(folder.absolute() / role))

    def is_snapshot_written(self) -> bool:
        """As Subject has it; every role is asked."""
        told = [self._trainer.call(f"{role}.is_snapshot_written") for role in self._roles]
        return all(told)

    def restore(self, folder: Path) -> None:
        """As Subject has it."""
        try:
            for role in self._roles:
                self._trainer.call(f"{role}.restore", str(folder.absolute() / role))
        except CallFailed as error:
            raise SavepointError(str(error)) from None
