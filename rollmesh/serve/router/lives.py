"""Lives: which process of a worker is meant, and which are known to have ended.

A worker's name outlives its process: another one takes it, and what the earlier one had said, or
what is said of it, may come late. Invariants: of two processes that something known tells apart
neither is taken for the other; what an ended process had said before does not raise it; there are
MAX_ENDS notes at most. Driven by crew.py and ledger.py.
"""

from collections import OrderedDict

import msgspec

from rollmesh.core.ids import GroupId

MAX_ENDS = 1024


class Life(msgspec.Struct, frozen=True, gc=False):
    """One process of a worker, as far as it is known."""

    worker_id: str
    pid: int = 0
    started_s: float = 0.0
    """Unix time; a container's pid is 1 in every life."""
    host: str = ""

    def may_be(self, other: "Life") -> bool:
        """Whether nothing that is known of both tells them apart."""
        return (
            self.worker_id == other.worker_id
            and (self.pid == other.pid or not self.pid or not other.pid)
            and (self.started_s == other.started_s or not self.started_s or not other.started_s)
            and (self.host == other.host or not self.host or not other.host)
        )


class End(msgspec.Struct, frozen=True):
    """A process that has ended."""

    life: Life
    group_ids: tuple[GroupId, ...]
    """What it had."""
    until_s: float
    """So long what it had said before may still come."""


class Ends:
    """Notes of processes that have ended, by worker id and pid."""

    def __init__(self, remember_s: float) -> None:
        self._remember_s = remember_s
        self._ends: OrderedDict[tuple[str, int], End] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, life: Life, group_ids: tuple[GroupId, ...], now_s: float) -> End:
        """`life` has ended, with these groups."""
        end = End(life, group_ids, now_s + self._remember_s)
        self._ends[life.worker_id, life.pid] = end
        if len(self._ends) > MAX_ENDS:
            self._ends.popitem(last=False)
        return end

    def find(self, life: Life) -> End | None:
        """The note of it, if there is one."""
        end = self._ends.get((life.worker_id, life.pid))
        return end if end and end.life.may_be(life) else None

    def cover(self, life: Life, now_s: float) -> bool:
        """Whether what `life` says was said before its end: that of its pid was this or later."""
        end = self._ends.get((life.worker_id, life.pid))
        if end is None or now_s >= end.until_s:
            return False
        return not end.life.started_s or life.started_s <= end.life.started_s
