"""Probes of engines, and the fleet loop of a mesh without a router."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollmesh.engine.backend import READ_TIMEOUT_S, EngineBackend
from rollmesh.engine.fleet import ContinueEngine, EngineProbed, ProbeEngine
from rollmesh.engine.fleet_loop import FleetLoop, incarnation_of, probe_engine
from rollmesh.engine.http import HttpClient
from rollmesh.engine.sglang import SglangBackend
from rollmesh.engine.view import FleetView
from rollmesh.testing.engine import ScriptedEngine
from rollmesh.wire.fleet import EngineFaulted, EnginePhase
from tests.shortage import no_descriptor_left
from tests.watch import Watch

PROBE_TIMEOUT_S = 2.0


async def probe(ask: ProbeEngine | ContinueEngine) -> EngineProbed:
    async with HttpClient() as http:
        return await probe_engine(ask, http, PROBE_TIMEOUT_S)


async def test_probe_reads_version_and_load() -> None:
    async with ScriptedEngine(weight_version="3") as engine:
        probed = await probe(ProbeEngine(engine.url, 7))
    assert probed.ok
    assert (probed.url, probed.serial, probed.policy_version) == (engine.url, 7, 3)


async def test_continue_resumes_a_paused_engine_and_probes_it() -> None:
    async with ScriptedEngine() as engine:
        engine.is_paused = True
        assert (await probe(ProbeEngine(engine.url, 1))).ok
        assert engine.is_paused
        assert (await probe(ContinueEngine(engine.url, 2))).ok
        assert not engine.is_paused


async def test_restart_changes_the_incarnation() -> None:
    async with ScriptedEngine() as engine:
        first = await probe(ProbeEngine(engine.url, 1))
        again = await probe(ProbeEngine(engine.url, 2))
        await engine.restart()
        other = await probe(ProbeEngine(engine.url, 3))
    assert first.incarnation == again.incarnation != other.incarnation


async def test_dead_engine_answers_not_ok_with_a_reason() -> None:
    async with ScriptedEngine() as engine:
        await engine.die()
        probed = await probe(ProbeEngine(engine.url, 1))
    assert not probed.ok
    assert engine.url in probed.detail


async def test_reads_of_a_probe_have_the_probes_limit() -> None:
    """The limit may be longer than that of other reads."""
    limits_s: list[float] = []

    def connect(
        url: str, http: HttpClient, *, read_timeout_s: float = READ_TIMEOUT_S, **more: Any
    ) -> EngineBackend:
        limits_s.append(read_timeout_s)
        return SglangBackend(url, http, read_timeout_s=read_timeout_s, **more)

    async with ScriptedEngine() as engine, HttpClient() as http:
        ask = ProbeEngine(engine.url, 1)
        assert (await probe_engine(ask, http, 3 * READ_TIMEOUT_S, connect)).ok
    assert limits_s == [3 * READ_TIMEOUT_S]


async def test_weights_without_a_number_have_no_version() -> None:
    async with ScriptedEngine(weight_version="default") as engine:
        assert (await probe(ProbeEngine(engine.url, 1))).policy_version == -1


def test_incarnation_follows_the_seed_that_a_server_draws_at_its_start() -> None:
    assert incarnation_of({"random_seed": 1}) != incarnation_of({"random_seed": 2})


async def test_a_probe_without_a_local_descriptor_is_not_the_engines_failure() -> None:
    async with ScriptedEngine() as engine, HttpClient(shortage_wait_s=0.0) as http:
        with no_descriptor_left():
            probed = await probe_engine(ProbeEngine(engine.url, 1), http, PROBE_TIMEOUT_S)
        assert (probed.ok, probed.is_local) == (False, True)
        assert "ulimit -n" in probed.detail
        assert (await probe_engine(ProbeEngine(engine.url, 2), http, PROBE_TIMEOUT_S)).ok


@asynccontextmanager
async def running_fleet(*engines: ScriptedEngine) -> AsyncIterator[tuple[FleetLoop, Watch]]:
    watch = Watch(FleetView())
    fleet = FleetLoop([engine.url for engine in engines], watch.view, PROBE_TIMEOUT_S)
    running = asyncio.create_task(fleet.run())
    yield fleet, watch
    running.cancel()
    await asyncio.wait([running])


async def test_engines_join_whatever_the_name_of_their_weights() -> None:
    async with (
        ScriptedEngine(weight_version="7") as one,
        ScriptedEngine(weight_version="default") as two,
        running_fleet(one) as (_, watch),
        running_fleet(two) as (_, other),
    ):
        await watch.until(lambda: watch.phase(one.url) is EnginePhase.READY)
        await other.until(lambda: other.phase(two.url) is EnginePhase.READY)
        row = watch.view.choose("s", 7)
        assert row is not None
        assert (row.url, row.policy_version) == (one.url, 7)


async def test_an_engine_that_dies_is_fenced_and_used_again_after_its_restart() -> None:
    async with ScriptedEngine() as engine, running_fleet(engine) as (fleet, watch):
        await watch.until(lambda: watch.phase(engine.url) is EnginePhase.READY)
        [row] = fleet.rows()
        await engine.die()
        for _ in range(3):
            fleet.report(EngineFaulted(engine.url, row.incarnation, "connection refused"))
        assert watch.phase(engine.url) is EnginePhase.FENCED
        assert watch.view.choose("s", -1) is None
        await engine.restart()
        await watch.until(lambda: watch.phase(engine.url) is EnginePhase.READY)
        assert fleet.rows()[0].incarnation != row.incarnation


async def test_an_unreachable_engine_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    num_probes, is_enough = 0, asyncio.Event()

    def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_probes
        num_probes += 1
        writer.close()
        if num_probes == 6:
            is_enough.set()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        fleet = FleetLoop([f"http://{host}:{port}"], FleetView(), PROBE_TIMEOUT_S)
        running = asyncio.create_task(fleet.run())
        async with asyncio.timeout(60):
            await is_enough.wait()
        running.cancel()
        await asyncio.wait([running])
    assert caplog.text.count("engine.unreachable") == 1
    assert f"{host}:{port}: the connection was closed" in caplog.text
