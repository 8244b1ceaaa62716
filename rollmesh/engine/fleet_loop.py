"""The fleet table without a router: the Fleet machine, its clock and its probes on an event loop.

- Each probe request gets exactly one EngineProbed, whatever the engine does.
- /health is never used: it generates, and hangs while the engine is paused.
- The view gets each new table at once.
- An engine that dies, hangs or comes back changes a row and nothing else.
"""

import asyncio
import hashlib
from collections.abc import Iterable
from typing import Any

from rollmesh.core.clock import Clock, SystemClock
from rollmesh.core.errors import AddressError, EngineError, LocalShortage
from rollmesh.core.logs import get_logger
from rollmesh.engine.backend import DEFAULT_BACKEND, BackendFactory, backend_factory
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
from rollmesh.engine.members import adapter_name
from rollmesh.engine.view import FleetView
from rollmesh.wire.fleet import EngineFaulted, EnginePhase, EngineRow, JoinEngine
from rollmesh.wire.machine import Received, Ticked

ANSWER_MARGIN_S = 1.0
"""A probe ends this long before the fleet counts it as failed, so that a failure has its reason."""
PROBE_SHORTAGE_WAIT_S = 0.0
"""A probe's dial that fails for a local shortage is not repeated: the fleet asks again, and must
learn in time that the engine is not at fault."""

_IDENTITY_KEYS = ("incarnation", "random_seed", "pid", "start_time")
"""Parts of /server_info that differ between two incarnations of a server; SGLang draws a
random_seed."""


async def probe_engine(
    ask: ProbeEngine | ContinueEngine,
    http: HttpClient,
    timeout_s: float,
    connect: BackendFactory | None = None,
) -> EngineProbed:
    """Resume the engine first if `ask` is a ContinueEngine; then read its weights, incarnation and
    load."""
    try:
        client = (connect or backend_factory())(ask.url, http, read_timeout_s=timeout_s)
        async with asyncio.timeout(timeout_s):
            if isinstance(ask, ContinueEngine):
                await client.resume()
            model, server = await client.model_info(), await client.server_info()
            load = await client.loads()
            adapter = adapter_name(model.policy_version)
            is_there = adapter in await client.adapters()
    except LocalShortage as error:
        return EngineProbed(
            url=ask.url, serial=ask.serial, ok=False, is_local=True, detail=str(error)
        )
    except (AddressError, EngineError, TimeoutError) as error:
        detail = str(error) or f"no answer within {timeout_s:g} s"
        return EngineProbed(url=ask.url, serial=ask.serial, ok=False, detail=detail)
    return EngineProbed(
        url=ask.url,
        serial=ask.serial,
        ok=True,
        incarnation=incarnation_of(server),
        policy_version=model.policy_version,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        max_running=load.max_running,
        adapter=adapter if is_there else "",
    )


def incarnation_of(server_info: dict[str, Any]) -> str:
    """Return a short text that changes when the server restarts."""
    parts = repr([server_info.get(key) for key in _IDENTITY_KEYS])
    return hashlib.blake2b(parts.encode(), digest_size=6).hexdigest()


TICK_S = 0.1
OWNER = "keeper"
"""Name in the view in place of the router's incarnation."""

log = get_logger()


class FleetLoop:
    """Keeps `view` current for the engines at `urls`."""

    def __init__(
        self,
        urls: Iterable[str],
        view: FleetView,
        probe_timeout_s: float,
        clock: Clock | None = None,
        backend: str = DEFAULT_BACKEND,
    ) -> None:
        """ConfigError if `backend` is unknown."""
        self._connect = backend_factory(backend)
        self._view = view
        self._probe_timeout_s = probe_timeout_s
        self._clock = clock or SystemClock()
        self._fleet = Fleet(
            FleetSettings(
                believes_engines=True,
                answer_s=probe_timeout_s + ANSWER_MARGIN_S,
                settle_s=0.0,  # the view is in this process
            )
        )
        self._probes_due: list[ProbeEngine | ContinueEngine] = []
        self._phases: dict[str, EnginePhase] = {}
        self._silent: set[str] = set()
        """Engines whose last probe failed."""
        for url in urls:
            self._step(Received(b"", JoinEngine(0, url)))

    def rows(self) -> tuple[EngineRow, ...]:
        """Return the rows of the table."""
        return self._fleet.table().engines

    def report(self, fault: EngineFaulted) -> None:
        """Record that an engine request failed."""
        self._step(Received(b"", fault))

    async def run(self) -> None:
        """Tick and probe until cancelled."""
        http = HttpClient(shortage_wait_s=PROBE_SHORTAGE_WAIT_S)
        async with http, asyncio.TaskGroup() as probes:
            while True:
                self._step(Ticked())
                due, self._probes_due = self._probes_due, []
                for ask in due:
                    probes.create_task(self._probe(ask, http))
                await asyncio.sleep(TICK_S)

    async def _probe(self, ask: ProbeEngine | ContinueEngine, http: HttpClient) -> None:
        try:
            answer = await probe_engine(ask, http, self._probe_timeout_s, self._connect)
        except Exception as error:  # noqa: BLE001 - door: an engine's response must not end the loop
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
                self._log_changes(table.engines)
            elif isinstance(action, ProbeEngine | ContinueEngine):
                self._probes_due.append(action)

    def _log_changes(self, rows: tuple[EngineRow, ...]) -> None:
        """Log each engine that joined, left or came back."""
        for row in rows:
            if row.phase is not self._phases.get(row.url, EnginePhase.JOINING):
                self._phases[row.url] = row.phase
                write = log.warning if row.phase is EnginePhase.FENCED else log.info
                write("engine.moved", engine=row.url, phase=row.phase.value, why=row.detail)
