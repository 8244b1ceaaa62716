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


class OfStep(msgspec.Struct):
    """What is here of one step, or of none."""

    step: int
    ids: dict[int, None]
    num_bytes: int = 0


class Kept(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One shard that is here."""

    content: Content
    of_step: OfStep
    """It goes with the last of them, when no lock is held: that of 100,000 takes a millisecond."""


class Shelf:
    """See the module."""

    def __init__(self, max_bytes: int) -> None:
        self.total_bytes = 0
        self._max_bytes = max_bytes
        self._kept: OrderedDict[int, Kept] = OrderedDict()
        """The longest unused first."""
        self._steps: dict[int, OfStep] = {}
        self._sharers: dict[int, int] = {}
        """How many shards are kept of a block, by the block's id()."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes_by_step(self) -> dict[int, int]:
        """Of the shards themselves: what else a block holds is of no step."""
        return {step: each.num_bytes for step, each in self._steps.items()}

    @property
    def is_over(self) -> bool:
        """Whether something has to go; never because of one shard alone."""
        return self.total_bytes > self._max_bytes

    def use(self, shard_id: int) -> Content | None:
        """Its content, if it is here; now it is the newest in use."""
        kept = self._kept.get(shard_id)
        if kept is None:
            return None
        self._kept.move_to_end(shard_id)
        return kept.content

    def put(self, handle: RTensor, content: Content) -> None:
        """Keep it, which is not here yet, unless its memory alone is more than may be kept."""
        shard_id, step, num_bytes = handle.shard_id, handle.step, handle.num_bytes
        block = content.data.base
        if isinstance(block, np.ndarray):
            if block.nbytes > self._max_bytes:
                return
            self.total_bytes += self._shared(block)
        elif num_bytes > self._max_bytes:
            return
        else:
            self.total_bytes += num_bytes
        of_step = self._steps.get(step)
        if of_step is None:
            of_step = self._steps[step] = OfStep(step, {})
        of_step.ids[shard_id] = None
        of_step.num_bytes += num_bytes
        self._kept[shard_id] = Kept(content, of_step)

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
        for step, of_step in self._steps.items():
            if step <= last_step:
                # The newest, and popped: who looks for an end again and again walks over all gaps.
                shard_id, _ = of_step.ids.popitem()
                return self.take_down(shard_id)
        return None

    def _forget(self, shard_id: int, kept: Kept) -> None:
        data, of_step = kept.content.data, kept.of_step
        num_bytes = data.nbytes
        of_step.ids.pop(shard_id, None)
        of_step.num_bytes -= num_bytes
        if not of_step.ids:
            del self._steps[of_step.step]
        block = data.base
        self.total_bytes -= self._parted(block) if isinstance(block, np.ndarray) else num_bytes

    def _shared(self, block: NDArray[np.generic]) -> int:
        """One shard more is kept of it; the bytes that this adds."""
        num_sharers = self._sharers.get(id(block), 0)
        self._sharers[id(block)] = num_sharers + 1
        return 0 if num_sharers else block.nbytes

    def _parted(self, block: NDArray[np.generic]) -> int:
        """One less; the bytes that this frees."""
        num_sharers = self._sharers.pop(id(block)) - 1
        if num_sharers:
            self._sharers[id(block)] = num_sharers
        return 0 if num_sharers else block.nbytes
