"""A gateway under thousands of mixed calls keeps nothing of a call after it has ended.

The calls are of every dialect, plain and streamed; half of them are garbled, foreign, or cut off in
the head, the body or the answer. In one process each live object is counted; of a separate process
the memory is watched. Sessions with screenshots end while their calls arrive, are at the engine, or
are answered.
"""

import asyncio
import base64
import gc
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import load_config
from rollmesh.core.metrics import Inventory
from rollmesh.core.process import listen
from rollmesh.runtime import blobs
from rollmesh.runtime.generation.generation import Generation
from rollmesh.serve.interception.agent_server import count_blobs
from rollmesh.serve.interception.backends import GatewayBackend, RelayBackend, TokenBackend
from rollmesh.serve.interception.capture import CaptureOptions, OpenedSession
from rollmesh.serve.interception.connection import AgentConnection
from rollmesh.serve.interception.request import HttpRequest
from rollmesh.serve.interception.sessions import SessionRegistry
from rollmesh.testing.clock import FakeClock
from rollmesh.testing.engine import ScriptedEngine
from rollmesh.testing.model_folder import write_large_folder, write_model_folder
from rollmesh.testing.upstreams import ProviderRequest, ProviderResponse, ScriptedProvider, events
from tests.flow.gateway_process import PATIENCE_S, next_token, sampling

SAID = [{"role": "user", "content": "hi"}]
PAD = "x" * 20_000
"""In each body, so that a leaked body can be found."""
ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": SAID, "max_tokens": 8},
}
ROUGH = ["good", "good", "good", "garbled", "foreign", "cut head", "cut body", "cut answer", "gone"]
PASSING = {f"{Generation.__module__}.Generation", f"{AgentConnection.__module__}.AgentConnection"}
"""Objects that are freed soon after a call, with everything that they hold: aborts are repeated for
a moment, and only the server notices lost clients.
"""

RETENTION_S = 60.0

Capturing = Callable[[Path], AbstractAsyncContextManager[tuple[GatewayBackend, Callable[[], None]]]]


class Crowd:
    """Agents of a gateway on this machine; each call has its own connection."""

    def __init__(self, address: str, seed: int) -> None:
        self.statuses: Counter[tuple[str, int]] = Counter()
        """By kind of call; 0 if the answer was not awaited."""
        self._host, _, self._port = address.removeprefix("http://").partition(":")
        self._random = random.Random(seed)

    async def call(self, api_key: str) -> None:
        """Make one call of a random kind."""
        kind, path = self._random.choice(ROUGH), self._random.choice(list(ASKS))
        ask = {**ASKS[path], "stream": self._random.random() < 0.5, "pad": PAD}
        body = orjson.dumps(ask | {"user": f"{self._random.random()}"})
        lines = [
            f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n",
            f"x-api-key: {'rk-nobody' if kind == 'foreign' else api_key}\r\n",
            f"Content-Length: {len(body)}\r\n\r\n",
        ]
        head = "".join(lines).encode()
        sent = {
            "garbled": head + body[:-1] + b"]",
            "cut head": head[:40],
            "cut body": head + body[:-9],
        }.get(kind, head + body)
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        writer.write(sent)
        answer = b""
        if kind == "cut answer":
            answer = await reader.read(64)
        elif kind in ("good", "garbled", "foreign"):
            answer = await reader.read()
        writer.transport.abort()
        self.statuses[kind, int(answer.split(b" ", 2)[1]) if answer else 0] += 1

    def assert_answered(self) -> None:
        """Check that each kind of call got its status."""
        assert set(self.statuses) == {
            ("good", 200),
            ("garbled", 400),
            ("foreign", 401),
            ("cut answer", 200),
            ("cut head", 0),
            ("cut body", 0),
            ("gone", 0),
        }


@asynccontextmanager
async def captured_in_tokens(
    folder: Path,
) -> AsyncIterator[tuple[GatewayBackend, Callable[[], None]]]:
    """A backend, and a function that clears the record of its engine."""
    model = write_model_folder(folder / "model")
    settings = [f"model.path={model}", f"run.folder={folder}", "sampling.max_tokens=8"]
    async with ScriptedEngine(next_token) as engine:
        backend = TokenBackend(load_config(None, settings), (engine.url,))
        yield backend, engine.seen.clear


@asynccontextmanager
async def captured_by_relay(
    folder: Path,
) -> AsyncIterator[tuple[GatewayBackend, Callable[[], None]]]:
    def answer(seen: ProviderRequest) -> ProviderResponse:
        try:
            asked = orjson.loads(seen.body)
        except orjson.JSONDecodeError:
            return ProviderResponse(status=400)
        return (
            events(b'{"n":1}', b"[DONE]") if asked["stream"] else ProviderResponse((b'{"id":"r"}',))
        )

    async with ScriptedProvider(answer) as provider:
        settings = [f"run.folder={folder}"]
        backend = RelayBackend(load_config(None, settings), (provider.url,), "")
        yield backend, provider.seen.clear


def ours() -> Counter[str]:
    """Live objects of calls by type, except for openings, which are a bounded cache."""
    gc.collect()
    names = (f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    rooms = ("rollmesh.runtime.", "rollmesh.serve.")
    return Counter(n for n in names if n.startswith(rooms) and ".shared_prefixes." not in n)


@pytest.mark.parametrize("capturing", [captured_in_tokens, captured_by_relay])
@pytest.mark.usefixtures("young_heap")
async def test_no_object_of_a_call_outlives_its_session(
    tmp_path: Path, capturing: Capturing
) -> None:
    async with asyncio.timeout(PATIENCE_S), capturing(tmp_path) as (backend, forget):
        registry = SessionRegistry(backend.capture, SystemClock(), retention_s=60.0)

        async def control(request: HttpRequest, path: str) -> bool:
            return False

        face = backend.serve(control)
        crowd = Crowd(await face.start(listen("127.0.0.1:0")), seed=7)
        running = asyncio.create_task(backend.run())
        left: list[Counter[str]] = []
        for _ in range(3):
            for _ in range(8):
                opened = registry.open(CaptureOptions(), b"{}")
                for _ in range(20):
                    await crowd.call(opened.api_key)
                registry.delete(registry.find(opened.captured.session_id))
            forget()
            del opened
            while not ours().keys().isdisjoint(PASSING):  # noqa: ASYNC110 - no event announces it
                await asyncio.sleep(0)
            assert backend.num_open() == backend.num_live() == 0
            left.append(ours())
        running.cancel()
        await face.stop()
        await backend.close()
    crowd.assert_answered()
    # Leftovers of the first round are caches.
    assert left[-1] - left[0] == Counter()


async def test_the_memory_of_a_gateway_is_flat_under_bad_calls(tmp_path: Path) -> None:
    num_lanes = 8
    async with ScriptedEngine(next_token) as engine, sampling(tmp_path, engine) as gateway:
        process = psutil.Process(gateway.process.pid)
        crowd = Crowd(gateway.address, seed=7)

        async def lane(num_sessions: int) -> None:
            for _ in range(num_sessions):
                opened = await gateway.open()
                for _ in range(20):
                    await crowd.call(opened["api_key"])
                path = f"/admin/sessions/{opened['session_id']}"
                assert (await gateway.admin("POST", f"{path}/finish"))[0] == 200
                assert (await gateway.admin("DELETE", path))[0] == 200

        rss_bytes: list[int] = []
        for _ in range(3):
            async with asyncio.TaskGroup() as group:
                for _ in range(num_lanes):
                    group.create_task(lane(4))
            rss_bytes.append(process.memory_info().rss)
        metrics = ""
        while "rollmesh_exchanges_open 0.0" not in metrics:
            _, metrics = await gateway.admin("GET", "/metrics")
    crowd.assert_answered()
    assert "rollmesh_live_legs 0.0" in metrics
    assert 'rollmesh_sessions{state="open"} 0.0' in metrics
    assert 'rollmesh_sessions{state="finished"} 0.0' in metrics
    # The bodies of the last 640 calls are 12 MB.
    assert rss_bytes[-1] - rss_bytes[1] < 4_000_000


class GatewayInProcess:
    """A gateway in this process, whose engine waits for permission to answer."""

    def __init__(self, backend: GatewayBackend, engine: ScriptedEngine | ScriptedProvider) -> None:
        self.backend = backend
        self.engine = engine
        self.clock = FakeClock()
        self.registry = SessionRegistry(backend.capture, self.clock, RETENTION_S)
        self.inventory = Inventory()
        self.num_begun = 0
        """Calls whose answer has begun to arrive."""
        self.address = ("", 0)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async def control(request: HttpRequest, path: str) -> bool:
            return False

        face = self.backend.serve(control)
        address = await face.start(listen("127.0.0.1:0"))
        count_blobs(self.inventory)
        self.backend.count_in(self.inventory, self.registry)
        host, _, port = address.removeprefix("http://").rpartition(":")
        self.address = host, int(port)
        running = asyncio.create_task(self.backend.run())
        try:
            yield
        finally:
            running.cancel()
            await face.stop()
            await self.backend.close()

    async def call(self, opened: OpenedSession, body: bytes, num_sent: int) -> bytes:
        """Make a call but send only `num_sent` bytes; return the answer."""
        reader, writer = await asyncio.open_connection(*self.address)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nx-api-key: {opened.api_key}\r\n".encode()
        size = b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + b"Host: x\r\n" + size + body[:num_sent])
        try:
            first = await reader.read(1)
            self.num_begun += 1
            return first + await reader.read()
        finally:
            writer.transport.abort()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0)


@asynccontextmanager
async def gateway_in_tokens(folder: Path) -> AsyncIterator[GatewayInProcess]:
    model = write_large_folder(folder / "model", "qwen3_vl")
    settings = [f"model.path={model}", f"run.folder={folder}", "sampling.max_tokens=8"]
    async with ScriptedEngine(next_token) as engine:
        engine.hold()
        gateway = GatewayInProcess(TokenBackend(load_config(None, settings), (engine.url,)), engine)
        async with gateway.serving():
            yield gateway


@asynccontextmanager
async def gateway_by_relay(folder: Path) -> AsyncIterator[GatewayInProcess]:
    # Longer than one read, since a relay holds back the newest piece of a stream.
    response = events(b"1" * 2**20, b"[DONE]")
    async with ScriptedProvider(lambda _: response) as provider:
        provider.holds = provider.holds_first = True
        config = load_config(None, [f"run.folder={folder}"])
        gateway = GatewayInProcess(RelayBackend(config, (provider.url,), ""), provider)
        async with gateway.serving():
            yield gateway


def call_with_screenshot(number: int, is_stream: bool) -> bytes:
    """A call that shows a screenshot, with a text of its own."""
    content = base64.b64encode(random.Random(number).randbytes(60_000)).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}
    shown = [{"role": "user", "content": [{"type": "text", "text": f"look {number}"}, image]}]
    return orjson.dumps({"messages": shown, "stream": is_stream})


async def answers_of_ended_session(
    gateway: GatewayInProcess, ending: str, is_begun: bool, seed: int
) -> list[bytes]:
    """End a session while one call arrives and two are at the engine; return their answers."""
    opened = gateway.registry.open(CaptureOptions(), b"{}")
    entry = gateway.registry.find(opened.captured.session_id)
    bodies = [call_with_screenshot(10 * seed + n, is_begun or n == 1) for n in range(3)]
    num_sent = [len(bodies[0]) // 2, len(bodies[1]), len(bodies[2])]
    if ending == "expire":  # a session whose calls are at the engine is not idle
        del bodies[1:], num_sent[1:]
    gateway.num_begun = 0
    async with asyncio.TaskGroup() as group:
        calls = [
            group.create_task(gateway.call(opened, body, num))
            for body, num in zip(bodies, num_sent, strict=True)
        ]
        await gateway.until(lambda: gateway.backend.num_open() == len(calls))
        await gateway.until(lambda: gateway.backend.num_live() == len(calls) - 1)
        if is_begun and len(calls) > 1:
            begin = gateway.engine.allow if isinstance(gateway.engine, ScriptedEngine) else None
            await (begin(2) if begin else gateway.engine.release())
            await gateway.until(lambda: gateway.num_begun > 0)
        if ending == "finish":
            gateway.registry.finish(entry, None)
        elif ending == "expire":
            gateway.clock.advance(RETENTION_S)
            gateway.registry.expire()
        if ending != "expire":
            gateway.registry.delete(entry)
    return [each.result() for each in calls]


def has_at_most(num_fds: int) -> bool:
    """Whether this process has at most so many."""
    return psutil.Process().num_fds() <= num_fds


Staging = Callable[[Path], AbstractAsyncContextManager[GatewayInProcess]]


@pytest.mark.parametrize("starting", [gateway_in_tokens, gateway_by_relay])
@pytest.mark.usefixtures("young_heap")
async def test_a_session_that_ends_during_calls_frees_everything(
    tmp_path: Path, starting: Staging
) -> None:
    num_before = blobs.num_blobs()
    async with asyncio.timeout(3 * PATIENCE_S), starting(tmp_path) as gateway:
        left: list[tuple[Counter[str], dict[str, int]]] = []
        num_fds = 0
        for seed in range(3):
            for ending in ("finish", "delete", "expire"):
                for is_begun in (False, True):
                    for answer in await answers_of_ended_session(gateway, ending, is_begun, seed):
                        assert b'"session_sealed"' in answer
            gateway.engine.seen.clear()
            await gateway.until(
                lambda: gateway.backend.num_open() + gateway.backend.num_live() == 0
            )
            await gateway.until(lambda: ours().keys().isdisjoint(PASSING))
            assert blobs.num_blobs() == num_before
            left.append((ours(), gateway.inventory.held()))
            num_fds = num_fds or psutil.Process().num_fds()
            # The kernel closes its end of a connection a moment after the process.
            await gateway.until(partial(has_at_most, num_fds))
    # Leftovers of the first round are caches.
    assert left[-1][0] - left[0][0] == Counter()
    assert {what: num for what, num in left[-1][1].items() if num} == {}
