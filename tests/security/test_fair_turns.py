"""One session with many turns must not delay those of another session at the engine."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from rollmesh.testing.engine import ScriptedEngine
from tests.flow.gateway_process import PATIENCE_S, Gateway, next_token, sampling

GENERATE = "/generate"
NUM_TURNS = 64
NUM_PLACES = 8
NUM_SENT = NUM_PLACES + 1
"""Requests sent to an engine that runs NUM_PLACES at a time: an eighth more."""
LONG = 100
"""Tokens: prompts of the second session are longer, those of the first are shorter."""


def chat(text: str) -> dict[str, Any]:
    """A turn of one token, so that each token that the engine may sample frees a place."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


def places_of_singles(engine: ScriptedEngine) -> list[int]:
    """Places of the second session's turns, in the order in which the engine received requests."""
    found = [each.body for each in engine.seen if each.path == GENERATE]
    return [at for at, body in enumerate(found) if len(body["input_ids"]) > LONG]


async def until_begun(gateway: Gateway, num_calls: int) -> None:
    """Wait until sessions have begun `num_calls` calls, by the count that they report."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            _, listed = await gateway.admin("GET", "/admin/sessions")
            if sum(each["num_calls"] for each in listed["sessions"]) == num_calls:
                return


async def until_seen(engine: ScriptedEngine, num_requests: int) -> None:
    await engine.until(lambda: engine.num_seen(GENERATE) == num_requests)


async def test_a_session_with_many_turns_delays_a_turn_of_another_by_one_place(
    tmp_path: Path,
) -> None:
    async with ScriptedEngine(next_token) as engine:
        engine.max_running = NUM_PLACES
        async with sampling(tmp_path, engine) as gateway:
            await gateway.client.close()
            gateway.client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
            greedy, other = await gateway.open(), await gateway.open()
            engine.hold()
            turns = [chat(str(number)) for number in range(NUM_TURNS)]
            calls = [asyncio.create_task(gateway.call(greedy, each)) for each in turns]
            await until_begun(gateway, NUM_TURNS)
            calls.append(asyncio.create_task(gateway.call(other, chat("b" * LONG))))
            await until_begun(gateway, NUM_TURNS + 1)
            async with asyncio.timeout(PATIENCE_S):
                for num_seen in range(NUM_SENT, NUM_SENT + 3):
                    await until_seen(engine, num_seen)
                    await engine.allow(1)
                await engine.release()
                assert {status for status, _ in await asyncio.gather(*calls)} == {200}
        # At most one place goes to the first session before the second one gets the next.
        assert max(places_of_singles(engine)) <= NUM_SENT + 1
