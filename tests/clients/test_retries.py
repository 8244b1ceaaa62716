"""What clients do when an answer is late or fails: they ask again, and it trains once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from rollmesh.runtime.patience import GenerationSettings
from rollmesh.testing.agent_engine import Say, steps
from rollmesh.testing.engine import Fault, ScriptedEngine
from tests.clients.exactness import calls_of, faults
from tests.clients.gateway import Opened
from tests.clients.tasks import Stage, open_stage

SAID = "It is the word zebra."
USER: Any = {"role": "user", "content": "Which word?"}
IMPATIENT_S = 0.3
NUM_FULL_QUEUES = GenerationSettings().max_full_queues + 1
NUM_RESENDS = 5
"""As often as codex resends a turn whose stream broke."""


async def chat(opened: Opened, **settings: Any) -> str:
    async with openai.AsyncOpenAI(
        base_url=opened.base_url, api_key=opened.api_key, **settings
    ) as client:
        answer = await client.chat.completions.create(model="policy", messages=[USER])
    return str(answer.choices[0].message.content)


async def messages(opened: Opened, **settings: Any) -> str:
    async with anthropic.AsyncAnthropic(
        base_url=opened.base_url.removesuffix("/v1"), api_key=opened.api_key, **settings
    ) as client:
        answer: Any = await client.messages.create(model="policy", max_tokens=99, messages=[USER])
    return str(answer.content[0].text)


Ask = Callable[..., Coroutine[Any, Any, str]]
each_sdk = pytest.mark.parametrize("ask", [chat, messages], ids=["openai", "anthropic"])


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with open_stage(tmp_path, steps(Say(SAID))) as stage:
        yield stage


async def until_legs(engine: ScriptedEngine, num: int) -> None:
    await engine.until(lambda: engine.num_seen("/generate") == num)


async def assert_trained_once(stage: Stage, opened: Opened) -> Any:
    """However often it was asked, one turn trains, and it is exact; the session's account."""
    account = await stage.gateway.finish(opened)
    calls = calls_of(stage.engine, stage.agent)
    assert faults(calls, account["samples"], stage.agent) == []
    assert len(calls) == 1
    assert stage.engine.num_live == 0
    return account


@each_sdk
async def test_a_client_that_times_out_and_retries_gets_the_one_turn(
    stage: Stage, ask: Ask
) -> None:
    opened = await stage.gateway.open()
    stage.engine.hold()
    await stage.engine.allow(2)
    asking = asyncio.create_task(ask(opened, timeout=IMPATIENT_S, max_retries=9))
    await stage.engine.until(lambda: stage.engine.num_seen("/generate") == 2)
    await stage.engine.release()
    assert await asking == SAID
    assert (await assert_trained_once(stage, opened))["num_calls"] == 1


@each_sdk
async def test_a_client_that_finds_no_engine_comes_back_when_told(tmp_path: Path, ask: Ask) -> None:
    options = ("--set", f"interception.engine_wait_s={IMPATIENT_S}")
    async with open_stage(tmp_path, steps(Say(SAID)), *options) as stage:
        opened = await stage.gateway.open()
        await stage.engine.die()
        with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as failed:
            await ask(opened, max_retries=0)
        error: Any = failed.value
        assert error.status_code == 503
        assert int(error.response.headers["retry-after"]) >= 1
        await stage.engine.restart()
        assert await ask(opened, max_retries=9) == SAID
        await assert_trained_once(stage, opened)


async def test_a_client_that_finds_full_queues_comes_back_when_told(stage: Stage) -> None:
    opened = await stage.gateway.open()
    stage.engine.faults.extend([Fault.BUSY] * NUM_FULL_QUEUES)
    with pytest.raises(openai.RateLimitError) as failed:
        await chat(opened, max_retries=0)
    assert int(failed.value.response.headers["retry-after"]) >= 1
    assert await chat(opened) == SAID
    await assert_trained_once(stage, opened)


async def test_five_resends_of_a_stream_that_broke_train_once(stage: Stage) -> None:
    opened = await stage.gateway.open()
    body = {"model": "policy", "input": "Which word?", "stream": True}
    reach = {"Authorization": f"Bearer {opened.api_key}"}
    url = opened.base_url + "/responses"
    engine = stage.engine
    engine.hold()
    async with aiohttp.ClientSession(headers=reach) as client:
        for n in range(NUM_RESENDS):
            await engine.allow(2)
            async with client.post(url, json=body) as response:
                await response.content.readuntil(b"delta")
                # What is held of the turn is told before its next leg has begun.
                await until_legs(engine, n + 1)
                response.close()
            await engine.until(lambda: engine.num_live == 0)
        await engine.release()
        async with client.post(url, json=body) as response:
            assert b"response.completed" in await response.read()
    assert (await assert_trained_once(stage, opened))["num_calls"] == 1
