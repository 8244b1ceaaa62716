"""Virtual time: an agenda of calls in order of time, each for one incarnation of one node.

- The same seed gives the same run, event for event.
- A call whose node has crashed since it was scheduled never runs.
- Calls to a frozen node run when its freeze ends, in the order in which they were due, also where
  a second freeze extends the first.
"""

import heapq
import math
import random
from collections.abc import Callable


class Node:
    """A node that can start, crash, restart and freeze."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_crashes = 0
        """Calls from before a crash are dropped."""
        self.alive = True
        self.frozen_until_s = 0.0
        self.ahead_s = 0.0
        """Offset of its machine's clock from the kernel's."""

    def start(self) -> None:
        """Begin to tick."""

    def freeze(self, until_s: float) -> None:
        """Freeze until then; calls wait in order."""
        self.frozen_until_s = max(self.frozen_until_s, until_s)

    def crash(self) -> None:
        """Crash: lose everything that is not on disk."""
        self.num_crashes += 1
        self.alive = False
        self.frozen_until_s = 0.0

    def restart(self) -> None:
        """Start a new incarnation."""
        self.alive = True


class Killed(Exception):
    """The process of `node` was killed in the middle of its work."""

    def __init__(self, node: Node) -> None:
        super().__init__(f"{node.name} was killed")
        self.node = node


class Kernel:
    """The scheduled calls, the clock and the random numbers."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.time_s = 0.0
        self.num_events = 0
        self.on_killed: Callable[[Node], None] = lambda node: node.crash()
        self._timers: list[tuple[float, float, int, Node | None, int, Callable[[], None]]] = []
        """Heap of calls, ordered by the time to run, the time that was due at first, and a count.

        Each freeze postpones the time to run, possibly more than once; the other two never change,
        so postponed calls of a node run in their original order.
        """
        self._count = 0

    def now_s(self, node: Node | None = None) -> float:
        """Return the time by the clock of `node`'s machine, or the kernel's."""
        return self.time_s + node.ahead_s if node else self.time_s

    def after(
        self,
        delay_s: float,
        call: Callable[[], None],
        node: Node | None = None,
        num_crashes: int | None = None,
    ) -> None:
        """Run `call` in `delay_s` unless `node` crashes before; `num_crashes` (default: as now) are
        those that it has had.
        """
        if num_crashes is None:
            num_crashes = node.num_crashes if node else 0
        # The count keeps calls of one instant in the order in which they were put here.
        self._count += 1
        due_s = self.time_s + delay_s
        heapq.heappush(self._timers, (due_s, due_s, self._count, node, num_crashes, call))

    def run(self, max_events: int, until_s: float) -> None:
        """Run until `max_events` have run or `until_s` is reached, to which the clock is then
        set.
        """
        timers, last = self._timers, self.num_events + max_events
        while timers and self.num_events < last and timers[0][0] <= until_s:
            self.time_s, due_s, count, node, num_crashes, call = heapq.heappop(timers)
            if node:
                if node.num_crashes != num_crashes:
                    continue
                if node.frozen_until_s > self.time_s:
                    entry = (node.frozen_until_s, due_s, count, node, num_crashes, call)
                    heapq.heappush(timers, entry)
                    continue
            self.num_events += 1
            try:
                call()
            except Killed as killed:
                self.on_killed(killed.node)
        if self.time_s < until_s < math.inf:
            self.time_s = until_s
