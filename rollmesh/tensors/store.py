"""The shards of one owner, the memory under each, and whether somebody looks at it.

    HELD --freed--> gone
    HELD --freed, while somebody looks at it--> RETAINED --the last look has ended--> gone

Owns that table, and the lock of a store. Somebody looks at a shard as long as the array lives that
was made of it here, or as long as a peer has it pinned. Invariants: one that is retained is missing
for everybody who asks, and its memory is not used again before the last has looked; the lock is
held for dictionary operations, CHUNK shards at a time, and no memory is freed under it. Any
thread; driven by store.py, and by pins.py for peers.

Memory of a store that is being written to, and is shards once all of it was.

    OPEN --commit--> COMMITTED: shards like any others
    OPEN --its `with` ends, however--> CANCELLED: the memory is free again

Owns the slots until then. Invariants: nobody but who reserved them sees them before the commit, and
he writes there no more after it; nothing is left of one that was not committed. One thread; driven
by store.py for whoever makes what he stores in the place where it will lie.

What peers look at: shards of an owner that are lent to them, or are on their way into a socket.

    held --places, windows--> PINNED --unpin, as often; drop_peer--> held, or freed by then

Owns who has pinned what, and how often. Invariants: what is pinned keeps its memory, also after it
was freed; a peer takes back its own pins alone, and one that has gone has none. Any thread; driven
by guest.py.

What this process owns of the data plane: its shards, from their putting to their end.

Owns the arena in which they lie, the table of whose they are, the table of who looks at them
(shards.py), and what peers have pinned (pins.py). Invariants: the budget bounds what is held and
what is retained together; a put or a commit stores all or nothing; a store's locks are held for
dictionary operations, CHUNK shards at a time. Any thread; driven by the plane of this process, by
server.py for others, and by whoever makes batches.
"""

import enum
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollmesh.core.clock import Clock
from rollmesh.core.errors import ShardMissing, StoreFull, TensorError
from rollmesh.tensors.arena import Arena, ArenaSlot
from rollmesh.tensors.handles import UNTAGGED, Content, RTensor, new_incarnation
from rollmesh.tensors.segment import SharedRange
from rollmesh.tensors.shard_table import ShardTable

CHUNK = 64
"""Shards that are looked up or freed while others wait."""


class ShardSpec(NamedTuple):
    """What a tensor is, without its bytes."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class HeldShard(msgspec.Struct, gc=False):
    """One shard."""

    slot: ArenaSlot
    kind: ShardSpec
    view: weakref.ref[NDArray[np.uint8]] | None = None
    """The array through which this process looks at it."""
    num_pins: int = 0
    """By peers."""

    def is_in_use(self) -> bool:
        return self.num_pins > 0 or (self.view is not None and self.view() is not None)


class HeldShards:
    """See the module; `lock` is open at each call, but for those that say otherwise."""

    def __init__(self, arena: Arena, table: ShardTable) -> None:
        self.owner = ""
        """Where others reach it, once it is served."""
        self.lock = threading.Lock()
        self.table = table
        """Asked and changed with the lock held."""
        self.retained_bytes = 0
        self._arena = arena
        self._held: dict[int, HeldShard] = {}
        self._retained: dict[int, HeldShard] = {}
        self._ended: deque[int] = deque()
        """Shards whose views have ended. They end in any thread, also in one that has the lock, so
        it is only written down."""

    def add(
        self, slots: Sequence[ArenaSlot], kinds: Sequence[ShardSpec], step: int, now_s: float
    ) -> range:
        """They are held; their ids. TensorError where `step` has ended."""
        held = [HeldShard(slot, kind) for slot, kind in zip(slots, kinds, strict=True)]
        sizes = [slot.num_bytes for slot in slots]
        with self.lock:
            ids = self.table.put(sizes, step, now_s)
            self._held.update(zip(ids, held, strict=True))
        return ids

    def read(self, shard_id: int) -> Content:
        """It, read-only, not copied; ShardMissing."""
        with self.lock:
            held = self.find(shard_id)
            array = held.view() if held.view is not None else None
            if array is None:
                array = self._arena.read_only(held.slot)
                held.view = weakref.ref(array, _append_to(self._ended, shard_id))
            return Content(held.kind.dtype, held.kind.shape, array)

    def find(self, shard_id: int) -> HeldShard:
        """One that is held; ShardMissing. The lock is held."""
        if self.table.missing_reason(shard_id) is not None:
            raise self.missing(shard_id)
        return self._held[shard_id]

    def missing(self, shard_id: int) -> ShardMissing:
        """The error that says why it is not there. The lock is held."""
        return ShardMissing(shard_id, self.owner, self.table.missing_reason(shard_id) or "cleared")

    def unpin(self, shard_id: int, number: int) -> ArenaSlot | None:
        """It has so many pins less; its slot, where nobody needs that any more. The lock is held,
        and whoever calls frees the slot when it is open."""
        held = self._held.get(shard_id) or self._retained[shard_id]
        held.num_pins -= number
        return self._release(shard_id)

    def free_slots(self, slots: Sequence[ArenaSlot | None]) -> None:
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
            slots = [self._retire(each) for each in ids]
        self.free_slots(slots)
        return len(ids)

    def clear(self, shard_ids: Sequence[int]) -> int:
        """Free these; how many were there."""
        parts = (partial(self.table.clear, some) for some in chunks(shard_ids))
        return sum(self.free_some(choose) for choose in parts)

    def settle(self) -> None:
        """Free what was retained for views that have ended."""
        while self._ended:
            with self.lock:
                ended = [self._ended.popleft() for _ in range(min(len(self._ended), CHUNK))]
                slots = [self._release(each) for each in ended]
            self.free_slots(slots)

    def _retire(self, shard_id: int) -> ArenaSlot | None:
        """A freed one's slot; None where that is retained."""
        held = self._held.pop(shard_id)
        self._retained[shard_id] = held
        self.retained_bytes += held.slot.num_bytes
        return self._release(shard_id)

    def _release(self, shard_id: int) -> ArenaSlot | None:
        """The slot of one that was retained, and need not be any more."""
        held = self._retained.get(shard_id)
        if held is None or held.is_in_use():
            return None
        del self._retained[shard_id]
        self.retained_bytes -= held.slot.num_bytes
        return held.slot


def chunks(shard_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """Them all, a few at a time."""
    return (shard_ids[at : at + CHUNK] for at in range(0, len(shard_ids), CHUNK))


def _append_to(ended: deque[int], shard_id: int) -> Callable[[object], None]:
    return lambda _: ended.append(shard_id)


class ReservationState(enum.Enum):
    """Drawn in the module's docstring."""

    OPEN = "open"
    COMMITTED = "committed"
    CANCELLED = "cancelled"


class Reservation:
    """See the module."""

    def __init__(
        self,
        slots: list[ArenaSlot],
        kinds: Sequence[ShardSpec],
        parts: tuple[Arena, HeldShards, Clock],
    ) -> None:
        """`parts` are the store's."""
        self.slots = slots
        self._kinds = kinds
        self._arena, self._shards, self._clock = parts
        self._state = ReservationState.OPEN

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._state is ReservationState.OPEN:
            self._state = ReservationState.CANCELLED
            self._arena.free(self.slots)

    @property
    def memory(self) -> list[NDArray[np.uint8]]:
        """uint8 [num_bytes] of each, to be written to until the commit."""
        assert self._state is ReservationState.OPEN, self._state
        return [self._arena.view(slot) for slot in self.slots]

    def commit(self, step: int = UNTAGGED) -> list[RTensor]:
        """They are shards, of `step` or of whoever takes them; their handles. TensorError, and none
        is, where `step` has ended."""
        assert self._state is ReservationState.OPEN, self._state
        ids: list[int] = []
        try:
            for start in range(0, len(self.slots), CHUNK):
                some = slice(start, start + CHUNK)
                slots, kinds = self.slots[some], self._kinds[some]
                ids += self._shards.add(slots, kinds, step, self._clock.now_s())
        except BaseException:
            self._shards.clear(ids)
            self.slots = self.slots[len(ids) :]
            raise
        self._state = ReservationState.COMMITTED
        owner = self._shards.owner
        return [
            RTensor(shard_id, owner, step, *kind)
            for shard_id, kind in zip(ids, self._kinds, strict=True)
        ]


class Pins:
    """See the module; of one store."""

    def __init__(self, shards: HeldShards, arena: Arena) -> None:
        self._shards = shards
        self._arena = arena
        self._pins: dict[str, dict[int, int]] = {}
        """How often each peer has pinned what; changed under the lock of the shards."""

    def places(self, shard_ids: Sequence[int], peer: str) -> list[SharedRange]:
        """Where they lie, each pinned for `peer` once for each time that it is named; ShardMissing
        for the first that is not there, and then none is pinned."""
        if self._arena.path is None:
            raise TensorError("what lies in private memory cannot be lent")
        path = str(self._arena.path)
        return [
            SharedRange(path, each.offset, each.num_bytes) for each in self._pin(shard_ids, peer)
        ]

    def windows(self, shard_ids: Sequence[int], peer: str) -> tuple[list[int], list[memoryview]]:
        """Their sizes, and their bytes in order in as few views as they lie side by side; pinned,
        and missing, as by `places`."""
        slots = self._pin(shard_ids, peer)
        return [each.num_bytes for each in slots], self._arena.readable(slots)

    def unpin(self, shard_ids: Sequence[int], peer: str) -> None:
        """`peer` looks at these no longer; what it has not pinned is passed over."""
        for some in chunks(shard_ids):
            with self._shards.lock:
                pins = self._pins.get(peer, {})
                slots = [self._shards.unpin(each, 1) for each in some if _remove_pin(pins, each)]
            self._shards.free_slots(slots)

    def drop_peer(self, peer: str) -> None:
        """`peer` has gone, and looks at nothing."""
        with self._shards.lock:
            pins = self._pins.pop(peer, {})
        for some in chunks([*pins]):
            with self._shards.lock:
                slots = [self._shards.unpin(each, pins[each]) for each in some]
            self._shards.free_slots(slots)

    def _pin(self, shard_ids: Sequence[int], peer: str) -> list[ArenaSlot]:
        slots: list[ArenaSlot] = []
        try:
            for some in chunks(shard_ids):
                with self._shards.lock:
                    for shard_id in some:
                        slots.append(self._pinned(shard_id, peer))  # noqa: PERF401 - in case one fails
        except ShardMissing:
            self.unpin(shard_ids[: len(slots)], peer)
            raise
        return slots

    def _pinned(self, shard_id: int, peer: str) -> ArenaSlot:
        held = self._shards.find(shard_id)
        held.num_pins += 1
        pins = self._pins.setdefault(peer, {})
        pins[shard_id] = pins.get(shard_id, 0) + 1
        return held.slot


def _remove_pin(pins: dict[int, int], shard_id: int) -> bool:
    """Take one pin away; False where there is none."""
    number = pins.get(shard_id, 0)
    if number > 1:
        pins[shard_id] = number - 1
    elif number:
        del pins[shard_id]
    return number > 0


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


class OwnerStore:
    """See the module."""

    def __init__(self, settings: StoreSettings, clock: Clock, arena: Arena | None = None) -> None:
        """In `arena`, or in one of its own in /dev/shm."""
        self.incarnation = new_incarnation()
        self._clock = clock
        self._arena = arena or Arena(settings.max_bytes)
        self._table = ShardTable(self.incarnation, settings.lease_s)
        self._shards = HeldShards(self._arena, self._table)
        self.pins = Pins(self._shards, self._arena)
        """What peers do with it."""

    @property
    def owner(self) -> str:
        """Where others reach it, once it is served."""
        return self._shards.owner

    @owner.setter
    def owner(self, address: str) -> None:
        self._shards.owner = address

    @property
    def folder(self) -> str:
        """Where processes of this host attach; '' where they cannot."""
        return str(self._arena.path.parent) if self._arena.path else ""

    def put(self, contents: Sequence[Content], step: int = UNTAGGED) -> list[RTensor]:
        """Copy them in, for `step` or for whoever takes them; their handles.

        StoreFull, and nothing is stored, where they do not fit; TensorError where `step` has ended.
        """
        kinds = [ShardSpec(each.dtype, each.shape, each.data.nbytes) for each in contents]
        with self.reserve(kinds) as reserved:
            for slot, content in zip(reserved.slots, contents, strict=True):
                self._arena.write(slot, content.data)
            return reserved.commit(step)

    def reserve(self, kinds: Sequence[ShardSpec]) -> Reservation:
        """Memory for such shards, side by side, to be written to and committed in its `with`, so
        that they are made where they will lie; StoreFull where they do not fit."""
        slots = self._slots([each.num_bytes for each in kinds])
        return Reservation(slots, kinds, (self._arena, self._shards, self._clock))

    def take(self, shard_ids: Sequence[int], step: int) -> None:
        """They are freed when `step` ends. TensorError where it has; ShardMissing for the first
        that is not there, when all others are taken."""
        missing: list[int] = []
        for some in chunks(shard_ids):
            with self._shards.lock:
                missing += self._table.take(some, step)
        if missing:
            with self._shards.lock:
                raise self._shards.missing(missing[0])

    def read(self, shard_id: int) -> Content:
        """It, read-only, not copied; ShardMissing. It is looked at for as long as its array, or
        what was made from that, lives."""
        return self._shards.read(shard_id)

    def end_step(self, step: int) -> int:
        """Free what `step`, or one before it, took; how many shards. They are gone at once."""
        self._shards.settle()
        with self._shards.lock:
            self._table.end_step(step)
        return self._shards.free_all(partial(self._table.reap, CHUNK))

    def clear(self, shard_ids: Sequence[int]) -> int:
        """Free these; how many were there."""
        self._shards.settle()
        return self._shards.clear(shard_ids)

    def renew(self) -> None:
        """Whoever needs what is held lives: its lease begins anew."""
        with self._shards.lock:
            self._table.renew(self._clock.now_s())

    def expire(self) -> int:
        """Free what nobody renewed in time; how many shards."""
        self._shards.settle()
        return self._shards.free_all(partial(self._table.expire, self._clock.now_s(), CHUNK))

    def stats(self) -> StorageStats:
        """As of now."""
        self._shards.settle()
        with self._shards.lock:
            return StorageStats(
                self._table.num_tensors,
                self._table.total_bytes,
                self._shards.retained_bytes,
                self._table.bytes_by_step,
                self._arena.backed_bytes,
            )

    def close(self) -> None:
        """Nobody attaches any more. What is looked at stays."""
        self._arena.close()

    def _slots(self, sizes: list[int]) -> list[ArenaSlot]:
        self._shards.settle()
        try:
            return self._arena.allocate(sizes)
        except StoreFull as full:
            retained_bytes = self._shards.retained_bytes
            is_spent = full.held_bytes + full.wanted_bytes > full.max_bytes
            if not (is_spent and retained_bytes):
                raise
            why = f"{retained_bytes} of them freed and still looked at"
            spent = (full.wanted_bytes, full.held_bytes, full.max_bytes)
            raise StoreFull(*spent, why) from None
