"""What happens when, in simulated time.

Owns the clock. Invariant: time never goes back; what falls on the same moment comes in the order in
which it was put in, but what is `last` after all else of the moment. Driven by world.py.
"""

import heapq
from collections.abc import Callable


class Agenda:
    """See the module."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._entries: list[tuple[float, bool, int, Callable[[], None]]] = []
        self._num = 0

    def at(self, when_s: float, call: Callable[[], None], last: bool = False) -> None:
        """Call it then."""
        assert when_s >= self.now_s
        self._num += 1
        heapq.heappush(self._entries, (when_s, last, self._num, call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, call)

    def run(self, until_s: float) -> None:
        """Until nothing is left to happen, or no time."""
        while self._entries and self._entries[0][0] <= until_s:
            self.now_s, _, _, call = heapq.heappop(self._entries)
            call()
