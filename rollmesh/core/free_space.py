"""Which bytes of a long line are free: runs that are given where they fit well, and join again.

Owns the map. Invariants: a byte is given to one owner at a time; two free runs never touch, and
none touches the end, behind which all is free; what is asked for together lies side by side
wherever some run is long enough for it. A run stands in the bin of its length, eight bins to a
doubling, so that taking and giving cost the same among ten runs and among a hundred thousand (the
two-level segregated fit of Masmano et al., ECRTS 2004). One thread at a time; driven by arena.py.
"""

from bisect import bisect_right
from collections.abc import Sequence

LOOKS = 8
"""Runs of the right bin that are tried before a longer one is cut."""
_FINE_BITS = 3

Run = tuple[int, int]
"""(start, stop)"""


class FreeSpace:
    """See the module; of `num_bytes`, all free at first."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.end = 0
        """Of what is in use."""
        self._stops: dict[int, int] = {}
        """By start."""
        self._starts: dict[int, int] = {}
        """By stop."""
        self._bins: dict[int, dict[int, None]] = {}
        """Starts, the newest last."""
        self._filled = 0
        """A bit for each bin that has a run."""

    def take(self, marks: Sequence[int]) -> list[tuple[int, int]] | None:
        """Room for parts, of which the n-th ends marks[n] bytes after the first begins.

        Returned are pieces, (start, number of parts that lie there one after the other); None, and
        nothing is taken, where there is no room for all. Long runs are filled before new ground is
        broken, so that parts that are large themselves leave little over.
        """
        pieces: list[tuple[int, int]] = []
        taken: list[Run] = []
        num_done = at = 0
        while num_done < len(marks):
            run = self._choose(marks[num_done] - at, marks[-1] - at)
            if run is None:
                for each in taken:
                    self.give(*each)
                return None
            start, stop = run
            then = bisect_right(marks, at + stop - start, lo=num_done)
            cut = start + marks[then - 1] - at
            self.give(cut, stop)
            taken.append((start, cut))
            pieces.append((start, then - num_done))
            num_done, at = then, marks[then - 1]
        return pieces

    def give(self, start: int, stop: int) -> None:
        """They are free."""
        if start == stop:
            return
        if stop in self._stops:
            stop = self._remove(stop)
        before = self._starts.get(start)
        if before is not None:
            self._remove(before)
            start = before
        if stop == self.end:
            self.end = start
        else:
            self._insert(start, stop)

    def take_longest(self) -> Run | None:
        """About the longest run before the end; None where there is none."""
        return self._pop(self._filled.bit_length() - 1) if self._filled else None

    def take_to(self, stop: int) -> Run | None:
        """All from the end to `stop`; None where that lies before it."""
        if stop <= self.end:
            return None
        start, self.end = self.end, stop
        return start, stop

    def _choose(self, first: int, all_bytes: int) -> Run | None:
        """A run for all; else a long one for the first at least; else new ground for all."""
        if not all_bytes:
            return self.end, self.end
        run = self._fitting(all_bytes)
        if run is None:
            run = self.take_longest()
            if run is not None and run[1] - run[0] < first:
                self._insert(*run)
                run = self._fitting(first)
        if run is None and self.end + all_bytes <= self.num_bytes:
            run = self.take_to(self.end + all_bytes)
        return run

    def _fitting(self, num_bytes: int) -> Run | None:
        """A run that is as long, or not much longer where there is one."""
        own = _bin_of(num_bytes)
        tried: list[Run] = []
        found: Run | None = None
        while found is None and own in self._bins and len(tried) < LOOKS:
            run = self._pop(own)
            if run[1] - run[0] >= num_bytes:
                found = run
            else:
                tried.append(run)
        for run in reversed(tried):
            self._insert(*run)
        above = self._filled >> (own + 1)
        if found is None and above:
            found = self._pop(own + (above & -above).bit_length())
        return found

    def _insert(self, start: int, stop: int) -> None:
        self._stops[start], self._starts[stop] = stop, start
        number = _bin_of(stop - start)
        self._bins.setdefault(number, {})[start] = None
        self._filled |= 1 << number

    def _remove(self, start: int) -> int:
        """Take a run off the map; where it stops."""
        stop = self._stops[start]
        number = _bin_of(stop - start)
        del self._bins[number][start]
        self._forget(start, stop, number)
        return stop

    def _pop(self, number: int) -> Run:
        # The newest: popitem alone costs the same however many were removed before.
        start, _ = self._bins[number].popitem()
        stop = self._stops[start]
        self._forget(start, stop, number)
        return start, stop

    def _forget(self, start: int, stop: int, number: int) -> None:
        del self._stops[start], self._starts[stop]
        if not self._bins[number]:
            del self._bins[number]
            self._filled ^= 1 << number


def _bin_of(num_bytes: int) -> int:
    """Grows with the length; runs of one bin differ by an eighth at most."""
    shift = max(num_bytes.bit_length() - 1 - _FINE_BITS, 0)
    return (shift << _FINE_BITS) + (num_bytes >> shift)
