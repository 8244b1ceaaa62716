"""Hundreds of stalled connections, and one client that works normally."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from rollmesh.core.errors import SessionError
from rollmesh.serve.interception.connection import ConnectionLimits
from rollmesh.serve.interception.request import HttpRequest
from rollmesh.testing.engine import ScriptedEngine
from tests.flow.gateway_process import Gateway, next_token, sampling
from tests.unit.serve.interception.conftest import runner  # noqa: F401 - a fixture
from tests.unit.serve.interception.http_client import GET, Client, serving, status_of

NUM_EACH = 120
TAKER = "takes nothing"
NUM_TAKERS = 20
"""Fewer, since the kernel holds some megabytes for each."""
MAX_TIMES = 2.0
"""Largest cost of a call beside the crowd, relative to its cost alone; 1.0 to 1.2 were measured."""

ASK = {"messages": [{"role": "user", "content": "hi"}]}


def stuck(api_key: str) -> dict[str, bytes]:
    """The bytes that each kind of hostile client sends before it stalls."""
    key = f"x-api-key: {api_key}\r\n".encode()
    post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + key
    return {
        "never begins": b"",
        "half a head": post[:-4],
        "half a body": post + b'Content-Length: 99\r\n\r\n{"messages',
        "half a chunk": post + b'Transfer-Encoding: chunked\r\n\r\n63\r\n{"messages',
        TAKER: b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 30,
    }


async def crowd_of(
    kinds: dict[str, bytes], connect: Callable[[], Awaitable[Client]]
) -> dict[str, list[Client]]:
    crowd: dict[str, list[Client]] = {}
    for kind, sent in kinds.items():
        crowd[kind] = []
        for _ in range(NUM_TAKERS if kind == TAKER else NUM_EACH):
            crowd[kind].append(await connect())
            crowd[kind][-1].send(sent)
    return crowd


async def cpu_s_of(gateway: Gateway, opened: dict[str, str], num_calls: int) -> float:
    """CPU seconds of the gateway for this many sequential good calls."""
    process = psutil.Process(gateway.process.pid)
    before = process.cpu_times()
    for _ in range(num_calls):
        assert (await gateway.call(opened, ASK))[0] == 200
    after = process.cpu_times()
    return after.user + after.system - before.user - before.system


async def test_a_stalled_crowd_does_not_slow_a_good_client(
    tmp_path: Path,
) -> None:
    async with ScriptedEngine(next_token) as engine, sampling(tmp_path, engine) as gateway:
        opened = await gateway.open()
        port = int(gateway.address.rpartition(":")[2])
        await cpu_s_of(gateway, opened, 300)
        alone_s = await cpu_s_of(gateway, opened, 600)

        async def connect() -> Client:
            return Client(*await asyncio.open_connection("127.0.0.1", port, limit=1))

        crowds = await crowd_of(stuck(opened["api_key"]), connect)
        crowd = [client for each in crowds.values() for client in each]
        await cpu_s_of(gateway, opened, 100)
        crowded_s = await cpu_s_of(gateway, opened, 600)
        assert not any(client.reader.at_eof() for client in crowd)
        for client in crowd:
            client.reset()
        while True:
            _, metrics = await gateway.admin("GET", "/metrics")
            if "rollmesh_exchanges_open 0.0" in metrics:
                break
    assert crowded_s < MAX_TIMES * alone_s


async def read_soon(request: HttpRequest) -> None:
    """Refuses a body that stalls, and answers with more than a client reads."""
    try:
        await request.read(1000, 0.1)
    except SessionError as error:
        request.answer(error.status, b"", b"")
    else:
        request.answer(200, b"", b"x" * 500_000 if request.path == "/openapi.json" else b"good")


def num_served() -> int:
    return sum(task.get_name() == "http.inbound" for task in asyncio.all_tasks())


def test_a_crowd_is_closed_by_its_deadline_while_a_good_client_is_answered(
    runner: asyncio.Runner,  # noqa: F811 - the fixture
) -> None:
    # Longer than this process may be kept from its CPU: a late client would be cut off.
    limits = ConnectionLimits(idle_s=2.0, head_s=2.0, linger_s=0.5)

    async def main() -> None:
        async with serving(read_soon, limits=limits) as place:
            crowd = await crowd_of(stuck(""), lambda: place.client(limit=1))
            good = await place.client()
            del crowd[TAKER]
            readers = [client for each in crowd.values() for client in each]
            answers = asyncio.gather(*(client.rest() for client in readers))
            # A client that reads nothing is not checked, since the check would read.
            while num_served() != 1 or not answers.done():
                good.send(GET)
                assert await good.answer() == (200, b"good")
            statuses = [status_of(answer) if answer else 0 for answer in await answers]
            for at, expected in enumerate((0, 408, 408, 408)):
                assert statuses[at * NUM_EACH :][:NUM_EACH] == [expected] * NUM_EACH

    runner.run(main())
