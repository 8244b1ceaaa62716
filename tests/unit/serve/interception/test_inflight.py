"""Requests in flight are found by rollout, woken from any wait when it ends, and then removed."""

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
from tests.unit.serve.interception.conftest import Desk, MakeDesk

ROLLOUT = RolloutId(GroupId("r", 0), 0)
MB = 1024 * 1024
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "guess"}]}


async def until_empty(desk: Desk) -> set[ExchangeState]:
    """Return the last states of all exchanges, once none is running."""
    async with asyncio.timeout(60):
        while len(desk.edge.inflight):  # noqa: ASYNC110 - the end of an exchange has no event
            await asyncio.sleep(0)
    return {state for _, state in desk.edge.num_exchanges}


async def connected(desk: Desk, sent: bytes) -> socket.socket:
    """Return a client that has sent this and reads little at a time."""
    host, _, port = desk.base.removeprefix("http://").partition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (host, int(port)))
    await loop.sock_sendall(client, sent)
    return client


def head(desk: Desk, num_bytes: int) -> bytes:
    lines = f"x-api-key: {desk.opened.api_key}\r\nContent-Length: {num_bytes}\r\n\r\n"
    return f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{lines}".encode()


async def answer_of(client: socket.socket) -> tuple[int, Any]:
    """Return the status and body of the next answer."""
    told = b""
    async with asyncio.timeout(60):
        while b"}}" not in told:
            told += await asyncio.get_running_loop().sock_recv(client, 65536)
    top, _, body = told.partition(b"\r\n\r\n")
    return int(top.split(b" ")[1]), msgspec.json.decode(body)


async def test_a_request_that_still_reads_its_body_ends_with_its_rollout(
    make_desk: MakeDesk,
) -> None:
    desk = await make_desk("4")
    client = await connected(desk, head(desk, 100) + b"{")
    while not len(desk.edge.inflight):  # noqa: ASYNC110 - the arrival of a head has no event
        await asyncio.sleep(0)
    desk.runtime.cleanup_group(ROLLOUT.group_id)
    status, told = await answer_of(client)
    client.close()
    assert (status, told["error"]["code"]) == (410, "session_sealed")
    assert await until_empty(desk) == {ExchangeState.SEALED}


async def test_what_a_client_does_not_take_goes_with_its_rollout(make_desk: MakeDesk) -> None:
    desk = await make_desk(max_context_tokens=10**7)
    body = msgspec.json.encode({**ASK, "max_tokens": 10**6})
    client = await connected(desk, head(desk, len(body)) + body)
    await desk.sampler.until(lambda: len(desk.sampler.generations) == 1)
    # Six bytes of JSON each, so more than the kernel buffers.
    desk.sampler.generations[0].end(*desk.ids("\x01") * 10**6)
    await asyncio.get_running_loop().sock_recv(client, 1)
    assert len(desk.edge.inflight) == 1
    desk.runtime.cleanup_group(ROLLOUT.group_id)
    assert await until_empty(desk) == {ExchangeState.SEALED}
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


async def test_the_connection_of_a_woken_request_serves_the_next(make_desk: MakeDesk) -> None:
    desk = await make_desk()
    body = msgspec.json.encode(ASK)
    client = await connected(desk, b"")
    for number in range(2):
        await asyncio.get_running_loop().sock_sendall(client, head(desk, len(body)) + body)
        await desk.sampler.until(lambda num=number: len(desk.sampler.generations) == num + 1)
        desk.opened.session.seal("the rollout ended")
        assert (await answer_of(client))[0] == 410
        desk.opened = desk.runtime.register_trajectory(ROLLOUT, SamplingPolicy(), seed=7)
    client.close()
    assert await until_empty(desk) == {ExchangeState.SEALED}


async def test_only_requests_of_sealed_sessions_are_woken(make_desk: MakeDesk) -> None:
    """A child of the same rollout continues, and so do other rollouts."""
    desk = await make_desk()
    other = desk.runtime.register_trajectory(
        RolloutId(GroupId("r", 1), 0), SamplingPolicy(), seed=7
    )
    desk.runtime.cleanup_rollout(ROLLOUT)
    made = desk.sampler.generations
    loans = [desk.runtime.lend(ROLLOUT, "child", appends=appends) for appends in (True, False)]
    async with asyncio.TaskGroup() as group:
        keys = [loans[0].api_key, loans[1].api_key, other.api_key]
        calls = [group.create_task(desk.answer(ASK, Authorization=f"Bearer {key}")) for key in keys]
        await desk.sampler.until(lambda: len(made) == len(keys))
        loans[0].release()
        assert (await calls[0])[0] == 410
        desk.runtime.lend(ROLLOUT, "forgetful", appends=False)
        for generation in made[1:]:
            generation.end(*desk.ids("4<|im_end|>"))
    assert [call.result()[0] for call in calls] == [410, 200, 200]
    loans[1].release()
    desk.runtime.cleanup_group(GroupId("r", 1))
    assert await until_empty(desk) == {ExchangeState.SEALED, ExchangeState.DELIVERED}


async def test_a_request_whose_client_vanished_is_gone(make_desk: MakeDesk) -> None:
    desk = await make_desk()
    body = msgspec.json.encode(ASK)
    client = await connected(desk, head(desk, len(body)) + body)
    await desk.sampler.until(lambda: len(desk.sampler.generations) == 1)
    client.close()
    assert await until_empty(desk) == {ExchangeState.ABANDONED}
    desk.edge.inflight.discard_request(1)
    desk.edge.inflight.unregister_rollout(ROLLOUT)


async def test_no_table_knows_a_rollout_that_has_ended(make_desk: MakeDesk) -> None:
    desk = await make_desk("4")
    rollout_id = RolloutId(GroupId("r", 1), 0)
    opened = desk.runtime.register_trajectory(rollout_id, SamplingPolicy(), seed=7)
    assert (await desk.answer(ASK, Authorization=f"Bearer {opened.api_key}"))[0] == 200
    del opened
    desk.runtime.cleanup_group(rollout_id.group_id)
    assert [each for each in gc.get_referrers(rollout_id) if isinstance(each, dict)] == []


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_vanished_client_leaves_nothing_to_the_garbage_collector(
    make_desk: MakeDesk, young_heap: None, is_stream: bool
) -> None:
    """A worker collects garbage seldom: a cycle of a task, its error and its frames would hold
    images."""
    desk = await make_desk()
    body = msgspec.json.encode(ASK | {"stream": is_stream})
    gc.disable()
    try:
        client = await connected(desk, head(desk, len(body)) + body)
        await desk.sampler.until(lambda: len(desk.sampler.generations) == 1)
        client.close()
        await until_empty(desk)
        await asyncio.sleep(0)
        assert [each for each in gc.get_objects() if isinstance(each, Exchange)] == []
    finally:
        gc.enable()


def large(mark: bytes, least: int = MB) -> list[bytes | str]:
    """Return all texts of at least so many bytes that contain this, wherever they are."""
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
async def test_no_body_is_held_while_the_engine_is_slow(make_desk: MakeDesk, path: str) -> None:
    """Of eight requests of 5 MB only the one message that they share remains."""
    desk = await make_desk(max_context_tokens=10**8)
    text = "seen once " * (MB // 10 + 1)
    ask = {"messages": [{"role": "user", "content": text}], **PLACES[path]}

    async def slowly(body: bytes) -> AsyncIterator[bytes]:
        for at in range(0, len(body), MB):
            yield body[at : at + MB]

    def asked(number: int) -> Any:
        body = msgspec.json.encode({**ask, "user": str(number), "pad": "never seen " * (MB // 3)})
        key = {"x-api-key": desk.opened.api_key}
        return desk.client.post(desk.base + path, data=slowly(body), headers=key)

    made = desk.sampler.generations
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(asked(number).__aenter__()) for number in range(8)]
        await desk.sampler.until(
            lambda: len(made) == 8 and all(each.machine.num_readers > 0 for each in made)
        )
        assert len(desk.edge.inflight) == 8
        assert desk.edge.bodies.held_bytes == 0
        del ask["messages"]
        text = ""
        async with asyncio.timeout(60):
            # A call that has just begun may still run its first step.
            while large(b"never seen never") or len(large(b"seen once seen once")) > 1:  # noqa: ASYNC110 - memory has no event
                await asyncio.sleep(0)
        for generation in made:
            generation.end(*desk.ids("4<|im_end|>"))
    for call in calls:
        call.result().release()


@pytest.mark.usefixtures("young_heap")
async def test_a_body_that_came_at_once_is_not_held_either(make_desk: MakeDesk) -> None:
    desk = await make_desk()
    body = msgspec.json.encode({**ASK, "pad": "never seen " * 2000})
    client = await connected(desk, head(desk, len(body)) + body)
    num_bytes = len(body)
    del body
    await desk.sampler.until(lambda: len(desk.sampler.generations) == 1)
    assert len(desk.edge.inflight) == 1
    assert large(b"never seen never", num_bytes // 2) == []
    client.close()
    await until_empty(desk)
