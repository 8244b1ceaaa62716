"""Errors and warnings of the trainer that the user can act on, one terminal line each.

- Each is shown once, and those from before launch began are not shown again.
- If the disk is too full for the trainer's log, the line comes from what launch could not write.
"""

from collections.abc import Iterator

import msgspec

from rollmesh.core.tail import Tail
from rollmesh.launch.folder import RunFolder


class ErrorRow(msgspec.Struct, frozen=True):
    """A line of the trainer's log that has a remedy: an error, or a warning with its `why`."""

    level: str
    fix: str
    error: str = ""
    why: str = ""

    def __str__(self) -> str:
        return f"the trainer: {self.error or self.why}; {self.fix}"


class Complaints:
    """Those that come from now on."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._fault = folder.fault
        self._tail = Tail(folder.logs / "trainer.log")
        while self._tail.read():
            pass  # a run that goes on has a long log

    def new(self) -> list[str]:
        """A line for each since the last call."""
        return [*self._own(), *map(str, self._of_trainer())]

    def _own(self) -> list[str]:
        if self._folder.fault == self._fault:
            return []
        self._fault = self._folder.fault
        return [self._fault]

    def _of_trainer(self) -> Iterator[ErrorRow]:
        for line in self._tail.read():
            try:
                row = msgspec.json.decode(line.data, type=ErrorRow)
            except msgspec.MsgspecError:
                continue  # it says nothing of what to do
            if row.level == "error" or (row.level == "warning" and row.why):
                yield row
