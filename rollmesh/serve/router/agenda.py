"""An agenda: groups in the order of the times at which something is to be done about them.

Owns the order alone: when a group is due, its own field says. Invariants: what is not due costs
nothing, what is costs the logarithm of the number of times that stand here; of groups that were put
off or have ended nearly nothing is kept. Driven by deadlines.py and deals.py.
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
        self._times: list[float] = []
        """A heap, of the keys of `_at`."""
        self._at: dict[float, list[Group]] = {}
        self._num = 0
        self._most = SPARE_ENTRIES

    def __len__(self) -> int:
        return self._num

    def put(self, group: Group) -> None:
        """It is due at another time than before."""
        if self._num >= self._most:
            self._tidy()
        self._add(group)

    def take_due(self, now_s: float) -> Iterator[Group]:
        """Those whose time has come, one by one; whoever takes one sees to its next time."""
        while self._times and self._times[0] <= now_s:
            due_s = heapq.heappop(self._times)
            groups = self._at.pop(due_s)
            self._num -= len(groups)
            for group in groups:
                if self._due_s(group) == due_s:
                    yield group

    def _add(self, group: Group) -> None:
        due_s = self._due_s(group)
        together = self._at.get(due_s)
        if together is None:
            self._at[due_s] = [group]
            heapq.heappush(self._times, due_s)
        else:
            together.append(group)
        self._num += 1

    def _tidy(self) -> None:
        found = [(at_s, each) for at_s, groups in self._at.items() for each in groups]
        self._times, self._at, self._num = [], {}, 0
        for at_s, group in found:
            if self._due_s(group) == at_s:
                self._add(group)
        self._most = SPARE_ENTRIES + 3 * self._num
