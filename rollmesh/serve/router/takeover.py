"""What a router finds of work that was under way before it heard of it, for a line about it.

    claimed by a worker that is new here, and asked for --KEPT--> goes on
    claimed, and asked for by nobody --UNASKED--> ends
    asked for as one that has begun, and not claimed --AGAIN--> runs again; or EXHAUSTED --> ends

Invariant: a group is counted once, as what it came to last; all are told in one line when nothing
more was found for a while. Written by crew.py and ledger.py, told by process.py.
"""

import enum
from collections import Counter

from rollmesh.core.ids import GroupId


class Fate(enum.StrEnum):
    """What became of a group that an earlier router had."""

    KEPT = "kept"
    AGAIN = "run_again"
    UNASKED = "dropped_unasked"
    EXHAUSTED = "dropped_exhausted"


class Takeover:
    """A line is due `wait_s` seconds after the last group was found."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._fates: dict[GroupId, Fate] = {}
        self._found_s = 0.0

    def __contains__(self, group_id: object) -> bool:
        return group_id in self._fates

    def note(self, group_id: GroupId, fate: Fate, now_s: float) -> None:
        """A group of before has come to this."""
        self._fates[group_id] = fate
        self._found_s = now_s

    def tell(self, now_s: float) -> dict[str, int] | None:
        """Groups by what became of them, where a line is due; each is told once."""
        if not self._fates or now_s < self._found_s + self._wait_s:
            return None
        num = Counter(self._fates.values())
        self._fates.clear()
        return {f"num_{fate}": num[fate] for fate in Fate}
