"""Engines that have slept: what they wake with is of this run, and need not be brought again.

    awake --seen ASLEEP--> asleep --seen JOINING--> waking --READY, or READS tables later--> awake

A pipeline on a shared fleet has its engines woken by its coordinator, which loads what the run
published last and proves it. Invariants: an engine that wakes with what the publisher would bring
is left alone; one that does not get there by itself is brought up after a moment. Driven by
publisher.py, with each table.
"""

from rollmesh.wire.fleet import EnginePhase, EngineRow

READS = 3
"""Tables that are read, one each second, before a waking engine is the publisher's."""


class Woken:
    """See the module."""

    def __init__(self) -> None:
        self._reads_left: dict[str, int] = {}

    def look(self, table: tuple[EngineRow, ...], verified: dict[str, int]) -> None:
        """A table was read; what came up by itself is noted in `verified`."""
        for row in table:
            if row.phase is EnginePhase.ASLEEP:
                self._reads_left[row.url] = READS
            elif row.url in self._reads_left:
                self._reads_left[row.url] -= 1
                if row.phase is EnginePhase.READY:
                    verified[row.url] = row.policy_version
                if row.phase is EnginePhase.READY or not self._reads_left[row.url]:
                    del self._reads_left[row.url]

    def is_waking(self, row: EngineRow) -> bool:
        """Whether it may come up by itself."""
        return row.phase is EnginePhase.JOINING and row.url in self._reads_left
