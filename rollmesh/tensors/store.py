"""The shards that this process owns: memory, leases and pins, from put to free. From any thread.

    HELD --freed--> gone
    HELD --freed while in use--> RETAINED --the last use has ended--> gone

    reservation: OPEN --commit--> COMMITTED: shards like any others
                 OPEN --its `with` ends--> CANCELLED: the memory is free again

- A shard is in use while an array of it exists here, or while a peer has it pinned. A retained
  shard is missing for every request, and its memory is not reused yet.
- The budget bounds held and retained memory together. A put or commit stores all or nothing.
- The lock is held for dictionary operations on CHUNK shards at a time; no memory is freed under it.
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
"""Shards that are handled while the lock is held."""


class ShardSpec(NamedTuple):
    """The type of a tensor, without its bytes."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class HeldShard(msgspec.Struct, gc=False):
    """One shard."""

    slot: ArenaSlot
    kind: ShardSpec
    view: weakref.ref[NDArray[np.uint8]] | None = None
    """The array through which this process uses it."""
    num_pins: int = 0
    """Pins of peers."""

    def is_in_use(self) -> bool:
        return self.num_pins > 0 or (self.view is not None and self.view() is not None)


class HeldShards:
    """The table of held shards and their memory. The lock must be free at each call, unless the
    call says otherwise."""

    def __init__(self, arena: Arena, table: ShardTable) -> None:
        self.owner = ""
        """The address at which others reach the store, once it is served."""
        self.lock = threading.Lock()
        self.table = table
        """Used with the lock held."""
        self.retained_bytes = 0
        self._arena = arena
        self._held: dict[int, HeldShard] = {}
        self._retained: dict[int, HeldShard] = {}
        self._ended: deque[int] = deque()
        """Shards whose views have ended. They end in any thread, which may hold the lock, so the
        end is only recorded."""

    def add(
        self, slots: Sequence[ArenaSlot], kinds: Sequence[ShardSpec], step: int, now_s: float
    ) -> range:
        """Add shards; return their ids. TensorError if `step` has ended."""
        held = [HeldShard(slot, kind) for slot, kind in zip(slots, kinds, strict=True)]
        sizes = [slot.num_bytes for slot in slots]
        with self.lock:
            ids = self.table.put(sizes, step, now_s)
            self._held.update(zip(ids, held, strict=True))
        return ids

    def read(self, shard_id: int) -> Content:
        """Return the content, read-only and not copied; ShardMissing."""
        with self.lock:
            held = self.find(shard_id)
            array = held.view() if held.view is not None else None
            if array is None:
                array = self._arena.read_only(held.slot)
                held.view = weakref.ref(array, _append_to(self._ended, shard_id))
            return Content(held.kind.dtype, held.kind.shape, array)

    def find(self, shard_id: int) -> HeldShard:
        """Return a held shard; ShardMissing. The lock is held."""
        if self.table.missing_reason(shard_id) is not None:
            raise self.missing(shard_id)
        return self._held[shard_id]

    def missing(self, shard_id: int) -> ShardMissing:
        """Return the error for a missing shard. The lock is held."""
        return ShardMissing(shard_id, self.owner, self.table.missing_reason(shard_id) or "cleared")

    def unpin(self, shard_id: int, number: int) -> ArenaSlot | None:
        """Remove pins; return the slot if it is no longer needed, which the caller frees after
        releasing the lock. The lock is held."""
        held = self._held.get(shard_id) or self._retained[shard_id]
        held.num_pins -= number
        return self._release(shard_id)

    def free_slots(self, slots: Sequence[ArenaSlot | None]) -> None:
        """Free slots; None entries are skipped."""
        self._arena.free(each for each in slots if each is not None)

    def free_all(self, choose: Callable[[], list[int]]) -> int:
        """Repeat `free_some` until `choose` returns nothing; return the number freed."""
        number = 0
        while some := self.free_some(choose):
            number += some
        return number

    def free_some(self, choose: Callable[[], list[int]]) -> int:
        """Free what `choose` returns, which is called with the lock held; return the number."""
        with self.lock:
            ids = choose()
            slots = [self._retire(each) for each in ids]
        self.free_slots(slots)
        return len(ids)

    def clear(self, shard_ids: Sequence[int]) -> int:
        """Free these shards; return how many were held."""
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
        """Retain a freed shard; return its slot if it is not in use."""
        held = self._held.pop(shard_id)
        self._retained[shard_id] = held
        self.retained_bytes += held.slot.num_bytes
        return self._release(shard_id)

    def _release(self, shard_id: int) -> ArenaSlot | None:
        """Return the slot of a retained shard that is no longer in use."""
        held = self._retained.get(shard_id)
        if held is None or held.is_in_use():
            return None
        del self._retained[shard_id]
        self.retained_bytes -= held.slot.num_bytes
        return held.slot


def chunks(shard_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """Split into chunks."""
    return (shard_ids[at : at + CHUNK] for at in range(0, len(shard_ids), CHUNK))


def _append_to(ended: deque[int], shard_id: int) -> Callable[[object], None]:
    return lambda _: ended.append(shard_id)


class ReservationState(enum.Enum):
    """The states of a reservation; drawn in the module's docstring."""

    OPEN = "open"
    COMMITTED = "committed"
    CANCELLED = "cancelled"


class Reservation:
    """Memory that is written to first and then becomes shards; one thread. Nothing is left of one
    that was not committed."""

    def __init__(
        self,
        slots: list[ArenaSlot],
        kinds: Sequence[ShardSpec],
        parts: tuple[Arena, HeldShards, Clock],
    ) -> None:
        """`parts` belong to the store."""
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
        """Writable views, uint8 [num_bytes] each, until the commit."""
        assert self._state is ReservationState.OPEN, self._state
        return [self._arena.view(slot) for slot in self.slots]

    def commit(self, step: int = UNTAGGED) -> list[RTensor]:
        """Turn the memory into shards of `step`, or untagged; return the handles. TensorError, and
        nothing is stored, if `step` has ended."""
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
    """Pins of peers: shards that are lent to them or being sent. A peer removes its own pins
    only."""

    def __init__(self, shards: HeldShards, arena: Arena) -> None:
        self._shards = shards
        self._arena = arena
        self._pins: dict[str, dict[int, int]] = {}
        """By peer and shard: the number of pins. Changed under the lock of the shards."""

    def places(self, shard_ids: Sequence[int], peer: str) -> list[SharedRange]:
        """Return where the shards are, each pinned once for `peer`; ShardMissing for the first
        missing one, and then none is pinned."""
        if self._arena.path is None:
            raise TensorError("what lies in private memory cannot be lent")
        path = str(self._arena.path)
        return [
            SharedRange(path, each.offset, each.num_bytes) for each in self._pin(shard_ids, peer)
        ]

    def windows(self, shard_ids: Sequence[int], peer: str) -> tuple[list[int], list[memoryview]]:
        """Return the sizes, and the bytes in order in as few views as possible; pins and errors as
        in `places`."""
        slots = self._pin(shard_ids, peer)
        return [each.num_bytes for each in slots], self._arena.readable(slots)

    def unpin(self, shard_ids: Sequence[int], peer: str) -> None:
        """Remove pins of `peer`; shards that it has not pinned are ignored."""
        for some in chunks(shard_ids):
            with self._shards.lock:
                pins = self._pins.get(peer, {})
                slots = [self._shards.unpin(each, 1) for each in some if _remove_pin(pins, each)]
            self._shards.free_slots(slots)

    def drop_peer(self, peer: str) -> None:
        """Remove all pins of a peer that is gone."""
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
    """Remove one pin; return whether there was one."""
    number = pins.get(shard_id, 0)
    if number > 1:
        pins[shard_id] = number - 1
    elif number:
        del pins[shard_id]
    return number > 0


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity and lease of a store."""

    max_bytes: int
    """Budget of memory."""
    lease_s: float = 3600.0
    """Shards that were neither put nor renewed for so long are freed."""


class StorageStats(msgspec.Struct, frozen=True):
    """Counts and sizes of the tensors in a store."""

    num_tensors: int
    total_bytes: int
    """Bytes of held shards."""
    retained_bytes: int
    """Bytes of freed shards that are still in use."""
    bytes_by_step: dict[int, int]
    """Held bytes, by the step that took them or UNTAGGED."""
    backed_bytes: int
    """Memory allocated from the system."""


class OwnerStore:
    """The store of an owner process."""

    def __init__(self, settings: StoreSettings, clock: Clock, arena: Arena | None = None) -> None:
        """Use `arena`, or a new one in /dev/shm."""
        self.incarnation = new_incarnation()
        self._clock = clock
        self._arena = arena or Arena(settings.max_bytes)
        self._table = ShardTable(self.incarnation, settings.lease_s)
        self._shards = HeldShards(self._arena, self._table)
        self.pins = Pins(self._shards, self._arena)
        """The pins of peers."""

    @property
    def owner(self) -> str:
        """The address at which others reach the store, once it is served."""
        return self._shards.owner

    @owner.setter
    def owner(self, address: str) -> None:
        self._shards.owner = address

    @property
    def folder(self) -> str:
        """The folder in which processes of this host attach; '' if they cannot."""
        return str(self._arena.path.parent) if self._arena.path else ""

    def put(self, contents: Sequence[Content], step: int = UNTAGGED) -> list[RTensor]:
        """Copy contents in, for `step` or untagged; return their handles.

        StoreFull, and nothing is stored, if they do not fit; TensorError if `step` has ended.
        """
        kinds = [ShardSpec(each.dtype, each.shape, each.data.nbytes) for each in contents]
        with self.reserve(kinds) as reserved:
            for slot, content in zip(reserved.slots, contents, strict=True):
                self._arena.write(slot, content.data)
            return reserved.commit(step)

    def reserve(self, kinds: Sequence[ShardSpec]) -> Reservation:
        """Reserve adjacent memory for shards that are then written in place and committed inside
        `with`; StoreFull if they do not fit."""
        slots = self._slots([each.num_bytes for each in kinds])
        return Reservation(slots, kinds, (self._arena, self._shards, self._clock))

    def take(self, shard_ids: Sequence[int], step: int) -> None:
        """Assign shards to `step`, whose end frees them. TensorError if it has ended; ShardMissing
        for the first missing one, after all others are taken."""
        missing: list[int] = []
        for some in chunks(shard_ids):
            with self._shards.lock:
                missing += self._table.take(some, step)
        if missing:
            with self._shards.lock:
                raise self._shards.missing(missing[0])

    def read(self, shard_id: int) -> Content:
        """Return the content, read-only and not copied; ShardMissing. The shard is in use as long
        as the array, or one derived from it, exists."""
        return self._shards.read(shard_id)

    def end_step(self, step: int) -> int:
        """Free what `step`, or one before it, took; return how many shards. They are missing at
        once."""
        self._shards.settle()
        with self._shards.lock:
            self._table.end_step(step)
        return self._shards.free_all(partial(self._table.reap, CHUNK))

    def clear(self, shard_ids: Sequence[int]) -> int:
        """Free these shards; return how many were held."""
        self._shards.settle()
        return self._shards.clear(shard_ids)

    def renew(self) -> None:
        """Renew all leases: a user of the shards is alive."""
        with self._shards.lock:
            self._table.renew(self._clock.now_s())

    def expire(self) -> int:
        """Free shards whose lease has expired; return how many."""
        self._shards.settle()
        return self._shards.free_all(partial(self._table.expire, self._clock.now_s(), CHUNK))

    def stats(self) -> StorageStats:
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
        """Remove the shared memory's name; shards in use stay."""
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
