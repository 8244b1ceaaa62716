"""What peers look at: shards of an owner that are lent to them, or are on their way into a socket.

    held --places, windows--> PINNED --unpin, as often; drop_peer--> held, or freed by then

Owns who has pinned what, and how often. Invariants: what is pinned keeps its memory, also after it
was freed; a peer takes back its own pins alone, and one that has gone has none. Any thread; driven
by guest.py.
"""

from collections.abc import Sequence

import msgspec

from rollmesh.core.errors import ShardMissing, TensorError
from rollmesh.tensors.arena import Arena, Slot
from rollmesh.tensors.holdings import Holdings, stretches


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where a shard lies, for a process of this host that attaches to it."""

    path: str
    offset: int
    num_bytes: int


class Pins:
    """See the module; of one store."""

    def __init__(self, holdings: Holdings, arena: Arena) -> None:
        self._holdings = holdings
        self._arena = arena
        self._pins: dict[str, dict[int, int]] = {}
        """How often each peer has pinned what; changed under the lock of the holdings."""

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
        for some in stretches(shard_ids):
            with self._holdings.lock:
                pins = self._pins.get(peer, {})
                slots = [self._holdings.unpinned(each, 1) for each in some if _took_one(pins, each)]
            self._holdings.free_slots(slots)

    def drop_peer(self, peer: str) -> None:
        """`peer` has gone, and looks at nothing."""
        with self._holdings.lock:
            pins = self._pins.pop(peer, {})
        for some in stretches([*pins]):
            with self._holdings.lock:
                slots = [self._holdings.unpinned(each, pins[each]) for each in some]
            self._holdings.free_slots(slots)

    def _pin(self, shard_ids: Sequence[int], peer: str) -> list[Slot]:
        slots: list[Slot] = []
        try:
            for some in stretches(shard_ids):
                with self._holdings.lock:
                    for shard_id in some:
                        slots.append(self._pinned(shard_id, peer))  # noqa: PERF401 - in case one fails
        except ShardMissing:
            self.unpin(shard_ids[: len(slots)], peer)
            raise
        return slots

    def _pinned(self, shard_id: int, peer: str) -> Slot:
        held = self._holdings.find(shard_id)
        held.num_pins += 1
        pins = self._pins.setdefault(peer, {})
        pins[shard_id] = pins.get(shard_id, 0) + 1
        return held.slot


def _took_one(pins: dict[int, int], shard_id: int) -> bool:
    """Take one pin away; False where there is none."""
    number = pins.get(shard_id, 0)
    if number > 1:
        pins[shard_id] = number - 1
    elif number:
        del pins[shard_id]
    return number > 0
