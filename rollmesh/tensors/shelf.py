"""Contents that are kept for their next use, counted by the memory that they hold.

Owns the order of use, which shards each step has, and the count of bytes. Invariant: `total_bytes`
is the memory that would be freed if all went: a block that several shards were received into counts
whole, once, until the last of them goes. Each operation costs as much as the shards it names, and
whoever takes one down gets what was there, so that it is freed when he likes. Not for threads;
driven by the buffer, in its lock.
"""

from collections import OrderedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollmesh.tensors.handles import Content, RTensor


class Kept(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One shard that is here."""

    content: Content
    step: int


class Shelf:
    """See the module."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self._kept: OrderedDict[int, Kept] = OrderedDict()
        """The longest unused first."""
        self._steps: dict[int, dict[int, None]] = {}
        """Their ids, by step."""
        self._sharers: dict[int, int] = {}
        """How many shards are kept of a block, by the block's id()."""

    def __len__(self) -> int:
        return len(self._kept)

    def use(self, shard_id: int) -> Content | None:
        """Its content, if it is here; now it is the newest in use."""
        kept = self._kept.get(shard_id)
        if kept is None:
            return None
        self._kept.move_to_end(shard_id)
        return kept.content

    def put(self, handle: RTensor, content: Content) -> None:
        """Keep it; it is not here yet."""
        self._kept[handle.shard_id] = Kept(content, handle.step)
        self._steps.setdefault(handle.step, {})[handle.shard_id] = None
        memory = memory_of(content)
        if memory is not content.data:
            num_sharers = self._sharers.get(id(memory), 0)
            self._sharers[id(memory)] = num_sharers + 1
            if num_sharers:
                return
        self.total_bytes += memory.nbytes

    def take_down(self, shard_id: int) -> Kept | None:
        """Keep it no longer, if it is here."""
        kept = self._kept.pop(shard_id, None)
        if kept is not None:
            self._forget(shard_id, kept)
        return kept

    def take_down_coldest(self) -> Kept:
        """The one that was not used for longest; there is one."""
        shard_id, kept = self._kept.popitem(last=False)
        self._forget(shard_id, kept)
        return kept

    def take_down_ended(self, last_step: int) -> Kept | None:
        """One of the steps up to `last_step`, untagged ones among them, if one is here."""
        for step, shard_ids in self._steps.items():
            if step <= last_step:
                # The newest: whoever takes the oldest again and again walks over all the gaps.
                shard_id, _ = shard_ids.popitem()
                return self.take_down(shard_id)
        return None

    def _forget(self, shard_id: int, kept: Kept) -> None:
        of_step = self._steps[kept.step]
        of_step.pop(shard_id, None)
        if not of_step:
            del self._steps[kept.step]
        memory = memory_of(kept.content)
        if memory is not kept.content.data:
            num_sharers = self._sharers.pop(id(memory)) - 1
            if num_sharers:
                self._sharers[id(memory)] = num_sharers
                return
        self.total_bytes -= memory.nbytes


def memory_of(content: Content) -> NDArray[np.generic]:
    """The array that has the bytes: one that is a part of another keeps all of that alive."""
    base = content.data.base
    return base if isinstance(base, np.ndarray) else content.data
