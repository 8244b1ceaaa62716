"""Contents that are kept for their next use, counted by the memory that they hold.

Shards that were received into one block of memory hold all of it until the last of them goes, so
the block is what is counted, what is used and what is coldest. Owns the order of use. Invariants:
`total_bytes` is the memory that would be freed if all went; whoever takes a shard down gets what
was there, so that it is freed when he wishes. Not for threads; driven by the buffer, in its lock.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollmesh.tensors.handles import Content, RTensor


class _Block:
    """Memory, and the shards in it that are kept."""

    def __init__(self, memory: NDArray[np.generic]) -> None:
        self.memory = memory
        self.shard_ids: dict[int, None] = {}


class Kept(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One shard that is here."""

    content: Content
    step: int
    block: _Block


class Shelf:
    """See the module."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._kept: dict[int, Kept] = {}
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        """By the id of their memory, the longest unused first."""

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[int]:
        return iter(self._kept)

    def get(self, shard_id: int) -> Kept | None:
        """It, which is no use of it."""
        return self._kept.get(shard_id)

    def use(self, kept: Kept) -> Content:
        """Its content; now it is the warmest."""
        self._blocks.move_to_end(id(kept.block.memory))
        return kept.content

    def put(self, handle: RTensor, content: Content) -> None:
        """Keep it; it is not here yet."""
        memory = memory_of(content)
        block = self._blocks.get(id(memory))
        if block is None:
            block = self._blocks[id(memory)] = _Block(memory)
            self.total_bytes += memory.nbytes
        block.shard_ids[handle.shard_id] = None
        self._kept[handle.shard_id] = Kept(content, handle.step, block)

    def take_down(self, shard_id: int) -> Kept:
        """Keep it no longer; it is here."""
        kept = self._kept.pop(shard_id)
        block = kept.block
        del block.shard_ids[shard_id]
        if not block.shard_ids:
            del self._blocks[id(block.memory)]
            self.total_bytes -= block.memory.nbytes
        return kept

    def coldest(self, num: int) -> list[int]:
        """Up to `num` shards of the block that was not used for longest."""
        for block in self._blocks.values():
            return [*islice(block.shard_ids, num)]
        return []


def memory_of(content: Content) -> NDArray[np.generic]:
    """The array that has the bytes: one that is a part of another keeps all of that alive."""
    base = content.data.base
    return base if isinstance(base, np.ndarray) else content.data
