"""Generations that wait until an engine has a free place for their next leg.

An engine gets an eighth more requests of this process than it runs at a time, or
`engine.max_inflight`. The others wait here, and sessions take turns for each free place. So a
session with many turns does not delay those of another session in the engine's own queue, which is
in order of arrival.

Invariant: while generations wait for an engine, it has no free place. legs.py calls `next` whenever
a leg has ended or the fleet table has changed.
"""

from rollmesh.core.fair_queue import FairQueue
from rollmesh.engine.view import FleetView
from rollmesh.runtime.generation_view import Generation
from rollmesh.wire.fleet import EngineRow

MARGIN_DIVISOR = 8
"""An engine gets 1/8 more requests than it runs at a time, so that it has the next one when one
ends."""


class EngineQueues:
    """See the module. One per sampler."""

    def __init__(self, view: FleetView, max_inflight: int = 0) -> None:
        self._view = view
        self._max_inflight = max_inflight
        self._queues: dict[str, FairQueue[Generation]] = {}
        """By the engine's URL; none is empty."""
        self._urls: dict[Generation, str] = {}

    def __len__(self) -> int:
        """Number of generations that wait."""
        return len(self._urls)

    def urls(self) -> list[str]:
        """Engines for which generations wait."""
        return list(self._queues)

    def admit(self, generation: Generation, row: EngineRow) -> bool:
        """Whether its leg may start at this engine now; if not, it waits for its turn there."""
        url = self._urls.get(generation)
        if url == row.url:
            return False
        if url is not None:
            self.leave(generation)
        if not self._is_full(row):
            return True
        self._urls[generation] = row.url
        session_key = generation.machine.request.session_key
        self._queues.setdefault(row.url, FairQueue()).put(session_key, generation)
        self._view.count(row.url, queued=1)
        return False

    def leave(self, generation: Generation) -> None:
        """It waits no more, if it did."""
        url = self._urls.pop(generation, None)
        if url is None:
            return
        self._view.count(url, queued=-1)
        queue = self._queues[url]
        queue.remove(generation)
        if not queue:
            del self._queues[url]

    def next(self, url: str) -> Generation | None:
        """Take the generation whose turn it is out of the queue, if the engine has a free place."""
        queue, row = self._queues.get(url), self._view.find(url)
        if not queue or row is None or self._is_full(row):
            return None
        generation = queue.take()
        assert generation is not None
        del self._urls[generation]
        self._view.count(url, queued=-1)
        if not queue:
            del self._queues[url]
        return generation

    def _is_full(self, row: EngineRow) -> bool:
        limit = self._max_inflight
        if not limit and row.max_running:
            limit = row.max_running + max(1, row.max_running // MARGIN_DIVISOR)
        return bool(limit) and self._view.num_legs(row.url) >= limit
