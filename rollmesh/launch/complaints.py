"""What keeps a run from going on that people can mend, such as a full disk, in a line for them.

Owns the form of that line, and how far the trainer's log was read. Invariants: each complaint is
told once, and those before launch began are not told again; a disk that is too full for the
trainer's log to say so is told of by what launch itself could not write. Driven by `run`, once a
second.
"""

from collections.abc import Iterator

import msgspec

from rollmesh.core.tail import Tail
from rollmesh.launch.folder import RunFolder


class ErrorRow(msgspec.Struct, frozen=True):
    """A line of the trainer's log that says what to do."""

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
            if row.level == "error":
                yield row
