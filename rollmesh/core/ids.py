"""Ids of groups and rollouts, and a compact set of consumed sequence numbers.

- The client creates an id once, as (run_id, seq); a rollout's id is its group's id and its index.
- The text forms are stable: logs, journals and run folders contain them.
"""

import bisect
import secrets

import msgspec


class GroupId(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """One ask: a task to be sampled n times.

    >>> str(GroupId("r7f3a9c1", 12))
    'r7f3a9c1/12'
    """

    run_id: str
    """Name of the client's run, without a slash."""
    seq: int
    """Counts the run's groups from 0."""

    def __str__(self) -> str:
        return f"{self.run_id}/{self.seq}"


class RolloutId(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """One sample of a group.

    >>> str(RolloutId(GroupId("r7f3a9c1", 12), 3))
    'r7f3a9c1/12/3'
    """

    group_id: GroupId
    index: int

    def __str__(self) -> str:
        return f"{self.group_id}/{self.index}"


TICKET_BYTES = 16


def new_ticket() -> bytes:
    """Return 128 fresh random bits: the proof that a worker was assigned a group."""
    return secrets.token_bytes(TICKET_BYTES)


def new_id(prefix: str, num_bytes: int = 4) -> str:
    """Return a fresh random id such as `r7f3a9c1`, for runs, processes and incarnations."""
    return prefix + secrets.token_hex(num_bytes)


class IntervalSet:
    """A set of ints kept as few half-open intervals; `add` and `in` are O(log intervals).

    >>> IntervalSet([(0, 2)]).add(1)
    False
    """

    def __init__(self, intervals: list[tuple[int, int]] | None = None) -> None:
        self._starts = [start for start, _ in intervals or []]
        self._stops = [stop for _, stop in intervals or []]

    def add(self, value: int) -> bool:
        """Add `value`; return False if it was there already."""
        at = bisect.bisect_right(self._starts, value)
        if at and value < self._stops[at - 1]:
            return False
        joins_left = at > 0 and self._stops[at - 1] == value
        joins_right = at < len(self._starts) and self._starts[at] == value + 1
        if joins_left and joins_right:
            self._stops[at - 1] = self._stops.pop(at)
            self._starts.pop(at)
        elif joins_left:
            self._stops[at - 1] = value + 1
        elif joins_right:
            self._starts[at] = value
        else:
            self._starts.insert(at, value)
            self._stops.insert(at, value + 1)
        return True

    def include(self, start: int, stop: int) -> None:
        """Add all of `start` to `stop`, which is not added itself.

        >>> few = IntervalSet([(0, 2), (5, 7)]); few.include(1, 5); few.intervals()
        [(0, 7)]
        """
        if start >= stop:
            return
        at = bisect.bisect_left(self._stops, start)
        beyond = bisect.bisect_right(self._starts, stop)
        if at < beyond:
            start, stop = min(start, self._starts[at]), max(stop, self._stops[beyond - 1])
        self._starts[at:beyond], self._stops[at:beyond] = [start], [stop]

    def __contains__(self, value: int) -> bool:
        at = bisect.bisect_right(self._starts, value)
        return at > 0 and value < self._stops[at - 1]

    def __len__(self) -> int:
        return sum(self._stops) - sum(self._starts)

    def intervals(self) -> list[tuple[int, int]]:
        """Return the half-open intervals in ascending order."""
        return list(zip(self._starts, self._stops, strict=True))
