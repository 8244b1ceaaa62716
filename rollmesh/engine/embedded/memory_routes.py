"""The routes by which the engine's memory is given up and taken again: SGLang's names.

    /release_memory_occupation   weights and keys go, at once; refused while requests run
    /resume_memory_occupation    keys have room again; weights are gone until some are loaded

What arrives meanwhile waits, as while paused. SGLang does the same with --enable-memory-saver, and
without it answers and does nothing. Invariant: both may be said again. Driven by routes.py.
"""

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from rollmesh.core.errors import EngineRefused
from rollmesh.engine.embedded.engine import Engine
from rollmesh.engine.embedded.replies import read_body, reply
from rollmesh.engine.embedded.steploop import StepLoop
from rollmesh.engine.embedded.weight_routes import WeightRoutes

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class MemoryBody(msgspec.Struct):
    """Both; SGLang's tags name parts of the memory."""

    tags: list[str] | None = None


class MemoryRoutes:
    """See the module."""

    def __init__(self, steps: StepLoop, weights: WeightRoutes) -> None:
        self._steps = steps
        self._weights = weights

    def handlers(self) -> dict[str, dict[str, Handler]]:
        """By path and method."""
        return {
            "/release_memory_occupation": {"POST": self._release},
            "/resume_memory_occupation": {"POST": self._resume},
        }

    async def _release(self, request: web.BaseRequest) -> web.StreamResponse:
        self._weights.drop_staged()
        return await self._order(request, Engine.release)

    async def _resume(self, request: web.BaseRequest) -> web.StreamResponse:
        return await self._order(request, Engine.retake)

    async def _order(
        self, request: web.BaseRequest, order: Callable[[Engine], str]
    ) -> web.StreamResponse:
        if read_body(await request.read(), MemoryBody).tags is not None:
            raise EngineRefused("tags: this engine's memory goes and comes as a whole")
        if why := await self._steps.ask(order):
            raise EngineRefused(why)
        return reply(None)
