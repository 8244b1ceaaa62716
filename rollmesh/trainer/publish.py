"""The shell of the publisher: requests leases from the router, and calls the engines.

- An engine gets one call at a time; a call that is superseded does not continue.
- `publish` returns when every engine is updated or fenced. From then on, until `close`, engines
  that return with other weights are updated too.
"""

import asyncio
import contextlib
import time
from pathlib import Path

from rollmesh.core.config import EngineConfig, PublishConfig, PublishMode
from rollmesh.core.errors import AddressError, EngineError, EngineUnavailable, LocalShortage
from rollmesh.core.ids import new_id
from rollmesh.core.logs import get_logger
from rollmesh.core.model_folders import WeightsProbe, leave_probe
from rollmesh.core.types import UNVERSIONED
from rollmesh.engine.backend import EngineBackend, configured_backend
from rollmesh.engine.http import HttpClient
from rollmesh.engine.shared_memory import SharedSegment
from rollmesh.trainer.reports.exactness import FenceRequested, FenceResult, Fencing
from rollmesh.trainer.weights.publisher import (
    Accepted,
    Action,
    Doubted,
    Event,
    PhaseResult,
    PublishEnded,
    Publisher,
    PublisherSettings,
    PublishReport,
    PublishRequested,
    PublishState,
    RunPhase,
    Superseded,
    UpdatePhase,
)
from rollmesh.trainer.weights.transfer import Payload, Transfer, WeightTransport
from rollmesh.trainer.weights.transports.distributed import DistributedTransport
from rollmesh.trainer.weights.transports.sglang import adapter_in, drop_adapters, swap_adapter
from rollmesh.trainer.weights.transports.tensor import TensorTransport
from rollmesh.trainer.weights.verdicts import Probe
from rollmesh.wire.fleet import PublisherLeft
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import Keys
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked
from rollmesh.wire.sockets import Dialer

TICK_S = 0.1

log = get_logger()


class PublishShell:
    """Publishes weights; used from one event loop."""

    def __init__(
        self,
        router: str,
        settings: PublishConfig,
        keys: Keys | None = None,
        name: str = "",
        engine: EngineConfig | None = None,
    ) -> None:
        """`name` is the name of the run, of which one process publishes at a time."""
        self._router = router
        engine = engine or EngineConfig()
        self._connect = configured_backend(engine)
        self._connect_timeout_s = engine.connect_timeout_s
        self._keys = keys
        self._tolerance = settings.probe_tolerance
        self._shortage_wait_s = settings.shortage_wait_s
        self._publisher = Publisher(
            PublisherSettings(
                name=name, lease_s=settings.lease_s, probe_tolerance=settings.probe_tolerance
            )
        )
        self._transfer = Transfer(transport_for(settings.mode), settings.lease_s)
        self._fencing = Fencing()
        self._dialer: Dialer | None = None
        self._http: HttpClient | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._latest: dict[str, asyncio.Task[None]] = {}
        """The newest call in progress, by engine."""
        self._ends: dict[int, asyncio.Future[PublishReport]] = {}
        self._incarnation = ""
        self.fleet = PublishState()

    async def publish(
        self,
        policy_version: int,
        folder: Path,
        probe: Probe | None = None,
        parts: tuple[SharedSegment, ...] = (),
    ) -> PublishReport:
        """Load the weights in `folder` into all engines as `policy_version`, newer than any before.

        If the weights are in `parts`, the folder is completed from them meanwhile. On return the
        parts are no longer read; the folder must stay until a later version has replaced it.
        Raises EngineUnavailable if the shell is closed first, ModelError if the folder cannot be
        written and engines wait for it.
        """
        self._open()
        payload = Payload(policy_version, absolute(folder), parts)
        end: asyncio.Future[PublishReport] = asyncio.get_running_loop().create_future()
        self._ends[policy_version] = end
        try:
            await self._transfer.begin(payload, self._serving())
            if not end.done():
                adapter = adapter_in(policy_version, folder)
                self._step(PublishRequested(policy_version, payload.folder, probe, adapter))
            return await end
        finally:
            self._ends.pop(policy_version, None)
            await self._transfer.finish()
            if probe:
                await self._leave_probe(folder, probe)

    async def _leave_probe(self, folder: Path, probe: Probe) -> None:
        """Leave the probe for the coordinator of engines that will wake with these weights."""
        tolerance = self._tolerance
        left = WeightsProbe(token_ids=probe.token_ids, logprobs=probe.logprobs, tolerance=tolerance)
        if not adapter_in(0, folder):  # an adapter's weights are not all in its folder
            with contextlib.suppress(OSError):  # without it only their version is checked
                await asyncio.to_thread(leave_probe, folder, left)

    def _serving(self) -> list[EngineBackend]:
        assert self._http
        return [self._connect(url, self._http) for url in self._publisher.serving()]

    def is_loading(self, folder: Path) -> bool:
        """Whether an engine may be reading this version's folder; from any thread."""
        return self._transfer.is_loading(folder)

    def fence(self, asked: FenceRequested) -> None:
        """Ask the router to fence an engine; the result is logged."""
        self._open()
        self._step_fencing(asked)

    async def close(self, finish_s: float = 0.0) -> None:
        """Stop, and have the router undo what is still leased.

        A publication in progress may end within `finish_s`: an engine with weights that are not
        verified does not serve until there is another publisher.
        """
        if ends := [*self._ends.values()]:
            await asyncio.wait(ends, timeout=finish_s)
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
            self._dialer.send(Packet(PublisherLeft(), self._incarnation))
            self._dialer.close()
        await self._transfer.close()
        if self._http:
            await self._http.close()

    def _open(self) -> None:
        if self._dialer:
            return
        loop = asyncio.get_running_loop()
        self._http = HttpClient(
            connect_timeout_s=self._connect_timeout_s, shortage_wait_s=self._shortage_wait_s
        )
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
        self.fleet.all_asleep = self._publisher.all_asleep()

    def _step_fencing(self, event: FenceRequested | Received | Ticked) -> None:
        for action in self._fencing.step(event, time.monotonic()):
            self._carry_out(action)

    def _carry_out(self, action: Action | FenceResult) -> None:
        match action:
            case Send():
                assert self._dialer
                self._dialer.send(Packet(action.message, self._incarnation))
            case FenceResult(asked, ""):
                log.warning("engine.fenced", url=asked.url, why=asked.detail)
            case FenceResult(asked, error):
                log.warning("engine.not_fenced", url=asked.url, why=error)
            case RunPhase():
                self._spawn(action)
            case Accepted() | Doubted() | Superseded():
                self._note(action)
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

    def _note(self, action: Accepted | Doubted | Superseded) -> None:
        match action:
            case Accepted(policy_version):
                self.fleet.accepted_version = policy_version
            case Doubted(url, why):
                fix = "restart it; it is used meanwhile, since no other engine serves"
                log.error("engine.doubted", error=f"{url}: {why}", fix=fix)
            case Superseded(policy_version, by):
                remedy = "end one of the two, or publish under a newer version"
                log.warning(
                    "publisher.superseded", policy_version=policy_version, by=by, remedy=remedy
                )

    def _spawn(self, call: RunPhase) -> None:
        """Start a call, and cancel the one in progress at this engine, which the machine no longer
        expects."""
        before = self._latest.get(call.url)
        if before:
            before.cancel()
        task = asyncio.get_running_loop().create_task(self._call(call, before))
        self._latest[call.url] = task
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _call(self, call: RunPhase, before: asyncio.Task[None] | None) -> None:
        assert self._http
        if before:
            await asyncio.wait([before])  # it restores the engine first
        await asyncio.sleep(call.after_s)
        try:
            client = self._connect(call.url, self._http)
            called = await carry_out(client, call, self._transfer)
        except (AddressError, EngineError) as error:
            is_local = isinstance(error, LocalShortage)
            called = PhaseResult(call.url, call.serial, False, str(error), is_local=is_local)
        if self._latest.get(call.url) is asyncio.current_task():
            del self._latest[call.url]
            self._step(called)


def absolute(folder: Path) -> str:
    """The path for processes with another working directory."""
    return str(folder.absolute())


async def carry_out(client: EngineBackend, call: RunPhase, transfer: Transfer) -> PhaseResult:
    """Run a phase at the engine; raise EngineError if it fails."""
    target = call.target
    logprobs: tuple[float, ...] = ()
    num_requests, policy_version = 0, UNVERSIONED
    match call.phase:
        case UpdatePhase.DRAINING:
            load = await client.loads()
            num_requests = load.num_running + load.num_waiting
        case UpdatePhase.PAUSING:
            await client.pause("abort")
        case UpdatePhase.FLUSHING:
            await client.flush()
        case UpdatePhase.LOADING if target.adapter:
            folder = Path(target.folder)
            await swap_adapter(client, target.policy_version, folder, target.adapter)
        case UpdatePhase.LOADING:
            await drop_adapters(client)
            await transfer.load(client, target.policy_version, target.folder)
        case UpdatePhase.RESUMING | UpdatePhase.UNDOING:
            await client.resume()
        case UpdatePhase.SCORING:
            assert target.probe
            key = str(target.policy_version)
            logprobs = tuple(await client.score(target.probe.token_ids, key, target.adapter))
            policy_version = (await client.model_info()).policy_version
        case _:
            raise AssertionError(f"no call belongs to {call.phase}")
    return PhaseResult(call.url, call.serial, True, "", logprobs, num_requests, policy_version)


def transport_for(mode: PublishMode) -> WeightTransport | None:
    """None for `disk`, which needs no more than the file that there always is."""
    match mode:
        case "disk":
            return None
        case "tensor":
            return TensorTransport()
        case "distributed":
            return DistributedTransport()
