"""Clients retry when an answer is late or fails, and the turn trains once."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
import pytest_asyncio

from rollmesh.core.config import InterceptionConfig
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.process import listen
from rollmesh.core.types import SamplingPolicy
from rollmesh.engine.view import FleetView
from rollmesh.runtime.generation.sampler import Sampler, SamplerDeps
from rollmesh.runtime.generation.sampling import GenerationSettings
from rollmesh.runtime.registry import Runtime
from rollmesh.runtime.replies import RETRY_AFTER_S
from rollmesh.runtime.tokens.families import choose_family
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.runtime.tokens.tokenizer import load_tokenizer
from rollmesh.serve.interception.agent_server import AgentServer
from rollmesh.testing.engine import AgentReply, ScriptedEngine, steps
from rollmesh.testing.faults import Fault
from rollmesh.wire.fleet import EnginePhase, EngineRow, FleetChanged
from tests.clients.exactness import calls_of, faults
from tests.clients.gateway import Opened
from tests.clients.tasks import Deployment, model_folder, open_deployment

pytestmark = pytest.mark.asyncio(loop_scope="module")

GROUP = GroupId("r", 0)
SAID = "It is the word zebra."
USER: Any = {"role": "user", "content": "Which word?"}
IMPATIENT_S = 0.3
NUM_FULL_QUEUES = GenerationSettings().max_full_queues + 1
NUM_RESENDS = 5
"""The number of times that codex resends a turn whose stream broke."""


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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_deployment(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    async with open_deployment(
        tmp_path_factory.mktemp("stage"), steps(AgentReply(SAID))
    ) as deployment:
        yield deployment


@pytest.fixture
def deployment(shared_deployment: Deployment) -> Deployment:
    """The shared deployment, without its earlier requests."""
    shared_deployment.engine.seen.clear()
    return shared_deployment


@contextlib.asynccontextmanager
async def hasty_worker(
    folder: Path, deployment: Deployment
) -> AsyncIterator[tuple[Runtime, Opened]]:
    """A worker's agent server in front of the deployment's engine, with almost no wait between two
    engine requests; and a session there.
    """
    model = model_folder(folder)
    tokenizer = load_tokenizer(model)
    view = FleetView()
    row = EngineRow(deployment.engine.url, "", EnginePhase.READY, 0)
    view.update(FleetChanged(0, (row,)), "router")
    parts = SamplerDeps(view=view, vocab_size=tokenizer.vocab_size, report=lambda fault: None)
    sampler = Sampler(parts, GenerationSettings(backoff_s=0.001, max_backoff_s=0.001))
    prompts = Prompts(choose_family(model, "auto", tokenizer), tokenizer)
    runtime = Runtime(sampler, prompts, 4096)
    server = AgentServer(runtime, InterceptionConfig(), "policy")
    address = await server.start(listen("127.0.0.1:0"))
    session = runtime.register_trajectory(RolloutId(GROUP, 0), SamplingPolicy(), seed=0)
    paths = (f"{address}/v1", f"{address}/s/{session.path_secret}/v1")
    try:
        yield runtime, Opened(session.session_id, session.api_key, *paths)
    finally:
        runtime.cleanup_group(GROUP)
        await server.stop()
        await sampler.close()


async def until_legs(engine: ScriptedEngine, num: int) -> None:
    await engine.until(lambda: engine.num_seen("/generate") == num)


async def assert_trained_once(deployment: Deployment, opened: Opened) -> Any:
    """Check that one turn trains and is exact, however often it was requested; return the session's
    account.
    """
    account = await deployment.gateway.finish(opened)
    calls = calls_of(deployment.engine, deployment.agent)
    assert faults(calls, account["samples"], deployment.agent) == []
    assert len(calls) == 1
    assert deployment.engine.num_live == 0
    return account


@each_sdk
async def test_a_client_that_times_out_and_retries_gets_the_same_turn(
    deployment: Deployment, ask: Ask
) -> None:
    opened = await deployment.gateway.open()
    deployment.engine.hold()
    await deployment.engine.allow(2)
    asking = asyncio.create_task(ask(opened, timeout=IMPATIENT_S, max_retries=9))
    await deployment.engine.until(lambda: deployment.engine.num_seen("/generate") == 2)
    await deployment.engine.release()
    assert await asking == SAID
    assert (await assert_trained_once(deployment, opened))["num_calls"] == 1


async def test_clients_retry_a_missing_engine_after_the_given_time(tmp_path: Path) -> None:
    options = ("--set", f"interception.engine_wait_s={IMPATIENT_S}")
    async with open_deployment(tmp_path, steps(AgentReply(SAID)), *options) as deployment:
        sessions = [(ask, await deployment.gateway.open()) for ask in (chat, messages)]
        await deployment.engine.die()
        refused = [ask(opened, max_retries=0) for ask, opened in sessions]
        for error in await asyncio.gather(*refused, return_exceptions=True):
            assert isinstance(error, openai.APIStatusError | anthropic.APIStatusError)
            assert error.status_code == 503
            assert int(error.response.headers["retry-after"]) >= 1
        await deployment.engine.restart()
        answered = [ask(opened, max_retries=9) for ask, opened in sessions]
        assert await asyncio.gather(*answered) == [SAID] * 2
        for _, opened in sessions:
            await assert_trained_once(deployment, opened)


async def test_a_client_retries_full_queues_after_the_given_time(
    deployment: Deployment, tmp_path: Path
) -> None:
    async with hasty_worker(tmp_path, deployment) as (runtime, opened):
        deployment.engine.faults.extend([Fault.BUSY] * NUM_FULL_QUEUES)
        began_s = time.monotonic()
        assert await chat(opened, max_retries=1) == SAID
        assert time.monotonic() - began_s >= RETRY_AFTER_S
        (call,) = calls_of(deployment.engine, deployment.agent)
        assert deployment.engine.num_seen("/generate") == NUM_FULL_QUEUES + 1
        assert runtime.num_tokens == len(call.answer)


async def test_five_resends_of_a_stream_that_broke_train_once(deployment: Deployment) -> None:
    opened = await deployment.gateway.open()
    body = {"model": "policy", "input": "Which word?", "stream": True}
    reach = {"Authorization": f"Bearer {opened.api_key}"}
    url = opened.base_url + "/responses"
    engine = deployment.engine
    engine.hold()
    async with aiohttp.ClientSession(headers=reach) as client:
        for n in range(NUM_RESENDS):
            await engine.allow(2)
            async with client.post(url, json=body) as response:
                await response.content.readuntil(b"delta")
                # The client receives the buffered part of the turn before its next engine request
                # has begun.
                await until_legs(engine, n + 1)
                response.close()
            await engine.until(lambda: engine.num_live == 0)
        await engine.release()
        async with client.post(url, json=body) as response:
            assert b"response.completed" in await response.read()
    assert (await assert_trained_once(deployment, opened))["num_calls"] == 1
