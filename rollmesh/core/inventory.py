"""What a process holds: bytes by what they are, and how long each of its tables is.

Owns the list of who can say so; the rooms keep their own counts. Invariants: a table is of live
work, and empty when nothing is under way, or a cache, which is bounded by itself; each name stands
in docs/explanation/memory.md with what bounds it. Read on the thread that owns the tables. Driven
by the processes, who join their rooms' counts here, and by their expositions.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from rollmesh.core.metrics import Figure

Counts = Callable[[], Mapping[str, int]]
"""Reads them, by name."""


class Inventory:
    """See the module."""

    def __init__(self) -> None:
        self._held: list[Counts] = []
        self._tables: list[Counts] = []
        self._caches: list[Counts] = []

    def add(
        self,
        held: Counts | None = None,
        tables: Counts | None = None,
        caches: Counts | None = None,
    ) -> None:
        """Count these, too: bytes in memory, entries of live work, entries of caches."""
        for counts, into in (held, self._held), (tables, self._tables), (caches, self._caches):
            if counts is not None:
                into.append(counts)

    def held(self) -> dict[str, int]:
        """Bytes by what they are."""
        return _sum(self._held)

    def held_bytes(self) -> int:
        """All together."""
        return sum(self.held().values())

    def figures(self) -> Iterator[Figure]:
        """A source for the exposition."""
        yield from counted(self.held(), _sum(self._tables), _sum(self._caches))


def counted(
    held: Mapping[str, int], tables: Mapping[str, int], caches: Mapping[str, int]
) -> Iterator[Figure]:
    """The figures of bytes, live work and caches."""
    for what, number in held.items():
        yield Figure("held_bytes", number, "Bytes in memory, as counted.", {"what": what})
    for table, number in tables.items():
        yield Figure("entries", number, "Live work, by table.", {"table": table})
    for cache, number in caches.items():
        yield Figure("cache_entries", number, "Kept within bounds.", {"cache": cache})


def _sum(sources: list[Counts]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for read in sources:
        counts.update(read())
    return counts
