"""The deadlines of open groups, as an agenda.

Invariant: a deadline never grows, so that a late double of an ask does not lengthen it; of groups
that have ended nearly nothing is kept. Driven by ledger.py.
"""

import heapq
import math
from collections.abc import Mapping

from rollmesh.core.ids import GroupId
from rollmesh.serve.router.groups import Group

SPARE_DEADLINES = 1024
"""So many of ended groups may still stand in the agenda, or as many as groups are open, twice."""


class Deadlines:
    """Those of `groups`, a view of the open ones."""

    def __init__(self, groups: Mapping[GroupId, Group]) -> None:
        self._groups = groups
        self._agenda: list[tuple[float, int, Group]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._agenda)

    def set(self, group: Group, deadline_s: float, now_s: float) -> None:
        """It has `deadline_s` from now, and never more than was said before; 0 says nothing."""
        ends_s = now_s + deadline_s
        # Also false where it is not a number.
        if deadline_s <= 0 or not ends_s < group.ends_s:
            return
        group.ends_s = ends_s
        self._count += 1
        heapq.heappush(self._agenda, (ends_s, self._count, group))
        if len(self._agenda) > SPARE_DEADLINES + 2 * len(self._groups):
            self._agenda = [each for each in self._agenda if self._is_due_at(*each)]
            heapq.heapify(self._agenda)

    def take_overdue(self, now_s: float) -> list[Group]:
        """The open groups whose deadline has passed since the last call."""
        overdue = []
        while self._agenda and self._agenda[0][0] <= now_s:
            entry = heapq.heappop(self._agenda)
            if self._is_due_at(*entry):
                overdue.append(entry[2])
        return overdue

    def _is_due_at(self, ends_s: float, _: int, group: Group) -> bool:
        return group.ends_s == ends_s and self._groups.get(group.group_id) is group


def left_s(group: Group, now_s: float) -> float:
    """As messages say it: what is left, or 0 where there is no limit."""
    return 0.0 if group.ends_s == math.inf else max(group.ends_s - now_s, 0.001)
