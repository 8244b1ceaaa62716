"""Requests in flight are found by rollout, woken from any wait when the rollout ends, and then
removed.
"""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.types import SamplingPolicy
from rollmesh.serve.interception.exchange import Exchange, ExchangeState
from tests.unit.serve.interception.conftest import AgentSession, StartAgent

ROLLOUT = RolloutId(GroupId("r", 0), 0)
MB = 1024 * 1024
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "guess"}]}


async def until_empty(agent: AgentSession) -> set[ExchangeState]:
    """Return the last states of all exchanges, once none is running."""
    async with asyncio.timeout(60):
        while len(agent.server.inflight):  # noqa: ASYNC110 - the end of an exchange has no event
            await asyncio.sleep(0)
    return {state for _, state in agent.server.num_exchanges}


async def connected(agent: AgentSession, sent: bytes) -> socket.socket:
    """Return a client that has sent these bytes and reads little at a time."""
    host, _, port = agent.base.removeprefix("http://").partition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (host, int(port)))
    await loop.sock_sendall(client, sent)
    return client


def head(agent: AgentSession, num_bytes: int) -> bytes:
    lines = f"x-api-key: {agent.opened.api_key}\r\nContent-Length: {num_bytes}\r\n\r\n"
    return f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{lines}".encode()


async def answer_of(client: socket.socket) -> tuple[int, Any]:
    """Return the status and body of the next answer."""
    received = b""
    async with asyncio.timeout(60):
        while b"}}" not in received:
            received += await asyncio.get_running_loop().sock_recv(client, 65536)
    top, _, body = received.partition(b"\r\n\r\n")
    return int(top.split(b" ")[1]), msgspec.json.decode(body)


async def test_a_request_whose_body_is_still_arriving_ends_with_its_rollout(
    start_agent: StartAgent,
) -> None:
    agent = await start_agent("4")
    client = await connected(agent, head(agent, 100) + b"{")
    while not len(agent.server.inflight):  # noqa: ASYNC110 - the arrival of a head has no event
        await asyncio.sleep(0)
    agent.runtime.cleanup_group(ROLLOUT.group_id)
    status, answer = await answer_of(client)
    client.close()
    assert (status, answer["error"]["code"]) == (410, "session_sealed")
    assert await until_empty(agent) == {ExchangeState.SEALED}


async def test_an_unread_answer_is_dropped_with_its_rollout(start_agent: StartAgent) -> None:
    agent = await start_agent(max_context_tokens=10**7)
    body = msgspec.json.encode({**ASK, "max_tokens": 10**6})
    client = await connected(agent, head(agent, len(body)) + body)
    await agent.sampler.until(lambda: len(agent.sampler.generations) == 1)
    # Six bytes of JSON per token, so more than the kernel's buffers.
    agent.sampler.generations[0].end(*agent.ids("\x01") * 10**6)
    await asyncio.get_running_loop().sock_recv(client, 1)
    assert len(agent.server.inflight) == 1
    agent.runtime.cleanup_group(ROLLOUT.group_id)
    assert await until_empty(agent) == {ExchangeState.SEALED}
    num_bytes = 0
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(60):
            while taken := await loop.sock_recv(client, 65536):
                num_bytes += len(taken)
    except ConnectionResetError:
        pass
    client.close()
    assert num_bytes < 6 * 10**6


async def test_the_connection_of_a_woken_request_serves_the_next(start_agent: StartAgent) -> None:
    agent = await start_agent()
    body = msgspec.json.encode(ASK)
    client = await connected(agent, b"")
    for number in range(2):
        await asyncio.get_running_loop().sock_sendall(client, head(agent, len(body)) + body)
        await agent.sampler.until(lambda num=number: len(agent.sampler.generations) == num + 1)
        agent.opened.session.seal("the rollout ended")
        assert (await answer_of(client))[0] == 410
        agent.opened = agent.runtime.register_trajectory(ROLLOUT, SamplingPolicy(), seed=7)
    client.close()
    assert await until_empty(agent) == {ExchangeState.SEALED}


async def test_only_requests_of_sealed_sessions_are_woken(start_agent: StartAgent) -> None:
    """Other rollouts continue, and so does a child of the same rollout."""
    agent = await start_agent()
    other = agent.runtime.register_trajectory(
        RolloutId(GroupId("r", 1), 0), SamplingPolicy(), seed=7
    )
    agent.runtime.cleanup_rollout(ROLLOUT)
    made = agent.sampler.generations
    loans = [agent.runtime.lend(ROLLOUT, "child", appends=appends) for appends in (True, False)]
    async with asyncio.TaskGroup() as group:
        keys = [loans[0].api_key, loans[1].api_key, other.api_key]
        calls = [
            group.create_task(agent.answer(ASK, Authorization=f"Bearer {key}")) for key in keys
        ]
        await agent.sampler.until(lambda: len(made) == len(keys))
        loans[0].release()
        assert (await calls[0])[0] == 410
        agent.runtime.lend(ROLLOUT, "forgetful", appends=False)
        for generation in made[1:]:
            generation.end(*agent.ids("4<|im_end|>"))
    assert [call.result()[0] for call in calls] == [410, 200, 200]
    loans[1].release()
    agent.runtime.cleanup_group(GroupId("r", 1))
    assert await until_empty(agent) == {ExchangeState.SEALED, ExchangeState.DELIVERED}


async def test_a_request_whose_client_vanished_is_removed(start_agent: StartAgent) -> None:
    agent = await start_agent()
    body = msgspec.json.encode(ASK)
    client = await connected(agent, head(agent, len(body)) + body)
    await agent.sampler.until(lambda: len(agent.sampler.generations) == 1)
    client.close()
    assert await until_empty(agent) == {ExchangeState.ABANDONED}
    agent.server.inflight.discard_request(1)
    agent.server.inflight.unregister_rollout(ROLLOUT)


async def test_no_table_retains_an_ended_rollout(start_agent: StartAgent) -> None:
    agent = await start_agent("4")
    rollout_id = RolloutId(GroupId("r", 1), 0)
    opened = agent.runtime.register_trajectory(rollout_id, SamplingPolicy(), seed=7)
    assert (await agent.answer(ASK, Authorization=f"Bearer {opened.api_key}"))[0] == 200
    del opened
    agent.runtime.cleanup_group(rollout_id.group_id)
    assert [each for each in gc.get_referrers(rollout_id) if isinstance(each, dict)] == []


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_vanished_client_leaves_nothing_to_the_garbage_collector(
    start_agent: StartAgent, young_heap: None, is_stream: bool
) -> None:
    """A worker runs the garbage collector rarely: a cycle of a task, its error and its frames
    would retain images.
    """
    agent = await start_agent()
    body = msgspec.json.encode(ASK | {"stream": is_stream})
    gc.disable()
    try:
        client = await connected(agent, head(agent, len(body)) + body)
        await agent.sampler.until(lambda: len(agent.sampler.generations) == 1)
        client.close()
        await until_empty(agent)
        await asyncio.sleep(0)
        assert [each for each in gc.get_objects() if isinstance(each, Exchange)] == []
    finally:
        gc.enable()


def large(mark: bytes, least: int = MB) -> list[bytes | str]:
    """Return all texts of at least `least` bytes that contain `mark`, in any object."""
    found: dict[int, bytes | str] = {}
    for owner in gc.get_objects():
        for each in gc.get_referents(owner):
            if isinstance(each, bytes | bytearray) and len(each) >= least and mark in each:
                found[id(each)] = bytes(each[:40])
            elif isinstance(each, str) and len(each) >= least and mark.decode() in each:
                found[id(each)] = each[:40]
    return list(found.values())


PLACES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {},
    "/v1/messages": {"max_tokens": 8},
}


@pytest.mark.usefixtures("young_heap")
@pytest.mark.parametrize("path", PLACES)
async def test_no_body_is_retained_while_the_engine_is_slow(
    start_agent: StartAgent, path: str
) -> None:
    """Eight requests of 5 MB leave only the one message that they share in memory."""
    agent = await start_agent(max_context_tokens=10**8)
    text = "seen once " * (MB // 10 + 1)
    ask = {"messages": [{"role": "user", "content": text}], **PLACES[path]}

    async def in_pieces(body: bytes) -> AsyncIterator[bytes]:
        for at in range(0, len(body), MB):
            yield body[at : at + MB]

    def asked(number: int) -> Any:
        body = msgspec.json.encode({**ask, "user": str(number), "pad": "never seen " * (MB // 3)})
        key = {"x-api-key": agent.opened.api_key}
        return agent.client.post(agent.base + path, data=in_pieces(body), headers=key)

    made = agent.sampler.generations
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(asked(number).__aenter__()) for number in range(8)]
        await agent.sampler.until(
            lambda: len(made) == 8 and all(each.machine.num_readers > 0 for each in made)
        )
        assert len(agent.server.inflight) == 8
        assert agent.server.bodies.held_bytes == 0
        del ask["messages"]
        text = ""
        async with asyncio.timeout(60):
            # A new call may still run its first step.
            while large(b"never seen never") or len(large(b"seen once seen once")) > 1:  # noqa: ASYNC110 - memory has no event
                await asyncio.sleep(0)
        for generation in made:
            generation.end(*agent.ids("4<|im_end|>"))
    for call in calls:
        call.result().release()


@pytest.mark.usefixtures("young_heap")
async def test_a_body_that_arrived_in_one_read_is_not_retained_either(
    start_agent: StartAgent,
) -> None:
    agent = await start_agent()
    body = msgspec.json.encode({**ASK, "pad": "never seen " * 2000})
    client = await connected(agent, head(agent, len(body)) + body)
    num_bytes = len(body)
    del body
    await agent.sampler.until(lambda: len(agent.sampler.generations) == 1)
    assert len(agent.server.inflight) == 1
    assert large(b"never seen never", num_bytes // 2) == []
    client.close()
    await until_empty(agent)
