"""A JSON-lines file of a run folder, read as typed rows while it grows.

Invariant: a line that does not parse or fit is counted and passed over; one read is bounded.
Driven by `reader`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from rollmesh.core.tail import Tail

BLOCKS_PER_READ = 8
"""A page opened late catches up by so many blocks of the tail per poll."""

Row = TypeVar("Row")


class RowFile(Generic[Row]):
    """Rows of one type, in the order they were written."""

    def __init__(
        self, path: Path, row_type: type[Row], parse: Callable[[bytes], Row] | None = None
    ) -> None:
        """`parse` makes a row of a line, and raises MsgspecError for one that does not fit."""
        self.num_bad_lines = 0
        self._tail = Tail(path)
        self._decode = parse or msgspec.json.Decoder(row_type).decode

    @property
    def num_restarts(self) -> int:
        """How often the file was replaced or cut."""
        return self._tail.num_restarts

    def read(self) -> list[Row]:
        """The rows that the file gained."""
        rows: list[Row] = []
        for _ in range(BLOCKS_PER_READ):
            lines = self._tail.read()
            if not lines:
                break
            rows += [row for line in lines if (row := self._parse(line.data)) is not None]
        return rows

    def _parse(self, data: bytes) -> Row | None:
        try:
            return self._decode(data)
        except msgspec.MsgspecError:
            self.num_bad_lines += 1
            return None
