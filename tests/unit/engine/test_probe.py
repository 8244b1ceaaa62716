"""Probes against a scripted engine: each ask is answered once, whatever the engine does."""

from rollmesh.engine.fleet import ContinueEngine, EngineProbed, ProbeEngine
from rollmesh.engine.http import HttpClient
from rollmesh.engine.probe import incarnation_of, probe_engine
from rollmesh.testing.engine import ScriptedEngine
from tests.shortage import no_descriptor_left


async def probe(ask: ProbeEngine | ContinueEngine) -> EngineProbed:
    async with HttpClient() as http:
        return await probe_engine(ask, http)


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


async def test_weights_without_a_number_have_no_version() -> None:
    async with ScriptedEngine(weight_version="default") as engine:
        assert (await probe(ProbeEngine(engine.url, 1))).policy_version == -1


def test_incarnation_follows_the_seed_that_a_server_draws_at_its_start() -> None:
    assert incarnation_of({"random_seed": 1}) != incarnation_of({"random_seed": 2})


async def test_a_probe_without_a_descriptor_here_is_not_the_engines_failure() -> None:
    async with ScriptedEngine() as engine, HttpClient(shortage_wait_s=0.0) as http:
        with no_descriptor_left():
            probed = await probe_engine(ProbeEngine(engine.url, 1), http)
        assert (probed.ok, probed.is_local) == (False, True)
        assert "ulimit -n" in probed.detail
        assert (await probe_engine(ProbeEngine(engine.url, 2), http)).ok
