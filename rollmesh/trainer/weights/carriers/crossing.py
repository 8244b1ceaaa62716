"""What the ferry does: broadcasts weights from where ranks laid them, or shares them as torch does.

Owns the group, of which it is rank 0, and its store; and a copy for engines that take torch's own
shared memory. Invariant: on a CPU a broadcast copies nothing, it reads the shared memory. Driven by
ferry_process.py.
"""

import mmap
import os

import torch

from rollmesh.core.process import die_with_parent
from rollmesh.engine.embedded.groups import GroupShape, WeightGroup, open_store
from rollmesh.engine.in_memory import Part
from rollmesh.trainer.weights.carriers.ferry import Command, Done, Meet, Open, Send, Share
from rollmesh.trainer.weights.carriers.sglang_memory import SglangMemory


class Crossing:
    """See the module; every command blocks."""

    def __init__(self) -> None:
        self._open: Open | None = None
        self._group: WeightGroup | None = None
        self._memory: SglangMemory | None = None

    def do(self, command: Command) -> Done:
        """EngineUnavailable, or what torch raises, where it cannot be done."""
        match command:
            case Open(host=host, size=size, timeout_s=timeout_s):
                die_with_parent()  # a collective does not look at its input
                self._open, self._group = command, None
                self._store = open_store(host, size, timeout_s)
                return Done(self._store.port)
            case Meet():
                assert self._open
                shape = GroupShape(self._open.name, self._open.backend, self._open.timeout_s)
                self._group = WeightGroup(self._store, 0, self._open.size, shape)
            case Send(parts):
                for part in parts:
                    self._send(part)
            case Share(cargo, num_ranks):
                self._memory = self._memory or SglangMemory()
                return Done(told=self._memory.told(cargo, num_ranks))
        return Done()

    def close(self) -> None:
        """There are no more commands."""
        if self._memory:
            self._memory.close()

    def _send(self, part: Part) -> None:
        assert self._group
        descriptor = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
        try:  # copy on write: torch wants memory that can be written to, and nothing is
            memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        for piece in part.pieces:
            kind = getattr(torch, piece.dtype)
            count = piece.num_bytes // kind.itemsize
            flat = torch.frombuffer(memory, dtype=kind, count=count, offset=piece.offset)
            self._group.broadcast(flat.to(self._group.device))
