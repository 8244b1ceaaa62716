"""Routes, keys and limits, over a real socket."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rollmesh.core.config import InterceptionConfig
from rollmesh.serve.interception.exchange import ExchangeState
from tests.unit.serve.interception.conftest import StartAgent

ASK = {"messages": [{"role": "user", "content": "guess"}]}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/a/b/v1/chat/completions?x=1"])
async def test_any_prefix_is_allowed_before_v1(start_agent: StartAgent, path: str) -> None:
    agent = await start_agent("4")
    status, answer = await agent.answer(ASK, path)
    assert status == 200
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "4"}


async def test_the_path_secret_opens_the_session_without_a_key(start_agent: StartAgent) -> None:
    agent = await start_agent("4")
    path = f"/s/{agent.opened.path_secret}/v1/chat/completions"
    status, _ = await agent.answer(ASK, path, Authorization="Bearer sk-whatever")
    assert status == 200


async def test_a_wrong_key_is_401_in_openais_shape(start_agent: StartAgent) -> None:
    agent = await start_agent("4")
    status, answer = await agent.answer(ASK, Authorization="Bearer sk-wrong")
    assert status == 401
    assert answer["error"]["code"] == "invalid_api_key"
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert agent.runtime.num_calls == 0


async def test_the_model_list_needs_a_key(start_agent: StartAgent) -> None:
    agent = await start_agent()
    key = {"x-api-key": agent.opened.api_key}
    async with agent.client.get(agent.base + "/v1/models", headers=key) as response:
        assert (await response.json())["data"][0]["id"] == "policy"
    async with agent.client.get(agent.base + "/v1/models") as response:
        assert response.status == 401


async def test_health_needs_no_key_and_other_routes_are_404(start_agent: StartAgent) -> None:
    agent = await start_agent()
    async with agent.client.get(agent.base + "/healthz") as response:
        assert response.status == 200
    status, answer = await agent.answer(ASK, "/v1/embeddings")
    assert status == 404
    assert "POST /v1/chat/completions" in answer["error"]["message"]


async def test_a_body_over_the_limit_is_413_before_it_is_read(start_agent: StartAgent) -> None:
    agent = await start_agent(config=InterceptionConfig(max_body_bytes=1000))
    status, answer = await agent.answer(b"x" * 1001)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 100

    key = {"x-api-key": agent.opened.api_key}
    url = agent.base + "/v1/chat/completions"
    async with agent.client.post(url, data=chunks(), headers=key) as response:
        assert response.status == 413


async def test_an_exchange_is_in_flight_until_it_ends_in_any_way(
    start_agent: StartAgent,
) -> None:
    agent = await start_agent()
    server, made, route = agent.server, agent.sampler.generations, "/chat/completions"

    async def opened(num: int) -> None:
        await agent.sampler.until(lambda: len(made) == num and made[-1].machine.num_readers > 0)
        assert server.num_open == 1

    ends: list[tuple[ExchangeState, Callable[[asyncio.Task[Any]], object]]] = [
        (ExchangeState.DELIVERED, lambda _: agent.finish("4")),
        (ExchangeState.FAILED, lambda _: made[-1].seal("the engine is on fire")),
        (ExchangeState.ABANDONED, lambda task: task.cancel()),
        (ExchangeState.SEALED, lambda _: agent.opened.session.seal("the rollout ended")),
    ]
    for num, (state, end) in enumerate(ends, start=1):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(agent.answer({**ASK, "user": str(num)}))
            await opened(num)
            end(task)
            if state is ExchangeState.ABANDONED:
                await agent.sampler.until(lambda: made[-1].num_aborts == 1)
        assert server.num_open == 0
        assert server.num_exchanges[route, state] == 1
    assert server.num_exchanges.total() == len(ends)
