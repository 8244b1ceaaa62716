"""The weights of one policy version: in host memory, and as a model folder.

    STORED in memory by each rank  --written beside, then renamed-->  COMPLETE as a folder

- The bytes of a part do not change from the moment it is handed over until its publication has
  ended; then its rank may store the next version there.
- Weights are copied once, from wherever they are into shared memory (or into a file, if /dev/shm is
  too small), and the rank trains on while they are written and transferred.
- The file gets the bytes of the parts unchanged, straight from shared memory and without the
  interpreter's lock, so that a concurrent train step loses little time.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from rollmesh.core.logs import get_logger
from rollmesh.engine.shared_memory import SharedSegment, TensorPiece
from rollmesh.tensors.segment import SHARED_MEMORY, AttachedSegment, Segment
from rollmesh.trainer.models.folders import disk_errors, end_folder, partial_path
from rollmesh.trainer.models.safetensors_layout import (
    INDEX,
    MAX_FILE_BYTES,
    TensorSpec,
    plan_layout,
)
from rollmesh.trainer.ranks import full_tensor


class Payload(msgspec.Struct, frozen=True):
    policy_version: int
    folder: str
    """Absolute path; complete once the file is written, until a later version replaces it."""
    parts: tuple[SharedSegment, ...] = ()
    """Empty if the folder is already complete: adapters, and models whose files transformers has to
    convert."""


ALIGNMENT = 64
"""A cache line, which satisfies every dtype and every vector unit."""

log = get_logger()


class WeightBuffer:
    """Shared memory into which one rank copies the weights it publishes, reused for every
    version."""

    def __init__(self, shared: Path = SHARED_MEMORY) -> None:
        self._shared = shared
        self._segment: Segment | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        """A view of the whole segment."""

    @torch.no_grad()
    def store(
        self, weights: Mapping[str, Tensor], own: Collection[str], beside: Path
    ) -> SharedSegment:
        """Copy the tensors of `weights` that are named in `own`; sharded ones are gathered on all
        ranks.

        `beside` is the folder for the file that is used if shared memory is too small. The part
        stays valid until the next call.
        """
        pieces = lay_out_pieces({name: weights[name] for name in weights if name in own})
        num_bytes = max([1, *(piece.offset + piece.num_bytes for piece in pieces)])
        segment = self._opened(num_bytes, beside)
        places = {piece.name: piece for piece in pieces}
        for name, tensor in weights.items():
            full = full_tensor(tensor)  # a collective: in the same order on all ranks
            piece = places.get(name)
            if piece and piece.num_bytes:
                data = self._bytes[piece.offset : piece.offset + piece.num_bytes]
                data.view(full.dtype).view(full.shape).copy_(full)
        return SharedSegment(str(segment.path), tuple(pieces))

    def close(self) -> None:
        """Release the memory; nothing may be reading it."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if self._segment:
            self._segment.close()
            self._segment = None

    def _opened(self, num_bytes: int, beside: Path) -> Segment:
        if self._segment and len(self._bytes) >= num_bytes:
            return self._segment
        self.close()
        try:
            self._segment = _allocated_segment(self._shared, num_bytes)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            log.warning("weights.beside_memory", folder=str(self._shared), bytes=num_bytes, why=why)
            beside.mkdir(parents=True, exist_ok=True)
            self._segment = _allocated_segment(beside, num_bytes)
        self._bytes = torch.frombuffer(self._segment.memory, dtype=torch.uint8)
        return self._segment


def lay_out_pieces(weights: Mapping[str, Tensor]) -> list[TensorPiece]:
    """Lay the tensors out one after the other, each aligned."""
    pieces: list[TensorPiece] = []
    end = 0
    for name, tensor in weights.items():
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        num_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        dtype = str(tensor.dtype).removeprefix("torch.")
        pieces.append(TensorPiece(name, dtype, tuple(tensor.shape), offset, num_bytes))
        end = offset + num_bytes
    return pieces


def _allocated_segment(folder: Path, num_bytes: int) -> Segment:
    """Create a segment whose memory is fully allocated."""
    segment = Segment(folder, num_bytes)
    try:
        segment.back(0, num_bytes)
    except OSError:
        segment.close()
        raise
    return segment


CHUNK_BYTES = 16 * 2**20
"""Size of one write call."""
STEM = "model"


def write_folder(payload: Payload) -> None:
    """Complete the folder that the policy has begun; do nothing if it is complete. Raises the
    errors of `disk_errors`."""
    if not payload.parts:
        return
    folder = Path(payload.folder)
    with disk_errors(folder):
        write_shards(partial_path(folder), payload.parts)
        end_folder(folder)


def write_shards(
    folder: Path, parts: Sequence[SharedSegment], max_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write all pieces of all parts into files in `folder`.

    If the disk refuses (OSError), the files are removed, so that other writers have the space.
    """
    wholes = dict(_tensors_of(parts))
    layout = plan_layout(wholes, STEM, max_bytes)
    data = {whole.name: data for whole, data in wholes.items()}
    try:
        for file_name, head in layout.heads.items():
            names = [name for name, at in layout.spots.items() if at.file_name == file_name]
            _write_file(folder / file_name, [head, *(data[name] for name in names)])
    except OSError:
        for file_name in layout.heads:
            (folder / file_name).unlink(missing_ok=True)
        raise
    if layout.table:
        (folder / f"{STEM}{INDEX}").write_bytes(layout.table)


def _write_file(path: Path, pieces: Sequence[bytes | memoryview]) -> None:
    with open(path, "wb") as file:
        for piece in pieces:
            for at in range(0, len(piece), CHUNK_BYTES):
                file.write(piece[at : at + CHUNK_BYTES])


def _tensors_of(parts: Sequence[SharedSegment]) -> Iterator[tuple[TensorSpec, memoryview]]:
    """Yield each tensor and its bytes in memory."""
    for part in parts:
        memory = AttachedSegment(part.path)
        for piece in part.pieces:
            whole = TensorSpec(piece.name, getattr(torch, piece.dtype), piece.shape)
            yield whole, memory.view(piece.offset, piece.num_bytes).data
