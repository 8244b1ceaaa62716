"""Memory of a store that is being written to, and is shards once all of it was.

    OPEN --commit--> COMMITTED: shards like any others
    OPEN --its `with` ends, however--> CANCELLED: the memory is free again

Owns the slots until then. Invariants: nobody but who reserved them sees them before the commit, and
he writes there no more after it; nothing is left of one that was not committed. One thread; driven
by store.py for whoever makes what he stores in the place where it will lie.
"""

import enum
from collections.abc import Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rollmesh.core.clock import Clock
from rollmesh.tensors.arena import Arena, Slot
from rollmesh.tensors.handles import UNTAGGED, RTensor
from rollmesh.tensors.holdings import STRETCH, Holdings, Kind


class State(enum.Enum):
    """Drawn in the module's docstring."""

    OPEN = "open"
    COMMITTED = "committed"
    CANCELLED = "cancelled"


class Reserved:
    """See the module."""

    def __init__(
        self,
        slots: list[Slot],
        kinds: Sequence[Kind],
        parts: tuple[Arena, Holdings, Clock],
    ) -> None:
        """`parts` are the store's."""
        self.slots = slots
        self._kinds = kinds
        self._arena, self._holdings, self._clock = parts
        self._state = State.OPEN

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._state is State.OPEN:
            self._state = State.CANCELLED
            self._arena.free(self.slots)

    @property
    def memory(self) -> list[NDArray[np.uint8]]:
        """uint8 [num_bytes] of each, to be written to until the commit."""
        assert self._state is State.OPEN, self._state
        return [self._arena.view(slot) for slot in self.slots]

    def commit(self, step: int = UNTAGGED) -> list[RTensor]:
        """They are shards, of `step` or of whoever takes them; their handles. TensorError, and none
        is, where `step` has ended."""
        assert self._state is State.OPEN, self._state
        ids: list[int] = []
        try:
            for start in range(0, len(self.slots), STRETCH):
                some = slice(start, start + STRETCH)
                slots, kinds = self.slots[some], self._kinds[some]
                ids += self._holdings.enter(slots, kinds, step, self._clock.now_s())
        except BaseException:
            self._holdings.clear(ids)
            self.slots = self.slots[len(ids) :]
            raise
        self._state = State.COMMITTED
        owner = self._holdings.owner
        return [
            RTensor(shard_id, owner, step, *kind)
            for shard_id, kind in zip(ids, self._kinds, strict=True)
        ]
