"""What this process owns of the data plane: its shards, where they lie, and who looks at them.

    HELD --clear, end_step, expire--> freed
    HELD --the same, while somebody looks at it--> RETAINED --the last look has ended--> freed

Owns the ledger, the arena, and the pins. Somebody looks at a shard as long as the array lives that
`read` gave out, or whatever was made from it; a peer, as long as it has not unpinned what `places`
told it, or been dropped. Invariants: one that is retained is gone for everybody else, and its
memory is not used again before the last has looked; the budget bounds held and retained together;
a store's locks are held for dictionary operations, STRETCH shards at a time. Any thread; driven by
the plane of this process, and by server.py for others.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollmesh.core.clock import Clock
from rollmesh.core.errors import ShardMissing, StoreFull, TensorError
from rollmesh.tensors.arena import Arena, Slot
from rollmesh.tensors.handles import UNTAGGED, Content, RTensor, new_incarnation
from rollmesh.tensors.ledger import Ledger

STRETCH = 64
"""Shards that are looked up or freed while others wait."""


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How much an owner holds, and how long if nobody says that he needs it."""

    max_bytes: int
    """Of memory, whatever lies there."""
    lease_s: float = 3600.0
    """What was neither put nor renewed for so long is freed."""


class StorageStats(msgspec.Struct, frozen=True):
    """What a store holds."""

    num_tensors: int
    total_bytes: int
    """Of them."""
    retained_bytes: int
    """Of others, freed, that somebody still looks at."""
    bytes_by_step: dict[int, int]
    """Of them, by the step that took them or UNTAGGED."""
    backed_bytes: int
    """Memory that the store has of the system."""


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where a shard lies, for a process of this host that attaches to it."""

    path: str
    offset: int
    num_bytes: int


class _Held(msgspec.Struct, gc=False):
    slot: Slot
    dtype: str
    shape: tuple[int, ...]
    view: weakref.ref[NDArray[np.uint8]] | None = None
    """The array through which this process looks at it."""
    num_pins: int = 0
    """By peers."""

    def is_looked_at(self) -> bool:
        return self.num_pins > 0 or (self.view is not None and self.view() is not None)


class OwnerStore:
    """See the module."""

    def __init__(self, settings: StoreSettings, clock: Clock, arena: Arena | None = None) -> None:
        """In `arena`, or in one of its own in /dev/shm."""
        self.owner = ""
        """Where others reach it, once it is served."""
        self.incarnation = new_incarnation()
        self._clock = clock
        self._arena = arena or Arena(settings.max_bytes)
        self._ledger = Ledger(self.incarnation, settings.lease_s)
        self._held: dict[int, _Held] = {}
        self._retained: dict[int, _Held] = {}
        self._retained_bytes = 0
        self._pins: dict[str, dict[int, int]] = {}
        """How often each peer has pinned what."""
        self._ended: deque[int] = deque()
        """Shards whose views have ended. They end in any thread, also in one that has the lock, so
        it is only written down."""
        self._lock = threading.Lock()

    @property
    def folder(self) -> str:
        """Where processes of this host attach; '' where they cannot."""
        return str(self._arena.path.parent) if self._arena.path else ""

    def put(self, contents: Sequence[Content], step: int = UNTAGGED) -> list[RTensor]:
        """Copy them in, for `step` or for whoever takes them; their handles.

        StoreFull, and nothing is stored, where they do not fit; TensorError where `step` has ended.
        """
        slots = self._slots([each.data.nbytes for each in contents])
        ids: list[int] = []
        try:
            for slot, content in zip(slots, contents, strict=True):
                self._arena.write(slot, content.data)
            for start in range(0, len(slots), STRETCH):
                stop = start + STRETCH
                ids += self._enter(slots[start:stop], contents[start:stop], step)
        except BaseException:
            self.clear(ids)
            self._arena.free(slots[len(ids) :])
            raise
        return [
            RTensor(shard_id, self.owner, step, each.dtype, each.shape, each.data.nbytes)
            for shard_id, each in zip(ids, contents, strict=True)
        ]

    def take(self, shard_ids: Sequence[int], step: int) -> None:
        """They are freed when `step` ends. TensorError where it has; ShardMissing for the first
        that is not there, when all others are taken."""
        missing: list[int] = []
        for some in _stretches(shard_ids):
            with self._lock:
                missing += self._ledger.take(some, step)
        if missing:
            with self._lock:
                raise self._missing(missing[0])

    def read(self, shard_id: int) -> Content:
        """It, read-only, not copied; ShardMissing."""
        with self._lock:
            held = self._find(shard_id)
            array = held.view() if held.view is not None else None
            if array is None:
                array = self._arena.read_only(held.slot)
                held.view = weakref.ref(array, _noting(self._ended, shard_id))
            return Content(held.dtype, held.shape, array)

    def places(self, shard_ids: Sequence[int], peer: str) -> list[Place]:
        """Where they lie, each pinned for `peer` once for each time that it is named; ShardMissing
        for the first that is not there, and then none is pinned."""
        if self._arena.path is None:
            raise TensorError("what lies in private memory cannot be lent")
        path = str(self._arena.path)
        return [Place(path, each.offset, each.num_bytes) for each in self._pin(shard_ids, peer)]

    def windows(self, shard_ids: Sequence[int], peer: str) -> tuple[list[int], list[memoryview]]:
        """Their sizes, and their bytes in order in as few views as they lie side by side; pinned,
        and missing, as by `places`."""
        slots = self._pin(shard_ids, peer)
        return [each.num_bytes for each in slots], self._arena.readable(slots)

    def unpin(self, shard_ids: Sequence[int], peer: str) -> None:
        """`peer` looks at these no longer; what it has not pinned is passed over."""
        for some in _stretches(shard_ids):
            with self._lock:
                pins = self._pins.get(peer, {})
                slots = [self._unpinned(each, 1) for each in some if _took_one(pins, each)]
                if not pins:
                    self._pins.pop(peer, None)
            self._free(slots)

    def drop_peer(self, peer: str) -> None:
        """`peer` has gone, and looks at nothing."""
        with self._lock:
            pins = self._pins.pop(peer, {})
        for some in _stretches([*pins]):
            with self._lock:
                slots = [self._unpinned(each, pins[each]) for each in some]
            self._free(slots)

    def end_step(self, step: int) -> int:
        """Free what `step`, or one before it, took; how many shards. They are gone at once."""
        self._settle()
        with self._lock:
            self._ledger.end_step(step)
        return self._free_all(partial(self._ledger.reap, STRETCH))

    def clear(self, shard_ids: Sequence[int]) -> int:
        """Free these; how many were there."""
        self._settle()
        parts = (partial(self._ledger.clear, some) for some in _stretches(shard_ids))
        return sum(self._free_some(choose) for choose in parts)

    def renew(self) -> None:
        """Whoever needs what is held lives: its lease begins anew."""
        with self._lock:
            self._ledger.renew(self._clock.now_s())

    def expire(self) -> int:
        """Free what nobody renewed in time; how many shards."""
        self._settle()
        return self._free_all(partial(self._ledger.expire, self._clock.now_s(), STRETCH))

    def stats(self) -> StorageStats:
        """As of now."""
        self._settle()
        with self._lock:
            return StorageStats(
                self._ledger.num_tensors,
                self._ledger.total_bytes,
                self._retained_bytes,
                self._ledger.bytes_by_step,
                self._arena.backed_bytes,
            )

    def close(self) -> None:
        """Nobody attaches any more. What is looked at stays."""
        self._arena.close()

    def _slots(self, sizes: list[int]) -> list[Slot]:
        self._settle()
        try:
            return self._arena.allocate(sizes)
        except StoreFull as full:
            is_spent = full.held_bytes + full.wanted_bytes > full.max_bytes
            if not (is_spent and self._retained_bytes):
                raise
            why = f"{self._retained_bytes} of them freed and still looked at"
            spent = (full.wanted_bytes, full.held_bytes, full.max_bytes)
            raise StoreFull(*spent, why) from None

    def _enter(self, slots: list[Slot], contents: Sequence[Content], step: int) -> range:
        held = [
            _Held(slot, each.dtype, each.shape) for slot, each in zip(slots, contents, strict=True)
        ]
        sizes = [slot.num_bytes for slot in slots]
        with self._lock:
            ids = self._ledger.put(sizes, step, self._clock.now_s())
            self._held.update(zip(ids, held, strict=True))
        return ids

    def _find(self, shard_id: int) -> _Held:
        if self._ledger.look(shard_id) is not None:
            raise self._missing(shard_id)
        return self._held[shard_id]

    def _missing(self, shard_id: int) -> ShardMissing:
        return ShardMissing(shard_id, self.owner, self._ledger.look(shard_id) or "cleared")

    def _pin(self, shard_ids: Sequence[int], peer: str) -> list[Slot]:
        slots: list[Slot] = []
        try:
            for some in _stretches(shard_ids):
                with self._lock:
                    for shard_id in some:
                        slots.append(self._pinned(shard_id, peer))  # noqa: PERF401 - in case one fails
        except ShardMissing:
            self.unpin(shard_ids[: len(slots)], peer)
            raise
        return slots

    def _pinned(self, shard_id: int, peer: str) -> Slot:
        held = self._find(shard_id)
        held.num_pins += 1
        pins = self._pins.setdefault(peer, {})
        pins[shard_id] = pins.get(shard_id, 0) + 1
        return held.slot

    def _unpinned(self, shard_id: int, number: int) -> Slot | None:
        """Its slot, where nobody needs that any more."""
        held = self._held.get(shard_id) or self._retained[shard_id]
        held.num_pins -= number
        return self._let_go(shard_id)

    def _let_go(self, shard_id: int) -> Slot | None:
        """The slot of one that was retained, and need not be any more."""
        held = self._retained.get(shard_id)
        if held is None or held.is_looked_at():
            return None
        del self._retained[shard_id]
        self._retained_bytes -= held.slot.num_bytes
        return held.slot

    def _leave(self, shard_id: int) -> Slot | None:
        """A freed one's slot; None where that is retained."""
        held = self._held.pop(shard_id)
        self._retained[shard_id] = held
        self._retained_bytes += held.slot.num_bytes
        return self._let_go(shard_id)

    def _free_all(self, choose: Callable[[], list[int]]) -> int:
        """Free what it chooses, until it chooses nothing; how many."""
        number = 0
        while some := self._free_some(choose):
            number += some
        return number

    def _free_some(self, choose: Callable[[], list[int]]) -> int:
        with self._lock:
            ids = choose()
            slots = [self._leave(each) for each in ids]
        self._free(slots)
        return len(ids)

    def _settle(self) -> None:
        """Free what was retained for views that have ended."""
        while self._ended:
            with self._lock:
                ended = [self._ended.popleft() for _ in range(min(len(self._ended), STRETCH))]
                slots = [self._let_go(each) for each in ended]
            self._free(slots)

    def _free(self, slots: Sequence[Slot | None]) -> None:
        self._arena.free(each for each in slots if each is not None)


def _stretches(shard_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    return (shard_ids[at : at + STRETCH] for at in range(0, len(shard_ids), STRETCH))


def _noting(ended: deque[int], shard_id: int) -> Callable[[object], None]:
    return lambda _: ended.append(shard_id)


def _took_one(pins: dict[int, int], shard_id: int) -> bool:
    """Take one pin away; False where there is none."""
    number = pins.get(shard_id, 0)
    if number > 1:
        pins[shard_id] = number - 1
    elif number:
        del pins[shard_id]
    return number > 0
