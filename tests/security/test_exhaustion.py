"""A process without a free file descriptor must not treat its engines as broken."""

import asyncio
from pathlib import Path
from typing import Any

from rollmesh.testing.engine import ScriptedEngine
from tests.flow.gateway_process import PATIENCE_S, Gateway, next_token, sampling
from tests.shortage import no_descriptor_left

NUM_CALLS = 6
BODIES = [{"messages": [{"role": "user", "content": f"{number}"}]} for number in range(NUM_CALLS)]


async def engine_phase(gateway: Gateway) -> str:
    _, health = await gateway.admin("GET", "/healthz")
    return str(health["engines"][0]["phase"])


async def warm(gateway: Gateway, opened: dict[str, str]) -> None:
    """Open as many agent connections as will be used, while there are descriptors for them."""
    headers = {"Authorization": f"Bearer {opened['api_key']}"}

    async def look() -> None:
        async with gateway.client.get(opened["base_url"] + "/models", headers=headers) as response:
            assert response.status == 200
            await asyncio.wait_for(all_there.wait(), PATIENCE_S)
            await response.read()

    all_there = asyncio.Barrier(NUM_CALLS + 1)
    await asyncio.gather(*(look() for _ in range(NUM_CALLS + 1)))


async def test_calls_wait_for_a_descriptor_and_no_engine_is_fenced(tmp_path: Path) -> None:
    async with (
        ScriptedEngine(next_token) as engine,
        sampling(tmp_path, engine, engine_wait_s=PATIENCE_S) as gateway,
    ):
        opened = await gateway.open()
        await warm(gateway, opened)
        waiting: dict[str, Any] = {}
        with no_descriptor_left(gateway.process.pid):
            calls = [asyncio.create_task(gateway.call(opened, each)) for each in BODIES]
            async with asyncio.timeout(PATIENCE_S):
                # Longer than faults of calls, or failed probes, would take to fence an engine.
                while waiting.get("waited_s", 0.0) < 3.0:
                    _, health = await gateway.admin("GET", "/healthz")
                    assert health["engines"][0]["phase"] == "ready"
                    waiting = health.get("waiting", {})
            assert engine.num_seen("/generate") == 0
        assert waiting["num_calls"] == NUM_CALLS
        assert "RLIMIT_NOFILE" in waiting["why"]
        assert "ulimit -n" in waiting["why"]
        async with asyncio.timeout(PATIENCE_S):
            assert {status for status, _ in await asyncio.gather(*calls)} == {200}
        assert await engine_phase(gateway) == "ready"


async def test_a_call_that_waited_long_enough_names_the_limit_and_the_remedy(
    tmp_path: Path,
) -> None:
    async with (
        ScriptedEngine(next_token) as engine,
        sampling(tmp_path, engine, engine_wait_s=0.5) as gateway,
    ):
        opened = await gateway.open()
        await warm(gateway, opened)
        with no_descriptor_left(gateway.process.pid):
            answers = await asyncio.gather(*(gateway.call(opened, each) for each in BODIES))
            assert await engine_phase(gateway) == "ready"
        for status, answer in answers:
            assert status == 503
            assert "RLIMIT_NOFILE" in answer["error"]["message"]
            assert "ulimit -n" in answer["error"]["message"]
        assert (await gateway.call(opened, BODIES[0]))[0] == 200
