"""Free ranges of an address space or file: allocated where they fit well, and joined when freed.

- Ranges are given to one user at a time. Free runs never touch each other or the end, beyond which
  everything is free.
- Parts that are requested together are adjacent if any run is long enough.
- Runs are in bins by length, eight per doubling, so that the cost does not grow with their number:
  the two-level segregated fit of Masmano et al., ECRTS 2004. One thread at a time.
"""

from bisect import bisect_right
from collections.abc import Sequence

LOOKS = 8
"""Runs of the right bin that are tried before a longer one is cut."""
_FINE_BITS = 3

Run = tuple[int, int]
"""(start, stop)"""


class FreeSpace:
    """A range of `num_bytes`, all free at first."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.end = 0
        """End of the used part."""
        self._stops: dict[int, int] = {}
        """By start."""
        self._starts: dict[int, int] = {}
        """By stop."""
        self._bins: dict[int, dict[int, None]] = {}
        """Starts, the newest last."""
        self._filled = 0
        """A bit for each bin that has a run."""

    def take(self, marks: Sequence[int]) -> list[tuple[int, int]] | None:
        """Allocate parts, of which the n-th ends marks[n] bytes after the first begins.

        Returns pieces (start, number of consecutive parts there); None, and nothing is allocated,
        if they do not all fit. Long runs are filled before the end is moved, so that large parts
        leave little unused.
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
        """Free a range."""
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
        """Allocate about the longest run before the end; None if there is none."""
        return self._pop(self._filled.bit_length() - 1) if self._filled else None

    def take_to(self, stop: int) -> Run | None:
        """Allocate everything from the end to `stop`; None if that is before the end."""
        if stop <= self.end:
            return None
        start, self.end = self.end, stop
        return start, stop

    def _choose(self, first: int, all_bytes: int) -> Run | None:
        """Choose a run for all parts; else a long one for at least the first; else extend the
        end."""
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
        """Choose a run of at least `num_bytes`, not much longer if possible."""
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
        """Remove a run from the map; return its stop."""
        stop = self._stops[start]
        number = _bin_of(stop - start)
        del self._bins[number][start]
        self._forget(start, stop, number)
        return stop

    def _pop(self, number: int) -> Run:
        # popitem takes the newest, at the same cost however many were removed before.
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
    """Return the bin of a length; lengths in one bin differ by at most an eighth."""
    shift = max(num_bytes.bit_length() - 1 - _FINE_BITS, 0)
    return (shift << _FINE_BITS) + (num_bytes >> shift)
