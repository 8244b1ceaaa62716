"""Memory of the host for a copy of what trains, and which bytes of it belong where in files.

Invariants: the memory is taken once, as much as this rank's own rows are, and filled anew for each
savepoint, from wherever these are by then; pinned where the rows are on a GPU, which then copies
beside the step. What stands side
by side in a file does so here, so one rank writes each file in one piece. Driven by imprint.py.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rollmesh.trainer.models.safetensors_layout import INDEX, plan_layout
from rollmesh.trainer.savepoints.manifest import Buffer
from rollmesh.trainer.savepoints.slots import Slot

ALIGN = 64
"""Where a folder's first tensor begins; they come by the width of their elements."""


class _Run(NamedTuple):
    """Bytes of a file from `offset` on."""

    path: str
    offset: int
    start: int
    """In our memory."""
    num_bytes: int


class Tray:
    """See the module."""

    def __init__(self, slots: Mapping[str, Sequence[Slot]], *, is_first: bool) -> None:
        """Of the slots of each folder; the files' heads are the first rank's to write."""
        own = [each.rows for members in slots.values() for each in members if each.is_ours]
        self._memory = torch.empty(
            sum(rows.nbytes for rows in own) + ALIGN * len(slots),
            dtype=torch.uint8,
            pin_memory=any(rows.is_cuda for rows in own),
        )
        self._heads: dict[str, bytes] = {}
        self._runs: list[_Run] = []
        self._places: dict[tuple[str, str], Tensor] = {}
        """By folder and name."""
        end = 0
        for folder, members in slots.items():
            end = self._place(folder, members, -(-end // ALIGN) * ALIGN)
        if not is_first:
            self._heads.clear()

    def fill(self, slots: Mapping[str, Sequence[Slot]]) -> list[torch.cuda.Event]:
        """Copy all rows as they are, of the same slots; what tells that this is done, where GPUs do
        it beside us.

        What their streams do to the rows from now on, they do when these are copied.
        """
        gpus = set[torch.device]()
        for folder, members in slots.items():
            for whole, rows, *_ in members:
                if (place := self._places.get((folder, whole.name))) is not None:
                    place.copy_(rows, non_blocking=True)
                    gpus |= {rows.device} if rows.is_cuda else set()
        return [torch.cuda.current_stream(gpu).record_event() for gpu in gpus]

    def parts(self) -> dict[str, list[tuple[int, Buffer]]]:
        """By path, which bytes this rank writes from which offset on."""
        told: dict[str, list[tuple[int, Buffer]]] = {
            path: [(0, head)] for path, head in self._heads.items()
        }
        data = self._memory.numpy().data
        for path, offset, start, num_bytes in self._runs:
            told.setdefault(path, []).append((offset, data[start : start + num_bytes]))
        return told

    def _place(self, folder: str, members: Sequence[Slot], end: int) -> int:
        """Its slots from `end` on; where they end."""
        layout = plan_layout([each.whole for each in members], folder)
        self._heads |= {f"{folder}/{name}": head for name, head in layout.heads.items()}
        if layout.table:
            self._heads[f"{folder}/{folder}{INDEX}"] = layout.table
        by_name = {each.whole.name: each for each in members}
        for name, (file_name, offset) in layout.spots.items():
            slot = by_name[name]
            if not slot.is_ours or not slot.rows.nbytes:
                continue
            num_bytes = slot.rows.nbytes
            place = self._memory[end : end + num_bytes].view(slot.whole.dtype)
            self._places[folder, name] = place.view(slot.rows.shape)
            before = num_bytes // len(slot.rows) * slot.first_row if slot.first_row else 0
            self._run(_Run(f"{folder}/{file_name}", offset + before, end, num_bytes))
            end += num_bytes
        return end

    def _run(self, run: _Run) -> None:
        """Joined to the one before it, where it goes on with that in the file."""
        last = self._runs[-1] if self._runs else None
        if last and (last.path, last.offset + last.num_bytes) == (run.path, run.offset):
            self._runs[-1] = last._replace(num_bytes=last.num_bytes + run.num_bytes)
        else:
            self._runs.append(run)
