"""Which segments of a gateway's journal hold something that lives, as far as this process knows.

Owns how many sessions and contents have a record in each segment that was begun here. Invariants: a
tenant is counted once in a segment, from its first record there until it is forgotten, so that a
segment without tenants is dead, every record of it, and need not be read before it is removed; of
segments that an earlier process left nothing is known. Driven by archive.py.
"""

from rollmesh.core.journal import Journal

Segments = tuple[int, ...]
"""Where those begin in which a tenant has records; the last is the newest."""


class Tenants:
    """One per archive."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._known_from = journal.end
        self._num: dict[int, int] = {}

    @property
    def is_oldest_dead(self) -> bool:
        """Nothing in it lives."""
        segments = self._journal.segments
        is_known = len(segments) > 1 and segments[0] >= self._known_from
        return is_known and not self._num.get(segments[0])

    def enter(self, segments: Segments) -> Segments:
        """Of a tenant whose newest record is the journal's newest."""
        newest = self._journal.segments[-1]
        if segments and segments[-1] == newest:
            return segments
        self._num[newest] = self._num.get(newest, 0) + 1
        oldest = self._journal.segments[0]
        return (*[start for start in segments if start >= oldest], newest)

    def leave(self, segments: Segments) -> None:
        """Of a tenant that is forgotten."""
        for start in segments:
            if start in self._num:
                self._num[start] -= 1

    def drop(self, start: int) -> None:
        """Of a segment that is no more."""
        self._num.pop(start, None)
