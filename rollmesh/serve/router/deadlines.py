"""The deadlines of open groups.

Invariant: a deadline never grows, so that a late double of an ask does not lengthen it. Driven by
ledger.py.
"""

import math
from collections.abc import Mapping

from rollmesh.core.ids import GroupId
from rollmesh.serve.router.agenda import Agenda
from rollmesh.serve.router.groups import Group


class Deadlines:
    """Those of `groups`, a view of the open ones."""

    def __init__(self, groups: Mapping[GroupId, Group]) -> None:
        self._groups = groups
        self._agenda = Agenda(self._ends_s)

    def __len__(self) -> int:
        """Times that are noted, of groups that have ended, too."""
        return len(self._agenda)

    def set(self, group: Group, deadline_s: float, now_s: float) -> None:
        """It has `deadline_s` from now, and never more than was said before; 0 says nothing."""
        ends_s = now_s + deadline_s
        # Also false where it is not a number.
        if deadline_s <= 0 or not ends_s < group.ends_s:
            return
        group.ends_s = ends_s
        self._agenda.put(group)

    def take_overdue(self, now_s: float) -> list[Group]:
        """The open groups whose deadline has passed since the last call."""
        return list(self._agenda.take_due(now_s))

    def _ends_s(self, group: Group) -> float:
        return group.ends_s if self._groups.get(group.group_id) is group else math.inf


def left_s(group: Group, now_s: float) -> float:
    """As messages say it: what is left, or 0 where there is no limit."""
    return 0.0 if group.ends_s == math.inf else max(group.ends_s - now_s, 0.001)
