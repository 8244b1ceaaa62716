"""A gateway under thousands of mixed calls: nothing of a call is left when it is over.

The calls are of every dialect, plain and streamed; a half of them are garbled, foreign, cut off in
the head, in the body or in the answer. In one process each live object is counted; of a process of
its own the memory is watched. Sessions that show screenshots end while their calls are on their
way in, at the engine, or on their way out.
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
"""In each body, so that a body that is kept shows."""
ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": SAID, "max_tokens": 8},
}
ROUGH = ["good", "good", "good", "garbled", "foreign", "cut head", "cut body", "cut answer", "gone"]
PASSING = {f"{Generation.__module__}.Generation", f"{AgentConnection.__module__}.AgentConnection"}
"""What goes soon after a call, and takes the rest along: aborts are repeated for a moment, and lost
clients are noticed by the server alone."""

RETENTION_S = 60.0

Capturing = Callable[[Path], AbstractAsyncContextManager[tuple[GatewayBackend, Callable[[], None]]]]


class Crowd:
    """Agents of a gateway on this machine, each call on a connection of its own."""

    def __init__(self, address: str, seed: int) -> None:
        self.statuses: Counter[tuple[str, int]] = Counter()
        """By kind of call; 0 where the answer was not awaited."""
        self._host, _, self._port = address.removeprefix("http://").partition(":")
        self._random = random.Random(seed)

    async def call(self, api_key: str) -> None:
        """One call of a kind that chance chooses."""
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
        told = b""
        if kind == "cut answer":
            told = await reader.read(64)
        elif kind in ("good", "garbled", "foreign"):
            told = await reader.read()
        writer.transport.abort()
        self.statuses[kind, int(told.split(b" ", 2)[1]) if told else 0] += 1

    def assert_answered(self) -> None:
        """Each as it deserved."""
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
    """A backend, and what makes its engine forget what it saw."""
    model = write_model_folder(folder / "model")
    settings = [f"model.path={model}", f"run.folder={folder}", "sampling.max_tokens=8"]
    async with ScriptedEngine(next_token) as engine:
        backend = TokenBackend(load_config(None, settings), (engine.url,))
        yield backend, engine.seen.clear


@asynccontextmanager
async def captured_by_relay(
    folder: Path,
) -> AsyncIterator[tuple[GatewayBackend, Callable[[], None]]]:
    def tell(seen: ProviderRequest) -> ProviderResponse:
        try:
            asked = orjson.loads(seen.body)
        except orjson.JSONDecodeError:
            return ProviderResponse(status=400)
        return (
            events(b'{"n":1}', b"[DONE]") if asked["stream"] else ProviderResponse((b'{"id":"r"}',))
        )

    async with ScriptedProvider(tell) as provider:
        settings = [f"run.folder={folder}"]
        backend = RelayBackend(load_config(None, settings), (provider.url,), "")
        yield backend, provider.seen.clear


def ours() -> Counter[str]:
    """Live objects of a call's making by their type, but for openings: a bounded cache."""
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
        book = SessionRegistry(backend.capture, SystemClock(), retention_s=60.0)

        async def control(request: HttpRequest, path: str) -> bool:
            return False

        face = backend.serve(control)
        crowd = Crowd(await face.start(listen("127.0.0.1:0")), seed=7)
        running = asyncio.create_task(backend.run())
        left: list[Counter[str]] = []
        for _ in range(3):
            for _ in range(8):
                opened = book.open(CaptureOptions(), b"{}")
                for _ in range(20):
                    await crowd.call(opened.api_key)
                book.delete(book.find(opened.captured.session_id))
            forget()
            del opened
            while not ours().keys().isdisjoint(PASSING):  # noqa: ASYNC110 - told by nobody
                await asyncio.sleep(0)
            assert backend.num_open() == backend.num_live() == 0
            left.append(ours())
        running.cancel()
        await face.stop()
        await backend.close()
    crowd.assert_answered()
    # What the first round left are caches.
    assert left[-1] - left[0] == Counter()


async def test_the_memory_of_a_gateway_is_flat_under_rough_calls(tmp_path: Path) -> None:
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


class Stage:
    """A gateway in this process, whose engine says nothing until it is told to begin."""

    def __init__(self, backend: GatewayBackend, engine: ScriptedEngine | ScriptedProvider) -> None:
        self.backend = backend
        self.engine = engine
        self.clock = FakeClock()
        self.book = SessionRegistry(backend.capture, self.clock, RETENTION_S)
        self.inventory = Inventory()
        self.num_begun = 0
        """Calls whose answer has begun to come."""
        self.address = ("", 0)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async def control(request: HttpRequest, path: str) -> bool:
            return False

        face = self.backend.serve(control)
        address = await face.start(listen("127.0.0.1:0"))
        count_blobs(self.inventory)
        self.backend.count_in(self.inventory, self.book)
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
        """A call of which so many bytes are sent; what is answered."""
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
        while not condition():  # noqa: ASYNC110 - told by nobody
            await asyncio.sleep(0)


@asynccontextmanager
async def stage_in_tokens(folder: Path) -> AsyncIterator[Stage]:
    model = write_large_folder(folder / "model", "qwen3_vl")
    settings = [f"model.path={model}", f"run.folder={folder}", "sampling.max_tokens=8"]
    async with ScriptedEngine(next_token) as engine:
        engine.hold()
        stage = Stage(TokenBackend(load_config(None, settings), (engine.url,)), engine)
        async with stage.serving():
            yield stage


@asynccontextmanager
async def stage_by_relay(folder: Path) -> AsyncIterator[Stage]:
    # Longer than one read, since of a stream the newest piece does not pass.
    told = events(b"1" * 2**20, b"[DONE]")
    async with ScriptedProvider(lambda _: told) as provider:
        provider.holds = provider.holds_first = True
        config = load_config(None, [f"run.folder={folder}"])
        stage = Stage(RelayBackend(config, (provider.url,), ""), provider)
        async with stage.serving():
            yield stage


def looking(number: int, is_stream: bool) -> bytes:
    """A call that shows a screenshot, with a text that nobody else shows."""
    content = base64.b64encode(random.Random(number).randbytes(60_000)).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}
    shown = [{"role": "user", "content": [{"type": "text", "text": f"look {number}"}, image]}]
    return orjson.dumps({"messages": shown, "stream": is_stream})


async def ended_in_mid_call(stage: Stage, ending: str, is_begun: bool, seed: int) -> list[bytes]:
    """A session that ends while one call comes in and two are at the engine; what they hear."""
    opened = stage.book.open(CaptureOptions(), b"{}")
    entry = stage.book.find(opened.captured.session_id)
    bodies = [looking(10 * seed + n, is_begun or n == 1) for n in range(3)]
    num_sent = [len(bodies[0]) // 2, len(bodies[1]), len(bodies[2])]
    if ending == "expire":  # a session whose calls are at the engine is not idle
        del bodies[1:], num_sent[1:]
    stage.num_begun = 0
    async with asyncio.TaskGroup() as group:
        calls = [
            group.create_task(stage.call(opened, body, num))
            for body, num in zip(bodies, num_sent, strict=True)
        ]
        await stage.until(lambda: stage.backend.num_open() == len(calls))
        await stage.until(lambda: stage.backend.num_live() == len(calls) - 1)
        if is_begun and len(calls) > 1:
            begin = stage.engine.allow if isinstance(stage.engine, ScriptedEngine) else None
            await (begin(2) if begin else stage.engine.release())
            await stage.until(lambda: stage.num_begun > 0)
        if ending == "finish":
            stage.book.finish(entry, None)
        elif ending == "expire":
            stage.clock.advance(RETENTION_S)
            stage.book.expire()
        if ending != "expire":
            stage.book.delete(entry)
    return [each.result() for each in calls]


def has_at_most(num_fds: int) -> bool:
    """This process."""
    return psutil.Process().num_fds() <= num_fds


Staging = Callable[[Path], AbstractAsyncContextManager[Stage]]


@pytest.mark.parametrize("staging", [stage_in_tokens, stage_by_relay])
@pytest.mark.usefixtures("young_heap")
async def test_a_session_that_ends_in_mid_call_gives_everything_back(
    tmp_path: Path, staging: Staging
) -> None:
    num_before = blobs.num_blobs()
    async with asyncio.timeout(3 * PATIENCE_S), staging(tmp_path) as stage:
        left: list[tuple[Counter[str], dict[str, int]]] = []
        num_fds = 0
        for seed in range(3):
            for ending in ("finish", "delete", "expire"):
                for is_begun in (False, True):
                    for heard in await ended_in_mid_call(stage, ending, is_begun, seed):
                        assert b'"session_sealed"' in heard
            stage.engine.seen.clear()
            await stage.until(lambda: stage.backend.num_open() + stage.backend.num_live() == 0)
            await stage.until(lambda: ours().keys().isdisjoint(PASSING))
            assert blobs.num_blobs() == num_before
            left.append((ours(), stage.inventory.held()))
            num_fds = num_fds or psutil.Process().num_fds()
            # The kernel's end of a connection goes a moment after ours.
            await stage.until(partial(has_at_most, num_fds))
    # What the first round left are caches.
    assert left[-1][0] - left[0][0] == Counter()
    assert {what: num for what, num in left[-1][1].items() if num} == {}
