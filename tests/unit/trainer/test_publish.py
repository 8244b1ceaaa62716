"""The publisher's shell: a real Dialer to a fleet on a real Hub, scripted engines behind it."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from rollmesh.core.config import PublishConfig
from rollmesh.core.errors import EngineUnavailable
from rollmesh.engine.backend import EngineBackend
from rollmesh.engine.fleet import ContinueEngine, EngineProbed, Fleet, ProbeEngine
from rollmesh.engine.fleet_loop import probe_engine
from rollmesh.engine.http import HttpClient
from rollmesh.testing.engine import ScriptedEngine, logprob_of
from rollmesh.trainer.models.folders import partial_path
from rollmesh.trainer.publish import PublishShell
from rollmesh.trainer.weights.transfer import Payload, Transfer, WeightBuffer
from rollmesh.trainer.weights.verdicts import Probe
from rollmesh.wire.fleet import EnginePhase, JoinEngine
from rollmesh.wire.frames import Packet
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.sockets import Hub, WakeSignal, wait

PATIENCE_S = 60.0


class FleetHub:
    """The fleet's part of a router, on a thread; probes run on the test's loop."""

    def __init__(self, *urls: str) -> None:
        self.fleet = Fleet()
        self.hub = Hub("tcp://127.0.0.1:0")
        self.bell = WakeSignal()
        self.answers: list[EngineProbed] = []
        self.stopped = False
        self.loop = asyncio.get_running_loop()
        self.probes: list[Future[None]] = []
        for url in urls:
            self.step(Received(b"", JoinEngine(0, url)))
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def step(self, event: Received | EngineProbed | Ticked) -> None:
        for action in self.fleet.step(event, time.monotonic()):
            match action:
                case Send(route, message) if route:
                    self.hub.send(route, Packet(message, "router"))
                case ProbeEngine() | ContinueEngine():
                    probe = asyncio.run_coroutine_threadsafe(self.probe(action), self.loop)
                    self.probes.append(probe)

    async def probe(self, ask: ProbeEngine | ContinueEngine) -> None:
        async with HttpClient() as http:
            self.answers.append(await probe_engine(ask, http, 2.0))
        self.bell.ring()

    def run(self) -> None:
        while not self.stopped:
            wait([self.hub], self.bell, 0.05)
            for route, packet in self.hub.receive():
                self.step(Received(route, packet.message))
            while self.answers:
                self.step(self.answers.pop())
            self.step(Ticked())

    async def close(self) -> None:
        self.stopped = True
        self.bell.ring()
        await asyncio.to_thread(self.thread.join)
        await asyncio.gather(*map(asyncio.wrap_future, self.probes))
        self.hub.close()
        self.bell.close()


class Mesh:
    """Two engines, their fleet, and a publisher."""

    def __init__(self, *engines: ScriptedEngine, settings: PublishConfig | None = None) -> None:
        self.engines = engines
        self.hub = FleetHub(*(engine.url for engine in engines))
        self.shell = PublishShell(self.hub.hub.address, settings or PublishConfig())

    def phases(self) -> list[EnginePhase]:
        return [row.phase for row in self.hub.fleet.table().engines]


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with ScriptedEngine() as first, ScriptedEngine() as second:
        mesh = Mesh(first, second)
        yield mesh
        await mesh.shell.close()
        await mesh.hub.close()


def probe_of(policy_version: int) -> Probe:
    return Probe((1, 2, 3), (logprob_of(policy_version, 2), logprob_of(policy_version, 3)))


async def test_all_engines_serve_the_published_weights(mesh: Mesh, tmp_path: Path) -> None:
    for policy_version in (1, 2):
        report = await mesh.shell.publish(policy_version, tmp_path, probe_of(policy_version))
        assert set(report.updated) == {engine.url for engine in mesh.engines}
        assert report.failed == ()
        assert report.gap_s < 1.0
    assert [engine.weight_version for engine in mesh.engines] == ["2", "2"]
    assert not any(engine.is_paused for engine in mesh.engines)
    assert set(mesh.phases()) == {EnginePhase.READY}


async def test_engine_gets_the_folder_as_an_absolute_path(mesh: Mesh) -> None:
    await mesh.shell.publish(1, Path("relative"))
    [path] = {
        request.body["model_path"]
        for engine in mesh.engines
        for request in engine.seen
        if request.path == "/update_weights_from_disk"
    }
    assert Path(path).is_absolute()


async def test_engine_that_cannot_load_is_reported_and_the_other_serves(
    mesh: Mesh, tmp_path: Path
) -> None:
    bad, good = mesh.engines
    bad.update_error = "no such folder"
    report = await mesh.shell.publish(1, tmp_path)
    assert report.updated == (good.url,)
    assert "HTTP 400" in report.failed[0]
    assert not bad.is_paused


async def test_weights_that_did_not_arrive_are_detected(mesh: Mesh, tmp_path: Path) -> None:
    idle, good = mesh.engines
    idle.update_is_idle = True
    report = await mesh.shell.publish(1, tmp_path, probe_of(1))
    assert report.updated == (good.url,)
    assert idle.url in report.failed[0]


async def test_dead_engine_does_not_delay_a_publication(mesh: Mesh, tmp_path: Path) -> None:
    dead, good = mesh.engines
    await dead.die()
    report = await mesh.shell.publish(1, tmp_path)
    assert report.updated == (good.url,)
    assert report.failed


async def test_close_ends_a_publication_that_cannot_end(tmp_path: Path) -> None:
    shell = PublishShell("tcp://127.0.0.1:1", PublishConfig())
    publication = asyncio.create_task(shell.publish(1, tmp_path))
    done, _ = await asyncio.wait([publication], timeout=0.2)
    assert not done, "no router answers"
    await asyncio.wait_for(shell.close(), PATIENCE_S)
    with pytest.raises(EngineUnavailable, match="publisher stops"):
        await asyncio.wait_for(publication, PATIENCE_S)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing of the shell keeps running"


async def test_close_waits_for_a_publication_that_can_end(tmp_path: Path) -> None:
    async with ScriptedEngine() as engine:
        mesh = Mesh(engine)
        try:
            report, _ = await asyncio.gather(
                mesh.shell.publish(1, tmp_path), mesh.shell.close(PATIENCE_S)
            )
        finally:
            await mesh.hub.close()
    assert report.updated == (engine.url,)


class StuckTransport:
    """A transport whose load never ends; a cancelled load records whether its engine is paused."""

    name = "stuck"

    def __init__(self, engines: Iterable[ScriptedEngine]) -> None:
        self.engines = {engine.url: engine for engine in engines}
        self.was_paused: list[bool] = []
        """Per engine, when its load was given up."""
        self.gate = asyncio.Event()

    async def begin(
        self, payload: Payload, clients: Sequence[EngineBackend], timeout_s: float
    ) -> None:
        """Do nothing."""

    async def load(self, client: EngineBackend, _payload: Payload, _timeout_s: float) -> None:
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # it ends what it has begun
            self.was_paused.append(self.engines[client.url].is_paused)
            raise
        raise EngineUnavailable("too late")

    async def finish(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


async def test_engine_resumes_only_after_its_undone_load_has_stopped(
    tmp_path: Path,
) -> None:
    async with ScriptedEngine() as first, ScriptedEngine() as second:
        transport = StuckTransport([first, second])
        mesh = Mesh(first, second, settings=PublishConfig(lease_s=1.0))
        mesh.shell._transfer = Transfer(transport, 1.0)  # noqa: SLF001 - settings name only real ways
        buffer, folder = WeightBuffer(), tmp_path / "v000001"
        partial_path(folder).mkdir()
        part = buffer.store({"w": torch.zeros(4)}, {"w"}, tmp_path)
        try:
            publication = asyncio.create_task(mesh.shell.publish(1, folder, None, (part,)))
            await asyncio.wait([publication], timeout=PATIENCE_S)
            assert publication.done()
            whys = [each.split(": ", 1)[1] for each in publication.result().failed]
            assert whys == ["loading: took too long"] * 2
            assert transport.was_paused == [True, True]
            for engine in mesh.engines:
                assert not engine.is_paused
                assert engine.num_seen("/update_weights_from_disk") == 0
        finally:
            await mesh.shell.close()
            await mesh.hub.close()
            buffer.close()
