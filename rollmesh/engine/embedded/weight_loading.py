"""Weights from shared memory of this host, and the model that is staged ahead of its swap.

    none --stage--> MAKING --made--> STAGED --take, drop, a newer one--> none
                    MAKING --fails--> none;  --take, drop, a newer one--> none, made for the taker

- At most one model is staged. It is returned once, to a request with an equal key; a dropped one is
  discarded when made, so that no second model stays in memory.
- Tensors are copied, so the publisher may overwrite its memory as soon as it is answered.
"""

import asyncio
import mmap
import os
import re
import traceback
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rollmesh.core.errors import ModelError
from rollmesh.engine.embedded.model import Model
from rollmesh.engine.shared_memory import SharedSegment, TensorPiece, decode_parts

DROPPED = "not staged: other weights came meanwhile"

StageKey = tuple[list[str], str | None]
"""Sources of a model, and its version."""


class _Staged(NamedTuple):
    key: StageKey
    model: asyncio.Future[Model]
    """Done once it is built."""


class Staging:
    """The staged model; used from the event loop."""

    def __init__(self) -> None:
        self._staged: _Staged | None = None

    async def stage(self, key: StageKey, make: Callable[[], Model]) -> None:
        """Build a model; returns once it is built or taken. ModelError if that fails or it was
        dropped."""
        self.drop()  # frees its memory first
        making = asyncio.get_running_loop().run_in_executor(None, make)
        staged = self._staged = _Staged(key, making)
        try:
            await making
        except ModelError:
            if self._staged is staged:
                self.drop()
            raise
        if self._staged is not staged:
            raise ModelError(DROPPED)

    def take(self, key: StageKey) -> asyncio.Future[Model] | None:
        """Return the model of an equal key, built or under way; drop any other."""
        staged, self._staged = self._staged, None
        return staged.model if staged and staged.key == key else None

    def drop(self) -> None:
        """Discard the staged model."""
        self._staged = None


_OURS = re.compile(rf"/dev/shm/rollmesh-{os.getuid()}-[0-9A-Za-z_.-]+")
"""Names of shared memory that rollmesh creates for this user."""


def read_segments(entries: list[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return copies of all tensors by name, as `dtype`; ModelError if an entry is wrong."""
    weights: dict[str, Tensor] = {}
    for part in decode_parts(entries):
        weights |= read_segment(part, dtype)
    return weights


def read_segment(part: SharedSegment, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return copies of one segment's tensors; its memory is unmapped afterwards."""
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
        # The frames of the failure hold views of the memory, which would prevent closing it.
        traceback.clear_frames(error.__traceback__)
    finally:
        memory.close()
    raise ModelError(f"{part.path}: cannot be read as described: {why}")


def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype of that name; ModelError if there is none."""
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype):
        raise ModelError(f"{name[:40]!a}: not a dtype of torch")
    return kind


def _mapped(path: str) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:  # copy on write: torch requires writable memory, and nothing is written
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
