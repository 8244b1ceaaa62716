"""Where a rank lays the weights that it hands over: memory of the host, used for every version.

Owns one segment, made at the first version and as large as it. Invariants: the weights are copied
once, from wherever they are, straight to where the publisher finds them, and while that writes and
carries them the rank trains on; they lie in shared memory, or in a file beside the versions where
/dev/shm is too small, which is said. Driven by the policy, on the step thread.
"""

import math
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rollmesh.core.logs import get_logger
from rollmesh.engine.in_memory import Part, Piece
from rollmesh.tensors.segment import SHARED_MEMORY, Segment
from rollmesh.trainer.ranks import full_tensor

ALIGNMENT = 64
"""A cache line: with that every dtype and every vector unit is content."""

log = get_logger()


class Hold:
    """See the module."""

    def __init__(self, shared: Path = SHARED_MEMORY) -> None:
        self._shared = shared
        self._segment: Segment | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        """All of the segment."""

    @torch.no_grad()
    def lay(self, weights: Mapping[str, Tensor], own: Collection[str], beside: Path) -> Part:
        """Copy those of `weights` that are our `own`; of shards the others are gathered too.

        `beside` is where a file may stand if shared memory is too small. The part is good until
        the next call.
        """
        pieces = pieces_of({name: weights[name] for name in weights if name in own})
        num_bytes = max([1, *(piece.offset + piece.num_bytes for piece in pieces)])
        segment = self._opened(num_bytes, beside)
        places = {piece.name: piece for piece in pieces}
        for name, tensor in weights.items():
            full = full_tensor(tensor)  # a collective, so for all of them and in one order
            piece = places.get(name)
            if piece and piece.num_bytes:
                data = self._bytes[piece.offset : piece.offset + piece.num_bytes]
                data.view(full.dtype).view(full.shape).copy_(full)
        return Part(str(segment.path), tuple(pieces))

    def close(self) -> None:
        """Give the memory back, once nobody looks at it."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if self._segment:
            self._segment.close()
            self._segment = None

    def _opened(self, num_bytes: int, beside: Path) -> Segment:
        if self._segment and len(self._bytes) >= num_bytes:
            return self._segment
        self.close()
        try:
            self._segment = _backed(self._shared, num_bytes)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            log.warning("weights.beside_memory", folder=str(self._shared), bytes=num_bytes, why=why)
            beside.mkdir(parents=True, exist_ok=True)
            self._segment = _backed(beside, num_bytes)
        self._bytes = torch.frombuffer(self._segment.memory, dtype=torch.uint8)
        return self._segment


def pieces_of(weights: Mapping[str, Tensor]) -> list[Piece]:
    """Where each lies when they lie one after the other."""
    pieces: list[Piece] = []
    end = 0
    for name, tensor in weights.items():
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        num_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        dtype = str(tensor.dtype).removeprefix("torch.")
        pieces.append(Piece(name, dtype, tuple(tensor.shape), offset, num_bytes))
        end = offset + num_bytes
    return pieces


def _backed(folder: Path, num_bytes: int) -> Segment:
    """A segment with memory under all of it."""
    segment = Segment(folder, num_bytes)
    try:
        segment.back(0, num_bytes)
    except OSError:
        segment.close()
        raise
    return segment
