"""How many bytes of request bodies may be in memory at once, and who waits for some.

    READING --more is to come--> reach: goes on, or WAITING --its turn--> READING
    READING --the last byte--> settled --decoded, or its call has ended--> let go;   any --> let go

A body reserves what its head says; one that comes in chunks reserves as it grows, and one that is
compressed what it may become. While it waits its connection is not read. The rule, by which nobody
waits for ever:

    - who is the oldest of those still reading goes on as soon as all others together hold no more
      than the limit, though it may pass the limit itself;
    - anybody else goes on when nobody older waits and its bytes fit.

For the oldest waits only for bodies that are whole, and these end without reserving more: others
that still read never hold more than the limit together. Invariant: so in all no more is held than
the limit and one body, beside what connections read before anybody looks at it. Owns the count;
driven by request.py, on one event loop.
"""

import asyncio

from rollmesh.core.heap import note_freed

COUNTED_BYTES = 16 * 1024
"""A body that is here already and shorter is not worth its counting: it is soon decoded."""
STEP_BYTES = 256 * 1024
"""A body of unknown length reserves so much at a time."""


class Bodies:
    """See the module; one per process."""

    def __init__(self, max_bytes: int) -> None:
        self.held_bytes = 0
        self.num_held = 0
        self.num_waiting = 0
        self.num_waits = 0
        """Since the start."""
        self.max_bytes = max_bytes
        self.readers: dict[Reservation, None] = {}
        """Whose bodies are not whole; the oldest first."""

    def hold(self, num_bytes: int) -> "Reservation":
        """That of a body that is whole already: it is counted, and waits for nobody."""
        return Reservation(self, num_bytes)

    def begin(self) -> "Reservation":
        """That of a body of which more is to come."""
        reservation = Reservation(self, 0)
        self.readers[reservation] = None
        return reservation

    def wake(self) -> None:
        """Let the next one look again; it calls here in turn when it has got what it wants."""
        if self.num_waiting:
            first = next((each for each in self.readers if each.turn is not None), None)
            if first and first.turn and not first.turn.done() and self.may_grow(first):
                first.turn.set_result(None)

    def may_grow(self, reservation: "Reservation") -> bool:
        """By the rule."""
        if reservation is next(iter(self.readers)):
            return self.held_bytes - reservation.num_bytes <= self.max_bytes
        if self.held_bytes - reservation.num_bytes + reservation.wanted_bytes > self.max_bytes:
            return False
        for each in self.readers:
            if each is reservation:
                break
            if each.turn is not None:
                return False
        return True


class Reservation:
    """Of one body."""

    __slots__ = ("_bodies", "num_bytes", "turn", "wanted_bytes")

    def __init__(self, bodies: Bodies, num_bytes: int) -> None:
        self.num_bytes = self.wanted_bytes = num_bytes
        self.turn: asyncio.Future[None] | None = None
        """While it waits."""
        self._bodies = bodies
        bodies.held_bytes += num_bytes
        bodies.num_held += 1

    async def reach(self, num_bytes: int) -> None:
        """Wait until so much may be read; cancelled, it holds what it held."""
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
        """The body is whole, or what was made of it has so many bytes."""
        self._bodies.readers.pop(self, None)
        self._become(num_bytes)

    def let_go(self) -> None:
        """The body is in memory no more; once."""
        bodies = self._bodies
        bodies.num_held -= 1
        note_freed(self.num_bytes)
        self.settle(0)

    def _become(self, num_bytes: int) -> None:
        self._bodies.held_bytes += num_bytes - self.num_bytes
        self.num_bytes = self.wanted_bytes = num_bytes
        self._bodies.wake()
