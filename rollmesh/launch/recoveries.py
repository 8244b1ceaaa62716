"""What the trainer's next life says that it goes on with, in a line for people.

Owns the form of that line, and how far recoveries.jsonl was read. Invariant: each life is told
once, and those before launch began are not told again. Driven by `run`, once a second.
"""

from pathlib import Path

import msgspec

from rollmesh.core.tail import Tail


class RecoveryRow(msgspec.Struct, frozen=True):
    """What of a line of recoveries.jsonl the terminal shows."""

    savepoint: str
    """Its folder; '' where there was none yet."""
    redone_steps: tuple[int, ...]
    num_ready: int
    num_open: int
    num_dropped: int
    lost: tuple[str, ...] = ()

    def __str__(self) -> str:
        begin = f"savepoint {self.savepoint}" if self.savepoint else "its first weights"
        parts = [
            f"the trainer goes on from {begin}",
            f"steps to do again: {len(self.redone_steps)}",
            f"groups ready: {self.num_ready}, open: {self.num_open}, dropped: {self.num_dropped}",
            *self.lost,
        ]
        return "; ".join(parts)


class Recoveries:
    """The lives that begin from now on."""

    def __init__(self, run_folder: Path) -> None:
        self._tail = Tail(run_folder / "recoveries.jsonl")
        self._tail.read()

    def new(self) -> list[str]:
        """A line for each that began since the last call; what is no such row is passed over."""
        told = []
        for line in self._tail.read():
            try:
                told.append(str(msgspec.json.decode(line.data, type=RecoveryRow)))
            except msgspec.MsgspecError:
                continue
        return told
