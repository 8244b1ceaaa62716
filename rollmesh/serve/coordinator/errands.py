"""Errands to engines: each CallEngine carried out, one at a time for each engine.

    errand   waits for the one before -> sent -> its outcome is told
             a newer one comes: what waits, or only looks, is broken off;
                                an order that was sent is waited for, and its outcome told to nobody

An order that was given up on its way may be held on the road (by a network, a proxy, a hung
process) and arrive after the next: an engine would take its memory again after it had given it up,
on GPUs that are another's by then. Invariant: so no order is sent to an engine before that of the
last one is known: an answer, or the end of its connection, which an engine's end is too. Owns the
tasks; whoever hangs here is LOST by the machine's word, in its own time. Driven by process.py.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from rollmesh.core.errors import LocalShortage
from rollmesh.engine.backend import DEFAULT_BACKEND, backend_factory
from rollmesh.engine.http import HttpClient
from rollmesh.serve.coordinator.deeds import carry_out
from rollmesh.serve.coordinator.events import CallEngine, Deed, EngineDone

LOOKS = frozenset({Deed.LOOK, Deed.PROBE})
"""What changes nothing at an engine."""
AGAIN_S = 0.5
"""Between two tries of a call that could not be sent."""


class _Errand:
    """One call, and the task that carries it out."""

    def __init__(self, call: CallEngine) -> None:
        self.call = call
        self.is_sent = False
        self.task: asyncio.Task[None] | None = None

    @property
    def is_bound(self) -> bool:
        """Whether its outcome has to be waited for."""
        return self.is_sent and self.call.deed not in LOOKS


class Errands:
    """Used from one event loop."""

    def __init__(
        self,
        http: HttpClient,
        weights: Path,
        tell: Callable[[EngineDone], None],
        backend: str = DEFAULT_BACKEND,
    ) -> None:
        """`weights` is where the run publishes; `tell` hears what came of the newest calls."""
        self._http = http
        self._connect = backend_factory(backend)
        self._weights = weights
        self._tell = tell
        self._newest: dict[str, _Errand] = {}
        """By engine."""
        self._gates: dict[str, asyncio.Lock] = {}
        """By engine: who is inside may send."""
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, call: CallEngine) -> None:
        """Carry it out as soon as may be; what came of those before is of no interest any more."""
        before = self._newest.get(call.url)
        if before and before.task and not before.is_bound:
            before.task.cancel()
        errand = self._newest[call.url] = _Errand(call)
        errand.task = asyncio.get_running_loop().create_task(self._run(errand))
        self._tasks.add(errand.task)
        errand.task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all; nothing is undone."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, errand: _Errand) -> None:
        call = errand.call
        async with self._gates.setdefault(call.url, asyncio.Lock()):
            await asyncio.sleep(call.after_s)
            errand.is_sent = True
            done = await self._carry_out(errand)
        if self._newest.get(call.url) is errand:
            del self._newest[call.url]
            self._tell(done)

    async def _carry_out(self, errand: _Errand) -> EngineDone:
        """Its outcome. What could not be sent for a shortage here is repeated until a newer call
        comes, since it says nothing about the engine."""
        call = errand.call
        while True:
            try:
                return await carry_out(call, self._http, self._weights, self._connect)
            except LocalShortage as error:
                if self._newest.get(call.url) is not errand:
                    why = str(error)
                    return EngineDone(url=call.url, serial=call.serial, ok=False, detail=why)
            await asyncio.sleep(AGAIN_S)
