"""What this process owns of the data plane: its shards, from their putting to their end.

Owns the arena in which they lie, the ledger of whose they are, the table of who looks at them
(holdings.py), and what peers have pinned (pins.py). Invariants: the budget bounds what is held and
what is retained together; a put or a commit stores all or nothing; a store's locks are held for
dictionary operations, STRETCH shards at a time. Any thread; driven by the plane of this process, by
server.py for others, and by whoever makes batches.
"""

from collections.abc import Sequence
from functools import partial

import msgspec

from rollmesh.core.clock import Clock
from rollmesh.core.errors import StoreFull
from rollmesh.tensors.arena import Arena, Slot
from rollmesh.tensors.handles import UNTAGGED, Content, RTensor, new_incarnation
from rollmesh.tensors.holdings import STRETCH, Holdings, Kind, stretches
from rollmesh.tensors.ledger import Ledger
from rollmesh.tensors.pins import Pins
from rollmesh.tensors.reserved import Reserved


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
        self._ledger = Ledger(self.incarnation, settings.lease_s)
        self._holdings = Holdings(self._arena, self._ledger)
        self.pins = Pins(self._holdings, self._arena)
        """What peers do with it."""

    @property
    def owner(self) -> str:
        """Where others reach it, once it is served."""
        return self._holdings.owner

    @owner.setter
    def owner(self, address: str) -> None:
        self._holdings.owner = address

    @property
    def folder(self) -> str:
        """Where processes of this host attach; '' where they cannot."""
        return str(self._arena.path.parent) if self._arena.path else ""

    def put(self, contents: Sequence[Content], step: int = UNTAGGED) -> list[RTensor]:
        """Copy them in, for `step` or for whoever takes them; their handles.

        StoreFull, and nothing is stored, where they do not fit; TensorError where `step` has ended.
        """
        kinds = [Kind(each.dtype, each.shape, each.data.nbytes) for each in contents]
        with self.reserve(kinds) as reserved:
            for slot, content in zip(reserved.slots, contents, strict=True):
                self._arena.write(slot, content.data)
            return reserved.commit(step)

    def reserve(self, kinds: Sequence[Kind]) -> Reserved:
        """Memory for such shards, side by side, to be written to and committed in its `with`, so
        that they are made where they will lie; StoreFull where they do not fit."""
        slots = self._slots([each.num_bytes for each in kinds])
        return Reserved(slots, kinds, (self._arena, self._holdings, self._clock))

    def take(self, shard_ids: Sequence[int], step: int) -> None:
        """They are freed when `step` ends. TensorError where it has; ShardMissing for the first
        that is not there, when all others are taken."""
        missing: list[int] = []
        for some in stretches(shard_ids):
            with self._holdings.lock:
                missing += self._ledger.take(some, step)
        if missing:
            with self._holdings.lock:
                raise self._holdings.missing(missing[0])

    def read(self, shard_id: int) -> Content:
        """It, read-only, not copied; ShardMissing. It is looked at for as long as its array, or
        what was made from that, lives."""
        return self._holdings.read(shard_id)

    def end_step(self, step: int) -> int:
        """Free what `step`, or one before it, took; how many shards. They are gone at once."""
        self._holdings.settle()
        with self._holdings.lock:
            self._ledger.end_step(step)
        return self._holdings.free_all(partial(self._ledger.reap, STRETCH))

    def clear(self, shard_ids: Sequence[int]) -> int:
        """Free these; how many were there."""
        self._holdings.settle()
        return self._holdings.clear(shard_ids)

    def renew(self) -> None:
        """Whoever needs what is held lives: its lease begins anew."""
        with self._holdings.lock:
            self._ledger.renew(self._clock.now_s())

    def expire(self) -> int:
        """Free what nobody renewed in time; how many shards."""
        self._holdings.settle()
        return self._holdings.free_all(partial(self._ledger.expire, self._clock.now_s(), STRETCH))

    def stats(self) -> StorageStats:
        """As of now."""
        self._holdings.settle()
        with self._holdings.lock:
            return StorageStats(
                self._ledger.num_tensors,
                self._ledger.total_bytes,
                self._holdings.retained_bytes,
                self._ledger.bytes_by_step,
                self._arena.backed_bytes,
            )

    def close(self) -> None:
        """Nobody attaches any more. What is looked at stays."""
        self._arena.close()

    def _slots(self, sizes: list[int]) -> list[Slot]:
        self._holdings.settle()
        try:
            return self._arena.allocate(sizes)
        except StoreFull as full:
            retained_bytes = self._holdings.retained_bytes
            is_spent = full.held_bytes + full.wanted_bytes > full.max_bytes
            if not (is_spent and retained_bytes):
                raise
            why = f"{retained_bytes} of them freed and still looked at"
            spent = (full.wanted_bytes, full.held_bytes, full.max_bytes)
            raise StoreFull(*spent, why) from None
