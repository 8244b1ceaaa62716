"""Long pieces of work on the event loop, one for each of its turns, fairly among sessions.

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
from collections.abc import Hashable

from rollmesh.core.fair_queue import FairQueue

LONG_BYTES = 256 * 1024
"""A shorter piece of work delays no other."""


class Turnstile:
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
