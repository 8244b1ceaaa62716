"""A role for tests of the intake, made in rank processes: it returns the memory location of its
rows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rollmesh.trainer.controller.rendezvous import RankContext


class Witness:
    """Return memory locations of rows; change nothing."""

    def __init__(self, place: RankContext) -> None:
        self._rank = place.rank

    def look(
        self, rows: Sequence[dict[str, Tensor]], row_weights: Sequence[float] = ()
    ) -> list[dict[str, Any]]:
        """For each row: the rank, and the file and offset of its memory."""
        del row_weights
        return [{"rank": self._rank, "place": where(row["arrays"].data_ptr())} for row in rows]


def where(address: int) -> list[Any]:
    """Return the file that is mapped at an address of this process, and the offset;
    proc_pid_maps(5).
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, _, offset, _, _, *path = line.split(maxsplit=5)
        start, stop = (int(bound, 16) for bound in bounds.split("-"))
        if start <= address < stop:
            return [path[0] if path else "", int(offset, 16) + address - start]
    raise LookupError(f"nothing is mapped at {address:#x}")
