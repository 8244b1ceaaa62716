"""Writes a cargo's weights as safetensors, in shards of bounded size, as layout.py has them.

Invariant: what is written is what lies in the cargo's memory, byte for byte: it goes from there to
the file without a copy of ours, and without the interpreter's lock, so that a train step beside it
loses little. Driven by shipping.py, in a thread.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from rollmesh.engine.in_memory import Part
from rollmesh.tensors.segment import Attached
from rollmesh.trainer.models.safetensors_layout import (
    INDEX,
    MAX_FILE_BYTES,
    TensorSpec,
    plan_layout,
)

CHUNK_BYTES = 16 * 2**20
"""Handed to the system at once."""
STEM = "model"


def write_shards(folder: Path, parts: Sequence[Part], max_bytes: int = MAX_FILE_BYTES) -> None:
    """All pieces of all parts, into files in `folder`; OSError where the disk refuses, and what it
    took of them is gone: who else waits for room has it meanwhile."""
    wholes = dict(_pieces_of(parts))
    layout = plan_layout(wholes, STEM, max_bytes)
    data = {whole.name: data for whole, data in wholes.items()}
    try:
        for file_name, head in layout.heads.items():
            names = [name for name, at in layout.spots.items() if at.file_name == file_name]
            _write(folder / file_name, [head, *(data[name] for name in names)])
    except OSError:
        for file_name in layout.heads:
            (folder / file_name).unlink(missing_ok=True)
        raise
    if layout.table:
        (folder / f"{STEM}{INDEX}").write_bytes(layout.table)


def _write(path: Path, pieces: Sequence[bytes | memoryview]) -> None:
    with open(path, "wb") as file:
        for piece in pieces:
            for at in range(0, len(piece), CHUNK_BYTES):
                file.write(piece[at : at + CHUNK_BYTES])


def _pieces_of(parts: Sequence[Part]) -> Iterator[tuple[TensorSpec, memoryview]]:
    """Each tensor, and its bytes where they lie."""
    for part in parts:
        memory = Attached(part.path)
        for piece in part.pieces:
            whole = TensorSpec(piece.name, getattr(torch, piece.dtype), piece.shape)
            yield whole, memory.view(piece.offset, piece.num_bytes).data
