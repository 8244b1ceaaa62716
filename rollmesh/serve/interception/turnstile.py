"""Long pieces of work on the event loop, one for each of its turns.

    short, or nobody passed in this turn --pass_through--> goes on at once
    somebody did --pass_through--> waits in line --a later turn--> goes on

To read a body of some megabytes holds the loop for milliseconds, and bodies of agents that act
together come together; one behind the other they would hold it for all of their time. Invariants:
between two of them the loop serves everything else; who waits is let through in the order of
coming, and who is cancelled meanwhile holds up nobody. Owns the line; driven by exchange.py and the
relay.
"""

import asyncio
from collections import deque

LONG_BYTES = 256 * 1024
"""A shorter piece of work holds up nobody."""


class Turnstile:
    """One per edge."""

    def __init__(self) -> None:
        self._is_turning = False
        self._line: deque[asyncio.Future[None]] = deque()

    def __len__(self) -> int:
        """Who waits."""
        return len(self._line)

    async def pass_through(self, num_bytes: int) -> None:
        """Wait until it is the turn of this one, who has so many bytes to look at."""
        if num_bytes < LONG_BYTES:
            return
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn)
            return
        turn = loop.create_future()
        self._line.append(turn)
        await turn

    def _turn(self) -> None:
        """Behind all that was to be done when somebody passed."""
        while self._line and self._line[0].done():
            self._line.popleft()
        if not self._line:
            self._is_turning = False
            return
        self._line.popleft().set_result(None)
        loop = asyncio.get_running_loop()
        # He goes on in the next turn of the loop, and this comes again in the one after it.
        loop.call_soon(loop.call_soon, self._turn)
