"""TODO.

The memory that request bodies may use at once, shared by all sessions of a process.

    READING --bytes came--> reach: continue, or WAITING --room--> READING
    READING --the last byte--> settled --decoded, or its call has ended--> released
    any --> released

- A body counts the bytes that have come, never those that its head announces, so that a client that
  announces a long body and sends nothing takes no room. A body that is being decompressed also
  counts what has been decompressed so far.
- A body that waits for room is not read.
- Room is given in the order of arrival: a body continues if no older body waits for room and its
  bytes fit. The oldest body that is still being read may pass the limit itself once all others
  together are within it, so that the bodies cannot block each other.
- One owner (a session) holds at most a quarter of the room, or one body where that is longer. For
  this rule a body that is being read counts with the length that it may reach, to all bodies of its
  owner but the oldest. So there is always room for the oldest, and it waits for whole bodies only.
  A body that waits for its owner's quarter delays no other owner.
- While a body waits for room, senders that are silent or slow are cut (`SendDeadline`), so that
  each wait ends.

In all, no more is held than the limit and one body, beside what a connection reads at a time.

Long pieces of work on the event loop, one for each of its turns, fairly among sessions.

    short, or none passed in this turn --pass_through--> continues at once
    another passed in this turn --pass_through--> waits in its session's line
    waits --a later turn--> continues

To read a body of some megabytes, or to begin many turns, holds the loop for milliseconds, and calls
of agents that act together come together.

- Between two pieces of work the loop serves everything else.
- The sessions take turns, and each session's work is done in the order in which it came, so that a
  session with many pieces delays each of the others by one piece at a time.
- A cancelled waiter delays no other.
"""

import asyncio
from collections.abc import Callable, Hashable

from rollmesh.core.fair_queue import FairQueue
from rollmesh.core.heap import note_freed
from rollmesh.core.inventory import Inventory

COUNTED_BYTES = 16 * 1024
"""A whole body below this is not counted: it is decoded soon."""
STEP_BYTES = 256 * 1024
"""A body is decompressed in steps of this size."""
OWNER_FRACTION = 4
"""An owner holds at most one part in this many of the room."""
SLOWEST_BYTES_PER_S = 500
"""A body that comes slower than this for longer than its sender may be silent is refused."""
HURRIED_BYTES_PER_S = 32 * 1024
"""The same while others wait for room, counted from when their wait was noticed."""
HURRIED_SILENCE_S = 1.0
"""A sender may be silent for this long while others wait for room, from when that was noticed;
whether others wait is looked at once in this time."""
HURRIED_GRACE_S = 5.0
"""A sender may be behind the hurried pace for this long."""


class BodyBudget:
    """The room and its queue; one per process, used from one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self.held_bytes = 0
        self.num_held = 0
        self.num_waiting = 0
        self.num_waits = 0
        """Since the start."""
        self.max_bytes = max_bytes
        self.max_owner_bytes = max_bytes // OWNER_FRACTION
        self.readers: dict[BodyReservation, None] = {}
        """Bodies that are not whole, the oldest first."""
        self._shares: dict[Hashable, OwnerShare] = {}

    def hold(self, num_bytes: int, owner: Hashable = None) -> "BodyReservation":
        """The reservation of a body that is whole already: counted, without a wait."""
        return BodyReservation(self, num_bytes, self._share(owner))

    def begin(self, owner: Hashable = None, final_bytes: int = 0) -> "BodyReservation":
        """The reservation of a body of which more is to come; None is an owner without a limit.

        `final_bytes` is its length in the end, or its limit where that is unknown.
        """
        reservation = BodyReservation(self, 0, self._share(owner), final_bytes)
        self.readers[reservation] = None
        if reservation.share:
            reservation.share.readers[reservation] = None
            reservation.share.expected_bytes += final_bytes
        return reservation

    def drop(self, share: "OwnerShare") -> None:
        """Forget an owner that holds no body any more."""
        del self._shares[share.owner]

    def wake(self) -> None:
        """Let the oldest body that waits for room continue if it fits; it calls here again."""
        if not self.num_waiting:
            return
        for each in self.readers:
            if each.turn is not None and self._is_within_share(each):
                if not each.turn.done() and self._fits(each):
                    each.turn.set_result(None)
                return

    def may_grow(self, reservation: "BodyReservation") -> bool:
        """Whether a body may hold the bytes that it wants; see the module's rules."""
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

    def is_sought(self, reservation: "BodyReservation") -> bool:
        """Whether a body waits for room that this one could give back."""
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
    """The part of the room that one owner holds."""

    __slots__ = ("expected_bytes", "held_bytes", "num_held", "owner", "readers")

    def __init__(self, owner: Hashable) -> None:
        self.owner = owner
        self.held_bytes = 0
        self.expected_bytes = 0
        """That are still to come, of bodies that are not whole."""
        self.num_held = 0
        self.readers: dict[BodyReservation, None] = {}
        """Bodies of this owner that are not whole, the oldest first."""


class BodyReservation:
    """The room of one body."""

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
        """While it waits."""
        self._bodies = bodies
        self._final_bytes = final_bytes
        bodies.held_bytes += num_bytes
        bodies.num_held += 1
        if share:
            share.held_bytes += num_bytes
            share.num_held += 1

    @property
    def expected_bytes(self) -> int:
        """That are still to come."""
        return max(0, self._final_bytes - self.num_bytes)

    async def reach(self, num_bytes: int) -> None:
        """Wait until so much may be held; if cancelled, it holds what it held."""
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
        """Count a body that is whole, or what was made of it."""
        self._bodies.readers.pop(self, None)
        if self.share:
            self.share.readers.pop(self, None)
            self.share.expected_bytes -= self.expected_bytes
        self._final_bytes = 0
        self._become(num_bytes)

    def release(self) -> None:
        """Give the room back, once: the body is in memory no more."""
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
    """How long the sender of one body may still be silent; `now_s` is any monotonic clock."""

    __slots__ = ("_begun_s", "_heard_s", "_hurried_bytes", "_hurried_s", "_num_bytes", "_silence_s")

    def __init__(self, now_s: float, num_bytes: int, silence_s: float) -> None:
        """`silence_s` is the allowed silence while no body waits for room."""
        self._begun_s = self._heard_s = now_s
        self._num_bytes = num_bytes
        self._silence_s = silence_s
        self._hurried_s: float | None = None
        """Since when others are known to wait for room."""
        self._hurried_bytes = 0

    def pause(self, waited_s: float) -> None:
        """Leave out a time in which the body was not read."""
        self._begun_s += waited_s
        self._heard_s += waited_s
        if self._hurried_s is not None:
            self._hurried_s += waited_s

    def look(self, now_s: float, num_bytes: int, is_sought: bool) -> tuple[float, bool]:
        """When to look again if nothing comes, and whether the sender is too slow already."""
        if num_bytes != self._num_bytes:
            self._num_bytes, self._heard_s = num_bytes, now_s
        earned_s = self._begun_s + num_bytes / SLOWEST_BYTES_PER_S
        deadline_s = min(self._heard_s, earned_s) + self._silence_s
        if not is_sought:
            self._hurried_s = None
            # Another body may begin to wait meanwhile.
            return min(deadline_s, now_s + HURRIED_SILENCE_S), now_s >= deadline_s
        if self._hurried_s is None:
            self._hurried_s, self._hurried_bytes = now_s, num_bytes
        earned_s = self._hurried_s + (num_bytes - self._hurried_bytes) / HURRIED_BYTES_PER_S
        heard_s = max(self._heard_s, self._hurried_s)
        hurried_s = min(heard_s + HURRIED_SILENCE_S, earned_s + HURRIED_GRACE_S)
        deadline_s = min(deadline_s, hurried_s)
        return deadline_s, now_s >= deadline_s


LONG_BYTES = 256 * 1024
"""A shorter piece of work delays no other."""


class DecodeGate:
    """One per edge."""

    def __init__(self) -> None:
        self._is_turning = False
        self._line = FairQueue[asyncio.Future[None]]()

    def __len__(self) -> int:
        """Number of waiters."""
        return len(self._line)

    async def pass_through(self, num_bytes: int, owner: Hashable = None) -> None:
        """Wait for the turn of a piece of work on so many bytes, which `owner` asked for."""
        if num_bytes < LONG_BYTES:
            return
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn)
            return
        turn = loop.create_future()
        self._line.put(owner, turn)
        await turn

    def _turn(self) -> None:
        """Let the next one through, after all that was due when the last one passed."""
        chosen = self._line.take()
        while chosen is not None and chosen.done():  # its caller was cancelled
            chosen = self._line.take()
        if chosen is None:
            self._is_turning = False
            return
        chosen.set_result(None)
        loop = asyncio.get_running_loop()
        # It continues in the next turn of the loop, and this comes again in the one after it.
        loop.call_soon(loop.call_soon, self._turn)


def add_bodies(
    inventory: Inventory,
    bodies: BodyBudget,
    num_open: Callable[[], int],
    num_kept: Callable[[], int],
) -> None:
    """An HTTP face: bodies in flight, exchanges that run, connections that are kept."""
    inventory.add(
        lambda: {"bodies": bodies.held_bytes},
        lambda: {"bodies": bodies.num_held, "exchanges": num_open()},
        lambda: {"connections": num_kept()},
    )
