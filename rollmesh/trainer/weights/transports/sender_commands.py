"""Commands of the sender process that need torch: broadcast parts, or share them as torch does.

- The process is rank 0 of the group and hosts its store. On a CPU a broadcast copies nothing: it
  reads the shared memory.
- SGLang's `update_weights_from_tensor` takes pickles: base64 of torch's reducers for (name, tensor)
  pairs (MultiprocessingSerializer, sglang/srt/utils/common.py). They contain names of shared memory
  and no weights; this module writes them and never reads one.
- Torch shares memory by name ("file_system"): its other strategy passes descriptors, which needs a
  key that only SGLang's own processes have, and SGLang's scheduler exits without it.
"""

import base64
import io
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler

import psutil
import torch
from torch import Tensor, multiprocessing

from rollmesh.core.process import die_with_parent
from rollmesh.engine.embedded.weight_group import GroupShape, WeightGroup, open_store
from rollmesh.engine.shared_memory import SharedSegment
from rollmesh.tensors.segment import AttachedSegment
from rollmesh.trainer.weights.transports.sender import (
    BroadcastParts,
    CommandDone,
    JoinGroup,
    OpenGroup,
    SenderCommand,
    ShareParts,
)


class CommandRunner:
    """Carries out commands; every one blocks."""

    def __init__(self) -> None:
        self._open: OpenGroup | None = None
        self._group: WeightGroup | None = None
        self._memory: SglangMemory | None = None

    def do(self, command: SenderCommand) -> CommandDone:
        """Run one command; EngineUnavailable or torch's errors if it fails."""
        match command:
            case OpenGroup(host=host, size=size, timeout_s=timeout_s):
                die_with_parent()  # a collective does not notice that standard input has closed
                self._open, self._group = command, None
                self._store = open_store(host, size, timeout_s)
                return CommandDone(self._store.port)
            case JoinGroup():
                assert self._open
                shape = GroupShape(self._open.name, self._open.backend, self._open.timeout_s)
                self._group = WeightGroup(self._store, 0, self._open.size, shape)
            case BroadcastParts(parts):
                for part in parts:
                    self._broadcast(part)
            case ShareParts(policy_version, parts, num_ranks):
                self._memory = self._memory or SglangMemory()
                shared = self._memory.share(policy_version, parts, num_ranks)
                return CommandDone(serialized=shared)
        return CommandDone()

    def close(self) -> None:
        """Release the shared copy."""
        if self._memory:
            self._memory.close()

    def _broadcast(self, part: SharedSegment) -> None:
        assert self._group
        descriptor = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
        try:  # copy on write: torch needs writable memory, although nothing writes to it
            memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        for piece in part.pieces:
            kind = getattr(torch, piece.dtype)
            count = piece.num_bytes // kind.itemsize
            flat = torch.frombuffer(memory, dtype=kind, count=count, offset=piece.offset)
            self._group.broadcast(flat.to(self._group.device))


MANAGER = "torch_shm_manager"


class SglangMemory:
    """A copy of the weights in torch's shared memory, reused for every version."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._policy_version = -1

    def share(
        self, policy_version: int, parts: tuple[SharedSegment, ...], num_ranks: int
    ) -> tuple[str, ...]:
        """Return one serialization for each rank: every rank opens the memory by itself."""
        named = self._copy(policy_version, parts)
        with shared_by_name():
            return tuple([_serialize(named) for _ in range(num_ranks)])

    def close(self) -> None:
        """Release the copy and then end the `torch_shm_manager` that torch started for it: the
        reverse order would end this process, and without it the manager would outlive us."""
        self._block = torch.empty(0, dtype=torch.uint8)
        for child in psutil.Process().children():
            if child.name() == MANAGER:
                child.terminate()
                child.wait()

    def _copy(
        self, policy_version: int, parts: tuple[SharedSegment, ...]
    ) -> list[tuple[str, Tensor]]:
        starts = _starts(parts)
        if len(self._block) != starts[-1]:
            self._block = torch.empty(starts[-1], dtype=torch.uint8)
            self._policy_version = -1
        if self._policy_version != policy_version:
            with shared_by_name():
                self._block.share_memory_()  # type: ignore[no-untyped-call]
            for part, start in zip(parts, starts, strict=False):
                data = AttachedSegment(part.path).view(0, _end(part))
                self._block.numpy()[start : start + len(data)] = data
            self._policy_version = policy_version
        return [
            (
                piece.name,
                self._block[start + piece.offset : start + piece.offset + piece.num_bytes]
                .view(getattr(torch, piece.dtype))
                .view(piece.shape),
            )
            for part, start in zip(parts, starts, strict=False)
            for piece in part.pieces
            if piece.num_bytes
        ]


def _starts(parts: tuple[SharedSegment, ...]) -> list[int]:
    """Return the offset of each part in the block, and the total size."""
    starts = [0]
    for part in parts:
        starts.append(-(-(starts[-1] + _end(part)) // 64) * 64)
    return starts


def _end(part: SharedSegment) -> int:
    return max([0, *(piece.offset + piece.num_bytes for piece in part.pieces)])


@contextmanager
def shared_by_name() -> Iterator[None]:
    """Make torch share memory by name inside the block; the strategy is global to the process."""
    before = multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]


def _serialize(named: list[tuple[str, Tensor]]) -> str:
    pickled = io.BytesIO()
    ForkingPickler(pickled).dump(named)
    return base64.b64encode(pickled.getvalue()).decode()
