"""Reads the weights that a publisher has laid in memory of this host (in_memory.py).

Invariant: what is returned is a copy, so the publisher may write there as soon as it is answered.
Driven by weight_routes.py.
"""

import mmap
import os

import torch
from torch import Tensor

from rollmesh.core.errors import ModelError
from rollmesh.engine.in_memory import Part, Piece, parts_of


def read_told(entries: list[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies of all tensors, by name, as `dtype`; ModelError where something is not as told."""
    weights: dict[str, Tensor] = {}
    for part in parts_of(entries):
        weights |= read_part(part, dtype)
    return weights


def read_part(part: Part, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same of one part."""
    try:
        descriptor = os.open(part.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:  # copy on write: torch wants memory that can be written to, and nothing is
            memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        return {piece.name: _copy(memory, piece, dtype) for piece in part.pieces}
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ModelError(f"{part.path}: cannot be read as told: {why}") from None


def _copy(memory: mmap.mmap, piece: Piece, dtype: torch.dtype) -> Tensor:
    kind = getattr(torch, piece.dtype)
    if not piece.num_bytes:
        return torch.empty(piece.shape, dtype=dtype)
    count = piece.num_bytes // kind.itemsize
    flat = torch.frombuffer(memory, dtype=kind, count=count, offset=piece.offset)
    return flat.view(piece.shape).to(dtype, copy=True)
