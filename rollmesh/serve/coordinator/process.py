"""Coordinator process: two sockets, an HTTP client, and the machine between them.

- One call to an engine at a time (engine_ops.py).
- A scheduler or router that cannot be reached changes nothing and is dialled forever.
- Ready is reported when the state of each engine is known. On exit everything stays as it is; the
  next process finds out.
"""

import asyncio
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec
import uvloop

from rollmesh.core.clock import Clock, SystemClock
from rollmesh.core.config import EngineConfig
from rollmesh.core.ids import new_id
from rollmesh.core.logs import get_logger, setup
from rollmesh.core.process import OK, Ready, announce, stop_event
from rollmesh.engine.http import HttpClient
from rollmesh.serve.coordinator.engine_ops import EngineOps
from rollmesh.serve.coordinator.machine import Coordinator
from rollmesh.serve.coordinator.worker import SCHEDULER, CoordinatorEvent, CoordinatorSettings
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import Keys, Role, check_dial, read_keys, read_scheduler_keys
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked
from rollmesh.wire.scheduling import SchedulerHello, WorkerPhase, WorkerTruth, signed
from rollmesh.wire.sockets import Dialer

TICK_S = 0.05
ROLE = "coordinator"

log = get_logger()


class CoordinatorOptions(msgspec.Struct, frozen=True, kw_only=True):
    settings: CoordinatorSettings
    scheduler: str
    router: str
    weights: Path
    """Where the run publishes; may be missing at first."""
    engine: EngineConfig = EngineConfig()
    """Protocol of the engines, and time limits of calls to them."""
    run_folder: Path | None = None
    """Folder of the log; None logs to stderr."""
    ready_fd: int | None = None
    token: str = ""
    """Token of the pipeline, required by the scheduler."""


KeysByRoute = Mapping[bytes, Keys | None]


def run_coordinator(ask: CoordinatorOptions) -> int:
    """Coordinate until SIGTERM or SIGINT; one-line AddressError for an invalid address."""
    setup(ROLE, ask.run_folder)
    keys = {
        SCHEDULER: read_scheduler_keys(role=Role.PUBLISHER),
        ROUTER: read_keys(role=Role.PUBLISHER),
    }
    check_dial(ask.scheduler, keys[SCHEDULER])
    check_dial(ask.router, keys[ROUTER])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(ask, keys))
    return OK


async def _serve(ask: CoordinatorOptions, keys: KeysByRoute) -> None:
    stop = stop_event(asyncio.get_running_loop())
    shell = CoordinatorShell(ask, keys)
    log.info("coordinator.started", pipeline_id=ask.settings.pipeline_id)
    try:
        await stop.wait()
    finally:
        await shell.close()
        log.info("coordinator.stopped")


class CoordinatorShell:
    """Performs the machine's I/O; used from one event loop."""

    def __init__(
        self, ask: CoordinatorOptions, keys: KeysByRoute | None = None, clock: Clock | None = None
    ) -> None:
        keys = keys or {}
        self._ask = ask
        self._clock = clock or SystemClock()
        started_s = self._clock.unix_s()
        self.machine = Coordinator(msgspec.structs.replace(ask.settings, started_s=started_s))
        self._http = HttpClient(connect_timeout_s=ask.engine.connect_timeout_s)
        self._engine_ops = EngineOps(self._http, ask.weights, self._step, ask.engine)
        self._incarnations = {SCHEDULER: "", ROUTER: ""}
        self._is_announced = False
        self._refusal = ""
        self._logged: tuple[WorkerTruth, ...] = ()
        loop = asyncio.get_running_loop()
        # Unique to this process: messages to an earlier one must not reach it.
        name = new_id("coordinator-")
        self._dialers = {
            SCHEDULER: Dialer(ask.scheduler, name, keys.get(SCHEDULER)),
            ROUTER: Dialer(ask.router, name, keys.get(ROUTER)),
        }
        for route, dialer in self._dialers.items():
            dialer.attach(loop, partial(self._on_packet, route))
        self._timer = loop.call_later(TICK_S, self._tick)

    async def close(self) -> None:
        """Stop; nothing is undone."""
        self._timer.cancel()
        await self._engine_ops.close()
        for dialer in self._dialers.values():
            dialer.close()
        await self._http.close()

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self._step(Ticked())
        if self.machine.has_reported and not self._is_announced:
            self._is_announced = True
            announce(self._ask.ready_fd, Ready(ROLE, os.getpid(), ""))

    def _on_packet(self, route: bytes, packet: Packet) -> None:
        self._incarnations[route] = packet.router or self._incarnations[route]
        if isinstance(packet.message, SchedulerHello):
            self._log_refusal(packet.message.error)
        self._step(Received(route, packet.message, packet.body, packet.router))

    def _step(self, event: CoordinatorEvent) -> None:
        for action in self.machine.step(event, self._clock.now_s()):
            if isinstance(action, Send):
                message = action.message
                if action.route == SCHEDULER:
                    message = signed(message, self._ask.token)
                packet = Packet(message, self._incarnations[action.route])
                self._dialers[action.route].send(packet)
            else:
                self._engine_ops.send(action)
        self._log_changes()

    def _log_refusal(self, error: str) -> None:
        if error and error != self._refusal:
            log.error("scheduler.refuses", why=error)
        self._refusal = error

    def _log_changes(self) -> None:
        truths = self.machine.truths()
        if truths == self._logged:
            return
        before = {each.rank: each.phase for each in self._logged}
        self._logged = truths
        for each in truths:
            if before.get(each.rank) is not each.phase:
                is_lost = each.phase is WorkerPhase.LOST
                write = log.warning if is_lost and self._is_announced else log.info
                write(f"engine.{each.phase.value}", rank=each.rank, detail=each.detail)
