"""Reads the weights that a publisher has laid in memory of this host (in_memory.py).

Invariant: what is returned is a copy, so the publisher may write there as soon as it is answered.
Driven by weight_routes.py.
"""

import mmap
import os
import re
import traceback

import torch
from torch import Tensor

from rollmesh.core.errors import ModelError
from rollmesh.engine.shared_memory import SharedSegment, TensorPiece, decode_parts

_OURS = re.compile(rf"/dev/shm/rollmesh-{os.getuid()}-[0-9A-Za-z_.-]+")
"""Names of shared memory that rollmesh makes for this user."""


def read_told(entries: list[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """Copies of all tensors, by name, as `dtype`; ModelError where something is not as told."""
    weights: dict[str, Tensor] = {}
    for part in decode_parts(entries):
        weights |= read_part(part, dtype)
    return weights


def read_part(part: SharedSegment, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same of one part, whose memory is not mapped any more when this returns or raises."""
    if not _OURS.fullmatch(part.path):
        raise ModelError(f"{part.path[:200]!a}: not shared memory of this user's rollmesh")
    try:
        memory = _mapped(part.path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ModelError(f"{part.path}: cannot be read as described: {why}") from None
    try:
        return {piece.name: _copy(memory, piece, dtype) for piece in part.pieces}
    except (ModelError, ValueError, RuntimeError) as error:
        why = str(error)
        # The frames of the failure hold views of the memory, which could not be closed.
        traceback.clear_frames(error.__traceback__)
    finally:
        memory.close()
    raise ModelError(f"{part.path}: cannot be read as described: {why}")


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of that name; ModelError where there is none."""
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype):
        raise ModelError(f"{name[:40]!a}: not a dtype of torch")
    return kind


def _mapped(path: str) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:  # copy on write: torch wants memory that can be written to, and nothing is
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)


def _copy(memory: mmap.mmap, piece: TensorPiece, dtype: torch.dtype) -> Tensor:
    kind = dtype_of(piece.dtype)
    if not piece.num_bytes:
        return torch.empty(piece.shape, dtype=dtype)
    count = piece.num_bytes // kind.itemsize
    flat = torch.frombuffer(memory, dtype=kind, count=count, offset=piece.offset)
    return flat.view(piece.shape).to(dtype, copy=True)
