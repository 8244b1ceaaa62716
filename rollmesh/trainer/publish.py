"""The shell of the publisher: asks the router for leases and calls the engines.

Owns a Dialer to the router and an HTTP client, opened by the first publication in the loop that
awaits it. Invariants: `publish` returns when every engine is updated or fenced; from then on, until
`close`, engines that come back with other weights are brought up as well. Driven by the trainer, on
its background loop.
"""

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from rollmesh.core.config import PublishConfig
from rollmesh.core.errors import EngineError, EngineUnavailable
from rollmesh.core.ids import new_id
from rollmesh.core.logs import get_logger
from rollmesh.engine.client import EngineClient
from rollmesh.engine.http import HttpClient
from rollmesh.trainer.fencing import FenceAsked, FenceTold, Fencing
from rollmesh.trainer.publisher import (
    Action,
    CallEngine,
    EngineCalled,
    Event,
    Probe,
    PublishAsked,
    PublishEnded,
    Publisher,
    PublisherSettings,
    PublishReport,
    UpdatePhase,
)
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import Keys
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked
from rollmesh.wire.sockets import Dialer

TICK_S = 0.1

log = get_logger()


class PublishShell:
    """Used from one event loop."""

    def __init__(self, router: str, settings: PublishConfig, keys: Keys | None = None) -> None:
        self._router = router
        self._keys = keys
        self._publisher = Publisher(
            PublisherSettings(lease_s=settings.lease_s, probe_tolerance=settings.probe_tolerance)
        )
        self._fencing = Fencing()
        self._dialer: Dialer | None = None
        self._http: HttpClient | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._ends: dict[int, asyncio.Future[PublishReport]] = {}
        self._incarnation = ""

    async def publish(
        self, policy_version: int, folder: Path, probe: Probe | None = None
    ) -> PublishReport:
        """Bring the weights in `folder` to all engines as `policy_version`, newer than any before.

        The folder must stay until a later version has replaced it. EngineUnavailable if the shell
        is closed first.
        """
        self._open()
        ask = PublishAsked(policy_version, absolute(folder), probe)
        end: asyncio.Future[PublishReport] = asyncio.get_running_loop().create_future()
        self._ends[policy_version] = end
        self._step(ask)
        return await end

    def fence(self, asked: FenceAsked) -> None:
        """Ask the router to keep everybody from an engine; what becomes of it is logged."""
        self._open()
        self._step_fencing(asked)

    async def close(self) -> None:
        """Stop; a lease still held is undone by the router when it lapses."""
        log.info("publisher.closed", unfinished=self._publisher.phases())
        if self._timer:
            self._timer.cancel()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        for end in self._ends.values():
            end.set_exception(EngineUnavailable("the publisher stops"))
        self._ends.clear()
        if self._dialer:
            self._dialer.close()
        if self._http:
            await self._http.close()

    def _open(self) -> None:
        if self._dialer:
            return
        loop = asyncio.get_running_loop()
        self._http = HttpClient()
        self._dialer = Dialer(self._router, new_id("publisher-"), self._keys)
        self._dialer.attach(loop, self._on_packet)
        self._timer = loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._step(Ticked())
        self._step_fencing(Ticked())
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _on_packet(self, packet: Packet) -> None:
        self._incarnation = packet.router or self._incarnation
        received = Received(ROUTER, packet.message, packet.body, packet.router)
        self._step(received)
        self._step_fencing(received)

    def _step(self, event: Event) -> None:
        for action in self._publisher.step(event, time.monotonic()):
            self._carry_out(action)

    def _step_fencing(self, event: FenceAsked | Received | Ticked) -> None:
        for action in self._fencing.step(event, time.monotonic()):
            self._carry_out(action)

    def _carry_out(self, action: Action | FenceTold) -> None:
        match action:
            case Send():
                assert self._dialer
                self._dialer.send(Packet(action.message, self._incarnation))
            case FenceTold(asked, ""):
                log.warning("engine.fenced", url=asked.url, why=asked.detail)
            case FenceTold(asked, error):
                log.warning("engine.not_fenced", url=asked.url, why=error)
            case CallEngine():
                self._spawn(self._call(action))
            case PublishEnded(report):
                if report.failed:
                    log.warning(
                        "engine.update_failed",
                        policy_version=report.policy_version,
                        failed=report.failed,
                    )
                end = self._ends.pop(report.policy_version, None)
                if end and not end.done():
                    end.set_result(report)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        call = asyncio.get_running_loop().create_task(work)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _call(self, call: CallEngine) -> None:
        assert self._http
        client = EngineClient(call.url, self._http)
        try:
            logprobs = await carry_out(client, call)
        except EngineError as error:
            self._step(EngineCalled(call.url, call.serial, False, str(error)))
        else:
            self._step(EngineCalled(call.url, call.serial, True, "", logprobs))


def absolute(folder: Path) -> str:
    """The path as processes with another working directory know it."""
    return str(folder.absolute())


async def carry_out(client: EngineClient, call: CallEngine) -> tuple[float, ...]:
    """Do to the engine what the machine asks for; the probe's log-probs where it asks for them."""
    target = call.target
    match call.phase:
        case UpdatePhase.PAUSING:
            await client.pause("abort")
        case UpdatePhase.FLUSHING:
            await client.flush()
        case UpdatePhase.LOADING:
            await client.update_from_disk(Path(target.folder), target.policy_version)
        case UpdatePhase.RESUMING | UpdatePhase.UNDOING:
            await client.resume()
        case UpdatePhase.SCORING:
            assert target.probe
            key = str(target.policy_version)
            return tuple(await client.score(target.probe.token_ids, key))
        case _:
            raise AssertionError(f"no call belongs to {call.phase}")
    return ()
