"""An agenda: groups in the order of the times at which something is to be done about them.

Owns the order alone: when a group is due, its own field says. Invariants: what is not due costs
nothing, what is costs the logarithm of what stands here; of groups that were put off or have ended
nearly nothing is kept. Driven by deadlines.py and deals.py.
"""

import heapq
from collections.abc import Callable, Iterator

from rollmesh.serve.router.groups import Group

SPARE_ENTRIES = 1024
"""So many that are no longer true may stand here, and as many as are true, twice."""


class Agenda:
    """See the module."""

    def __init__(self, due_s: Callable[[Group], float]) -> None:
        """`due_s` says when a group is due, infinity if never."""
        self._due_s = due_s
        self._entries: list[tuple[float, int, Group]] = []
        self._most = SPARE_ENTRIES
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, group: Group) -> None:
        """It is due at another time than before."""
        self._count += 1
        heapq.heappush(self._entries, (self._due_s(group), self._count, group))
        if len(self._entries) > self._most:
            self._entries = [each for each in self._entries if self._due_s(each[2]) == each[0]]
            heapq.heapify(self._entries)
            self._most = SPARE_ENTRIES + 3 * len(self._entries)

    def take_due(self, now_s: float) -> Iterator[Group]:
        """Those whose time has come, one by one; whoever takes one sees to its next time."""
        while self._entries and self._entries[0][0] <= now_s:
            due_s, _, group = heapq.heappop(self._entries)
            if self._due_s(group) == due_s:
                yield group
