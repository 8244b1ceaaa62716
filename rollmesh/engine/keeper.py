"""The fleet table where there is no router: the Fleet machine, its clock and its probes, on a loop.

Invariants: every probe that the machine asks for is answered once; the view gets each new table at
once; an engine that dies, hangs or comes back changes a row and nothing else. Driven by the
stand-alone gateway, from `run` to its cancellation.
"""

import asyncio
from collections.abc import Iterable

from rollmesh.core.clock import Clock, SystemClock
from rollmesh.core.logs import get_logger
from rollmesh.engine.fleet import (
    ContinueEngine,
    EngineProbed,
    Event,
    Fleet,
    FleetSettings,
    ProbeEngine,
    PublishTable,
)
from rollmesh.engine.http import HttpClient
from rollmesh.engine.probe import PROBE_SHORTAGE_WAIT_S, probe_engine
from rollmesh.engine.view import FleetView
from rollmesh.wire.fleet import EngineFaulted, EnginePhase, EngineRow, JoinEngine
from rollmesh.wire.machine import Received, Ticked

TICK_S = 0.1
OWNER = "keeper"
"""Stands for the router's incarnation in the view."""

log = get_logger()


class FleetKeeper:
    """Keeps `view` true about the engines at `urls`."""

    def __init__(self, urls: Iterable[str], view: FleetView, clock: Clock | None = None) -> None:
        self._view = view
        self._clock = clock or SystemClock()
        self._fleet = Fleet(FleetSettings(believes_engines=True))
        self._asked: list[ProbeEngine | ContinueEngine] = []
        self._phases: dict[str, EnginePhase] = {}
        self._silent: set[str] = set()
        """Engines whose last probe failed."""
        for url in urls:
            self._step(Received(b"", JoinEngine(0, url)))

    def rows(self) -> tuple[EngineRow, ...]:
        """The table."""
        return self._fleet.table().engines

    def report(self, fault: EngineFaulted) -> None:
        """A leg of ours failed."""
        self._step(Received(b"", fault))

    async def run(self) -> None:
        """Tick and probe until cancelled."""
        http = HttpClient(shortage_wait_s=PROBE_SHORTAGE_WAIT_S)
        async with http, asyncio.TaskGroup() as probes:
            while True:
                self._step(Ticked())
                asked, self._asked = self._asked, []
                for ask in asked:
                    probes.create_task(self._probe(ask, http))
                await asyncio.sleep(TICK_S)

    async def _probe(self, ask: ProbeEngine | ContinueEngine, http: HttpClient) -> None:
        try:
            answer = await probe_engine(ask, http)
        except Exception as error:  # noqa: BLE001 - door: what an engine answers must not end us
            answer = EngineProbed(url=ask.url, serial=ask.serial, ok=False, detail=repr(error))
        if answer.ok:
            self._silent.discard(ask.url)
        elif ask.url not in self._silent and not answer.is_local:
            self._silent.add(ask.url)
            log.warning("engine.unreachable", engine=ask.url, why=answer.detail)
        self._step(answer)

    def _step(self, event: Event) -> None:
        for action in self._fleet.step(event, self._clock.now_s()):
            if isinstance(action, PublishTable):
                table = self._fleet.table()
                self._view.update(table, OWNER)
                self._tell(table.engines)
            elif isinstance(action, ProbeEngine | ContinueEngine):
                self._asked.append(action)

    def _tell(self, rows: tuple[EngineRow, ...]) -> None:
        """One line for each engine that came, went or came back."""
        for row in rows:
            if row.phase is not self._phases.get(row.url, EnginePhase.JOINING):
                self._phases[row.url] = row.phase
                say = log.warning if row.phase is EnginePhase.FENCED else log.info
                say("engine.moved", engine=row.url, phase=row.phase.value, why=row.detail)
