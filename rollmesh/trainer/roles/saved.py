"""The roles of a trainer as one subject of savepoints, each that learns in a folder of its own.

    savepoint/actor/model/...  savepoint/critic/model/...

Invariant: what is saved is of one moment, between two calls; a role that is frozen has nothing to
keep. Driven by savepoints/shelf.py, for a train loop on a TrainController.
"""

from collections.abc import Sequence
from pathlib import Path

from rollmesh.core.errors import CallFailed, SavepointError
from rollmesh.trainer.roles.recipes import Trainer


class SavedRoles:
    """See the module; a Subject."""

    def __init__(self, trainer: Trainer, roles: Sequence[str]) -> None:
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
