"""Limits on request bodies: memory shared by all sessions, and turns on the event loop.

    READING --bytes arrived--> reach: continue, or WAITING --budget is free--> READING
    READING --the last byte--> settled --decoded, or its call has ended--> released
    any --> released

Rules of BodyBudget, which holds at most its limit plus one body:

- A body counts the bytes that have arrived (and were decompressed), not those announced by its
  head. A body that waits for budget is not read.
- Budget is granted in order of arrival. The oldest incomplete body may exceed the limit once all
  others together are within it, which excludes deadlock.
- An owner (a session) may hold a quarter of the budget, or one body if that is longer. For this
  rule incomplete bodies count with their final length, to all but the owner's oldest body; so the
  oldest waits for complete bodies only. Waiting for an owner's quarter delays no other owner.
- While a body waits for budget, slow senders are cut off (`SendDeadline`), so each wait ends.

Rules of DecodeGate, for work that blocks the event loop for milliseconds, such as decoding a body
of megabytes:

- Between two pieces of work the loop processes everything else.
- Sessions take turns; within a session the order of arrival counts. A session with many pieces
  delays each of the others by one piece at a time.
"""

import asyncio
from collections.abc import Callable, Hashable

from rollmesh.core.fair_queue import FairQueue
from rollmesh.core.heap import note_freed
from rollmesh.core.metrics import Inventory

COUNTED_BYTES = 16 * 1024
"""Complete bodies below this size are not counted, because they are decoded soon."""
STEP_BYTES = 256 * 1024
"""Size of a decompression step."""
OWNER_FRACTION = 4
"""An owner may hold this part of the budget: 1/4."""
SLOWEST_BYTES_PER_S = 500
"""Minimum rate of a sender, below which it may not stay longer than its allowed silence."""
CONTENDED_BYTES_PER_S = 32 * 1024
"""Minimum rate while other bodies wait for budget, measured from when their wait was noticed."""
CONTENDED_SILENCE_S = 1.0
"""Allowed silence while other bodies wait for budget, from when their wait was noticed, which is
checked once in this time."""
CONTENDED_GRACE_S = 5.0
"""Time for which a sender may be below the minimum rate while others wait."""


class BodyBudget:
    """Memory budget for bodies, and its queue; one per process, for one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self.held_bytes = 0
        self.num_held = 0
        self.num_waiting = 0
        self.num_waits = 0
        """Number of waits since the start."""
        self.max_bytes = max_bytes
        self.max_owner_bytes = max_bytes // OWNER_FRACTION
        self.readers: dict[BodyReservation, None] = {}
        """Incomplete bodies, the oldest first."""
        self._shares: dict[Hashable, OwnerShare] = {}

    def hold(self, num_bytes: int, owner: Hashable = None) -> "BodyReservation":
        """Reserve budget for a complete body, without waiting."""
        return BodyReservation(self, num_bytes, self._share(owner))

    def begin(self, owner: Hashable = None, final_bytes: int = 0) -> "BodyReservation":
        """Start the reservation of an incomplete body; owner None has no limit.

        `final_bytes` is the length that the body will have, or its limit if that is unknown.
        """
        reservation = BodyReservation(self, 0, self._share(owner), final_bytes)
        self.readers[reservation] = None
        if reservation.share:
            reservation.share.readers[reservation] = None
            reservation.share.expected_bytes += final_bytes
        return reservation

    def drop(self, share: "OwnerShare") -> None:
        """Forget an owner that holds no body."""
        del self._shares[share.owner]

    def wake(self) -> None:
        """Let the oldest waiting body continue if it fits; it will call `wake` again."""
        if not self.num_waiting:
            return
        for each in self.readers:
            if each.turn is not None and self._is_within_share(each):
                if not each.turn.done() and self._fits(each):
                    each.turn.set_result(None)
                return

    def may_grow(self, reservation: "BodyReservation") -> bool:
        """Whether a body may hold the bytes that it wants, by the rules of the module."""
        if not self._is_within_share(reservation) or not self._fits(reservation):
            return False
        if not self.num_waiting or self._is_oldest(reservation):
            return True
        for each in self.readers:
            if each is reservation:
                break
            if each.turn is not None and self._is_within_share(each):
                return False
        return True

    def is_contended(self, reservation: "BodyReservation") -> bool:
        """Whether a body waits for budget that this one could release."""
        if not self.num_waiting:
            return False
        return any(
            each.turn is not None
            and each is not reservation
            and (each.share is reservation.share or self._is_within_share(each))
            for each in self.readers
        )

    def _share(self, owner: Hashable) -> "OwnerShare | None":
        if owner is None:
            return None
        share = self._shares.get(owner)
        if share is None:
            share = self._shares[owner] = OwnerShare(owner)
        return share

    def _is_oldest(self, reservation: "BodyReservation") -> bool:
        return reservation is next(iter(self.readers))

    def _fits(self, reservation: "BodyReservation") -> bool:
        others_bytes = self.held_bytes - reservation.num_bytes
        if others_bytes + reservation.wanted_bytes <= self.max_bytes:
            return True
        return self._is_oldest(reservation) and others_bytes <= self.max_bytes

    def _is_within_share(self, reservation: "BodyReservation") -> bool:
        share = reservation.share
        if share is None:
            return True
        others_bytes = share.held_bytes - reservation.num_bytes
        if reservation is not next(iter(share.readers)):
            others_bytes += share.expected_bytes - reservation.expected_bytes
        return not others_bytes or others_bytes + reservation.wanted_bytes <= self.max_owner_bytes


class OwnerShare:
    """The bodies of one owner."""

    __slots__ = ("expected_bytes", "held_bytes", "num_held", "owner", "readers")

    def __init__(self, owner: Hashable) -> None:
        self.owner = owner
        self.held_bytes = 0
        self.expected_bytes = 0
        """Bytes still to arrive of incomplete bodies."""
        self.num_held = 0
        self.readers: dict[BodyReservation, None] = {}
        """Incomplete bodies of this owner, the oldest first."""


class BodyReservation:
    """The budget held by one body."""

    __slots__ = ("_bodies", "_final_bytes", "num_bytes", "share", "turn", "wanted_bytes")

    def __init__(
        self,
        bodies: BodyBudget,
        num_bytes: int,
        share: OwnerShare | None,
        final_bytes: int = 0,
    ) -> None:
        self.num_bytes = self.wanted_bytes = num_bytes
        self.share = share
        self.turn: asyncio.Future[None] | None = None
        """Set while it waits."""
        self._bodies = bodies
        self._final_bytes = final_bytes
        bodies.held_bytes += num_bytes
        bodies.num_held += 1
        if share:
            share.held_bytes += num_bytes
            share.num_held += 1

    @property
    def expected_bytes(self) -> int:
        """Bytes still to arrive."""
        return max(0, self._final_bytes - self.num_bytes)

    async def reach(self, num_bytes: int) -> None:
        """Wait until `num_bytes` may be held; if cancelled, the reservation is unchanged."""
        bodies = self._bodies
        self.wanted_bytes = max(num_bytes, self.num_bytes)
        if not bodies.may_grow(self):
            bodies.num_waiting += 1
            bodies.num_waits += 1
            try:
                while not bodies.may_grow(self):
                    self.turn = asyncio.get_running_loop().create_future()
                    await self.turn
            finally:
                self.turn = None
                bodies.num_waiting -= 1
        self._become(self.wanted_bytes)

    def settle(self, num_bytes: int) -> None:
        """Set the size of a complete body, or of what replaced it."""
        self._bodies.readers.pop(self, None)
        if self.share:
            self.share.readers.pop(self, None)
            self.share.expected_bytes -= self.expected_bytes
        self._final_bytes = 0
        self._become(num_bytes)

    def release(self) -> None:
        """Return the budget, once: the body is no longer in memory."""
        bodies, share = self._bodies, self.share
        bodies.num_held -= 1
        note_freed(self.num_bytes)
        self.settle(0)
        if share:
            share.num_held -= 1
            if not share.num_held:
                bodies.drop(share)

    def _become(self, num_bytes: int) -> None:
        self._bodies.held_bytes += num_bytes - self.num_bytes
        expected_bytes = self.expected_bytes
        if self.share:
            self.share.held_bytes += num_bytes - self.num_bytes
        self.num_bytes = self.wanted_bytes = num_bytes
        if self.share:
            self.share.expected_bytes += self.expected_bytes - expected_bytes
        self._bodies.wake()


class SendDeadline:
    """Deadline of the sender of one body; `now_s` is any monotonic clock."""

    __slots__ = (
        "_contended_bytes",
        "_contended_s",
        "_num_bytes",
        "_received_s",
        "_silence_s",
        "_started_s",
    )

    def __init__(self, now_s: float, num_bytes: int, silence_s: float) -> None:
        """Start the deadline; `silence_s` is the allowed silence while no other body waits for
        budget."""
        self._started_s = self._received_s = now_s
        self._num_bytes = num_bytes
        self._silence_s = silence_s
        self._contended_s: float | None = None
        """When the wait of others was noticed."""
        self._contended_bytes = 0

    def pause(self, waited_s: float) -> None:
        """Exclude a time in which the body was not read."""
        self._started_s += waited_s
        self._received_s += waited_s
        if self._contended_s is not None:
            self._contended_s += waited_s

    def check(self, now_s: float, num_bytes: int, is_contended: bool) -> tuple[float, bool]:
        """Return when to check again if nothing arrives, and whether the sender is too slow."""
        if num_bytes != self._num_bytes:
            self._num_bytes, self._received_s = num_bytes, now_s
        earned_s = self._started_s + num_bytes / SLOWEST_BYTES_PER_S
        deadline_s = min(self._received_s, earned_s) + self._silence_s
        if not is_contended:
            self._contended_s = None
            # Another body may start to wait meanwhile.
            return min(deadline_s, now_s + CONTENDED_SILENCE_S), now_s >= deadline_s
        if self._contended_s is None:
            self._contended_s, self._contended_bytes = now_s, num_bytes
        earned_s = self._contended_s + (num_bytes - self._contended_bytes) / CONTENDED_BYTES_PER_S
        received_s = max(self._received_s, self._contended_s)
        contended_s = min(received_s + CONTENDED_SILENCE_S, earned_s + CONTENDED_GRACE_S)
        deadline_s = min(deadline_s, contended_s)
        return deadline_s, now_s >= deadline_s


LONG_BYTES = 256 * 1024
"""Shorter work passes without a turn."""


class DecodeGate:
    """Turns for long work on the event loop; one per server."""

    def __init__(self) -> None:
        self._is_busy = False
        self._queue = FairQueue[asyncio.Future[None]]()

    def __len__(self) -> int:
        """Number of waiting pieces of work."""
        return len(self._queue)

    async def pass_through(self, num_bytes: int, owner: Hashable = None) -> None:
        """Wait for the turn of work on `num_bytes`, on behalf of `owner`."""
        if num_bytes < LONG_BYTES:
            return
        loop = asyncio.get_running_loop()
        if not self._is_busy:
            self._is_busy = True
            loop.call_soon(self._turn)
            return
        turn = loop.create_future()
        self._queue.put(owner, turn)
        await turn

    def _turn(self) -> None:
        """Admit the next piece of work, after all callbacks that were due when the last one was
        admitted."""
        chosen = self._queue.take()
        while chosen is not None and chosen.done():  # its caller was cancelled
            chosen = self._queue.take()
        if chosen is None:
            self._is_busy = False
            return
        chosen.set_result(None)
        loop = asyncio.get_running_loop()
        # The caller continues in the next turn of the loop; this runs again in the turn after it.
        loop.call_soon(loop.call_soon, self._turn)


def count_bodies(
    inventory: Inventory,
    bodies: BodyBudget,
    num_open: Callable[[], int],
    num_kept: Callable[[], int],
) -> None:
    """Add body memory, running exchanges and open connections of an HTTP server to an inventory."""
    inventory.add(
        lambda: {"bodies": bodies.held_bytes},
        lambda: {"bodies": bodies.num_held, "exchanges": num_open()},
        lambda: {"connections": num_kept()},
    )
