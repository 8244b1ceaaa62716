"""Roles that learn are saved together, each in its folder, and go on where they were."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rollmesh.core.errors import SavepointError
from rollmesh.trainer.controller.controller import RoleCall
from rollmesh.trainer.controller.rendezvous import RankContext
from rollmesh.trainer.roles.language import LanguageModel
from rollmesh.trainer.roles.recipes import SavedRoles
from rollmesh.trainer.roles.scalar import ScalarModel
from rollmesh.trainer.savepoints.shelf import Savepoints
from rollmesh.trainer.savepoints.state import LoopState
from tests.unit.trainer.roles.rows import drawn

TRAINER = {"learning_rate": 1e-2}
LEARNERS = ("actor", "scorer")


class Here:
    """Calls roles of this process by name, as a controller calls those of its ranks."""

    def __init__(self, roles: Mapping[str, object]) -> None:
        self._roles = roles

    def call(self, what: RoleCall | str, *args: Any, **kwargs: Any) -> Any:
        role, _, name = str(what).partition(".")
        method: Callable[..., Any] = getattr(self._roles[role], name)
        return method(*args, **kwargs)


def new(place: RankContext, folder: Path) -> Here:
    actor, scorer = (make(place, str(folder), TRAINER) for make in (LanguageModel, ScalarModel))
    return Here({"actor": actor, "scorer": scorer, "reference": LanguageModel(place, str(folder))})


def train(roles: Here, *steps: int) -> list[Any]:
    """What both learners report of each step."""
    learn = {"actor": "train_text", "scorer": "train_rewards"}
    rows = [drawn(step, 5, 12, 9, 4) for step in steps]
    return [
        roles.call(f"{role}.{learn[role]}", each, step, [1.0] * 4)
        for step, each in zip(steps, rows, strict=True)
        for role in LEARNERS
    ]


def test_all_that_learn_go_on_bit_by_bit(place: RankContext, folder: Path, tmp_path: Path) -> None:
    one, other = new(place, folder), new(place, folder)
    train(one, 0, 1)
    shelf = Savepoints(tmp_path)
    assert shelf.begin(LoopState(num_steps=2), SavedRoles(one, LEARNERS))
    saved = shelf.settled(30.0)
    assert saved is not None
    assert sorted(each.name for each in saved.folder.iterdir() if each.is_dir()) == [*LEARNERS]
    expected = train(one, 2, 3)
    newest = Savepoints(tmp_path).newest()
    assert newest is not None
    assert shelf.restore(newest, SavedRoles(other, LEARNERS)).num_steps == 2
    assert train(other, 2, 3) == expected


def test_what_is_frozen_has_nothing_to_keep(
    place: RankContext, folder: Path, tmp_path: Path
) -> None:
    roles = SavedRoles(new(place, folder), ["reference"])
    roles.snapshot(tmp_path)
    assert roles.is_snapshot_written()
    roles.restore(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_roles_savepoint_is_refused(
    place: RankContext, folder: Path, tmp_path: Path
) -> None:
    roles = new(place, folder)
    shelf = Savepoints(tmp_path)
    assert shelf.begin(LoopState(num_steps=0), SavedRoles(roles, ["actor"]))
    saved = shelf.settled(30.0)
    assert saved is not None
    with pytest.raises(SavepointError, match="scorer/model: is of another model"):
        shelf.restore(saved, SavedRoles(roles, LEARNERS))
