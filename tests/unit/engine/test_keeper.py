"""A keeper and scripted engines on real sockets: the view follows what the engines do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rollmesh.engine.keeper import FleetKeeper
from rollmesh.engine.view import FleetView
from rollmesh.testing.engine import ScriptedEngine
from rollmesh.wire.fleet import EngineFaulted, EnginePhase
from tests.watch import Watch


@asynccontextmanager
async def kept(*engines: ScriptedEngine) -> AsyncIterator[tuple[FleetKeeper, Watch]]:
    watch = Watch(FleetView())
    keeper = FleetKeeper([engine.url for engine in engines], watch.view)
    running = asyncio.create_task(keeper.run())
    yield keeper, watch
    running.cancel()
    await asyncio.wait([running])


async def test_engines_join_by_themselves_whatever_their_weights_are_called() -> None:
    async with (
        ScriptedEngine(weight_version="7") as one,
        ScriptedEngine(weight_version="default") as two,
        kept(one) as (_, watch),
        kept(two) as (_, other),
    ):
        await watch.until(lambda: watch.phase(one.url) is EnginePhase.READY)
        await other.until(lambda: other.phase(two.url) is EnginePhase.READY)
        row = watch.view.choose("s", 7)
        assert row is not None
        assert (row.url, row.policy_version) == (one.url, 7)


async def test_an_engine_that_dies_is_left_and_taken_again_when_it_is_back() -> None:
    async with ScriptedEngine() as engine, kept(engine) as (keeper, watch):
        await watch.until(lambda: watch.phase(engine.url) is EnginePhase.READY)
        [row] = keeper.rows()
        await engine.die()
        for _ in range(3):
            keeper.report(EngineFaulted(engine.url, row.incarnation, "connection refused"))
        assert watch.phase(engine.url) is EnginePhase.FENCED
        assert watch.view.choose("s", -1) is None
        await engine.restart()
        await watch.until(lambda: watch.phase(engine.url) is EnginePhase.READY)
        assert keeper.rows()[0].incarnation != row.incarnation


async def test_who_waits_for_an_engine_reads_why_once(caplog: pytest.LogCaptureFixture) -> None:
    num_probes, is_enough = 0, asyncio.Event()

    def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_probes
        num_probes += 1
        writer.close()
        if num_probes == 6:
            is_enough.set()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        keeper = FleetKeeper([f"http://{host}:{port}"], FleetView())
        running = asyncio.create_task(keeper.run())
        async with asyncio.timeout(60):
            await is_enough.wait()
        running.cancel()
        await asyncio.wait([running])
    assert caplog.text.count("engine.unreachable") == 1
    assert f"{host}:{port}: the connection was closed" in caplog.text
