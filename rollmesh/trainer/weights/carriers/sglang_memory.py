"""SGLang's form of tensors in memory: torch's own sharing between processes, told in its pickle.

Here alone is something pickled, because SGLang's protocol is that: `update_weights_from_tensor`
takes what its MultiprocessingSerializer makes of (name, tensor) pairs, base64 of torch's reducers
(sglang/srt/utils/common.py). It holds names of shared memory and no weights, we write it and never
read one. Invariants: the tensors lie in one block that is shared by name ("file_system"): the other
strategy hands over descriptors, which needs a key that only SGLang's own processes have, and its
scheduler ends when it lacks it. Torch starts a `torch_shm_manager` for such blocks, which would
stay as long as any engine that had one, so it is ended with us. Driven by crossing.py.
"""

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler

import psutil
import torch
from torch import Tensor, multiprocessing

from rollmesh.engine.in_memory import Part
from rollmesh.tensors.segment import Attached
from rollmesh.trainer.weights.carriers.cargo import Cargo

MANAGER = "torch_shm_manager"


class SglangMemory:
    """A copy of a cargo in torch's shared memory, used for one version after the other."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._policy_version = -1

    def told(self, cargo: Cargo, num_ranks: int) -> tuple[str, ...]:
        """What each of `num_ranks` is told: every one opens the block for itself."""
        named = self._copied(cargo)
        with shared_by_name():
            return tuple([_serialized(named) for _ in range(num_ranks)])

    def close(self) -> None:
        """Let go of the copy, and then of who minds it: the other order ends our process."""
        self._block = torch.empty(0, dtype=torch.uint8)
        for child in psutil.Process().children():
            if child.name() == MANAGER:
                child.terminate()
                child.wait()

    def _copied(self, cargo: Cargo) -> list[tuple[str, Tensor]]:
        starts = _starts(cargo.parts)
        if len(self._block) != starts[-1]:
            self._block = torch.empty(starts[-1], dtype=torch.uint8)
            self._policy_version = -1
        if self._policy_version != cargo.policy_version:
            with shared_by_name():
                self._block.share_memory_()  # type: ignore[no-untyped-call]
            for part, start in zip(cargo.parts, starts, strict=False):
                data = Attached(part.path).view(0, _end(part))
                self._block.numpy()[start : start + len(data)] = data
            self._policy_version = cargo.policy_version
        return [
            (
                piece.name,
                self._block[start + piece.offset : start + piece.offset + piece.num_bytes]
                .view(getattr(torch, piece.dtype))
                .view(piece.shape),
            )
            for part, start in zip(cargo.parts, starts, strict=False)
            for piece in part.pieces
            if piece.num_bytes
        ]


def _starts(parts: tuple[Part, ...]) -> list[int]:
    """Where each part begins in the block, and where the last ends."""
    starts = [0]
    for part in parts:
        starts.append(-(-(starts[-1] + _end(part)) // 64) * 64)
    return starts


def _end(part: Part) -> int:
    return max([0, *(piece.offset + piece.num_bytes for piece in part.pieces)])


@contextmanager
def shared_by_name() -> Iterator[None]:
    """Torch shares memory by name meanwhile; what strategy it has is the whole process's."""
    before = multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]


def _serialized(named: list[tuple[str, Tensor]]) -> str:
    told = io.BytesIO()
    ForkingPickler(told).dump(named)
    return base64.b64encode(told.getvalue()).decode()
