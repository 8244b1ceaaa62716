"""A view of the fleet whose changes a test can wait for.

It checks again only when the table has changed.
"""

import asyncio
from collections.abc import Callable

from rollmesh.engine.view import FleetView
from rollmesh.wire.fleet import EnginePhase, EngineRow

WAIT_S = 60.0


class Watch:
    def __init__(self, view: FleetView) -> None:
        self.view = view
        self._moved = asyncio.Event()
        view.listeners.append(self._moved.set)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._moved.clear()
                await self._moved.wait()

    async def row(self, url: str, condition: Callable[[EngineRow], bool]) -> EngineRow:
        """The row of that engine, once it satisfies `condition`."""
        found: list[EngineRow] = []

        def is_so() -> bool:
            row = self.view.find(url)
            found[:] = [row] if row is not None and condition(row) else []
            return bool(found)

        await self.until(is_so)
        return found[0]

    def phase(self, url: str) -> EnginePhase | None:
        row = self.view.find(url)
        return row.phase if row else None
