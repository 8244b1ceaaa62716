"""The shards of one owner, the memory under each, and whether somebody looks at it.

    HELD --freed--> gone
    HELD --freed, while somebody looks at it--> RETAINED --the last look has ended--> gone

Owns that table, and the lock of a store. Somebody looks at a shard as long as the array lives that
was made of it here, or as long as a peer has it pinned. Invariants: one that is retained is missing
for everybody who asks, and its memory is not used again before the last has looked; the lock is
held for dictionary operations, STRETCH shards at a time, and no memory is freed under it. Any
thread; driven by store.py, and by pins.py for peers.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollmesh.core.errors import ShardMissing
from rollmesh.tensors.arena import Arena, Slot
from rollmesh.tensors.handles import Content
from rollmesh.tensors.ledger import Ledger

STRETCH = 64
"""Shards that are looked up or freed while others wait."""


class Kind(NamedTuple):
    """What a tensor is, without its bytes."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class Holding(msgspec.Struct, gc=False):
    """One shard."""

    slot: Slot
    kind: Kind
    view: weakref.ref[NDArray[np.uint8]] | None = None
    """The array through which this process looks at it."""
    num_pins: int = 0
    """By peers."""

    def is_looked_at(self) -> bool:
        return self.num_pins > 0 or (self.view is not None and self.view() is not None)


class Holdings:
    """See the module; `lock` is open at each call, but for those that say otherwise."""

    def __init__(self, arena: Arena, ledger: Ledger) -> None:
        self.owner = ""
        """Where others reach it, once it is served."""
        self.lock = threading.Lock()
        self.ledger = ledger
        """Asked and changed with the lock held."""
        self.retained_bytes = 0
        self._arena = arena
        self._held: dict[int, Holding] = {}
        self._retained: dict[int, Holding] = {}
        self._ended: deque[int] = deque()
        """Shards whose views have ended. They end in any thread, also in one that has the lock, so
        it is only written down."""

    def enter(self, slots: Sequence[Slot], kinds: Sequence[Kind], step: int, now_s: float) -> range:
        """They are held; their ids. TensorError where `step` has ended."""
        held = [Holding(slot, kind) for slot, kind in zip(slots, kinds, strict=True)]
        sizes = [slot.num_bytes for slot in slots]
        with self.lock:
            ids = self.ledger.put(sizes, step, now_s)
            self._held.update(zip(ids, held, strict=True))
        return ids

    def read(self, shard_id: int) -> Content:
        """It, read-only, not copied; ShardMissing."""
        with self.lock:
            held = self.find(shard_id)
            array = held.view() if held.view is not None else None
            if array is None:
                array = self._arena.read_only(held.slot)
                held.view = weakref.ref(array, _noting(self._ended, shard_id))
            return Content(held.kind.dtype, held.kind.shape, array)

    def find(self, shard_id: int) -> Holding:
        """One that is held; ShardMissing. The lock is held."""
        if self.ledger.look(shard_id) is not None:
            raise self.missing(shard_id)
        return self._held[shard_id]

    def missing(self, shard_id: int) -> ShardMissing:
        """The error that says why it is not there. The lock is held."""
        return ShardMissing(shard_id, self.owner, self.ledger.look(shard_id) or "cleared")

    def unpinned(self, shard_id: int, number: int) -> Slot | None:
        """It has so many pins less; its slot, where nobody needs that any more. The lock is held,
        and whoever calls frees the slot when it is open."""
        held = self._held.get(shard_id) or self._retained[shard_id]
        held.num_pins -= number
        return self._let_go(shard_id)

    def free_slots(self, slots: Sequence[Slot | None]) -> None:
        """Nobody needs these any more."""
        self._arena.free(each for each in slots if each is not None)

    def free_all(self, choose: Callable[[], list[int]]) -> int:
        """Free what it chooses, with the lock held, until it chooses nothing; how many."""
        number = 0
        while some := self.free_some(choose):
            number += some
        return number

    def free_some(self, choose: Callable[[], list[int]]) -> int:
        """The same, once."""
        with self.lock:
            ids = choose()
            slots = [self._leave(each) for each in ids]
        self.free_slots(slots)
        return len(ids)

    def clear(self, shard_ids: Sequence[int]) -> int:
        """Free these; how many were there."""
        parts = (partial(self.ledger.clear, some) for some in stretches(shard_ids))
        return sum(self.free_some(choose) for choose in parts)

    def settle(self) -> None:
        """Free what was retained for views that have ended."""
        while self._ended:
            with self.lock:
                ended = [self._ended.popleft() for _ in range(min(len(self._ended), STRETCH))]
                slots = [self._let_go(each) for each in ended]
            self.free_slots(slots)

    def _leave(self, shard_id: int) -> Slot | None:
        """A freed one's slot; None where that is retained."""
        held = self._held.pop(shard_id)
        self._retained[shard_id] = held
        self.retained_bytes += held.slot.num_bytes
        return self._let_go(shard_id)

    def _let_go(self, shard_id: int) -> Slot | None:
        """The slot of one that was retained, and need not be any more."""
        held = self._retained.get(shard_id)
        if held is None or held.is_looked_at():
            return None
        del self._retained[shard_id]
        self.retained_bytes -= held.slot.num_bytes
        return held.slot


def stretches(shard_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """Them all, a few at a time."""
    return (shard_ids[at : at + STRETCH] for at in range(0, len(shard_ids), STRETCH))


def _noting(ended: deque[int], shard_id: int) -> Callable[[object], None]:
    return lambda _: ended.append(shard_id)
