"""Targets of the fuzz tests: servers that strangers, agents, engines and members reach, as real
processes.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
import msgspec
import psutil
import zmq
import zmq.asyncio
from aiohttp import web

from rollmesh.scheduler.admission.transport import ask_admission, ask_scheduler
from rollmesh.serve.client.client import Finished, RolloutClient
from rollmesh.tensors.frames import (
    NONCE_BYTES,
    Clear,
    EndStep,
    Fetch,
    Hello,
    KeyProof,
    Request,
    Returned,
    TakeShards,
    frame,
)
from rollmesh.tensors.peers import Peers
from rollmesh.testing.engine import ScriptedEngine
from rollmesh.wire.scheduling import KillPipeline, ReadScheduler
from tests.contract.processes import embedded_engine
from tests.flow.gateway_process import Gateway, next_token, sampling, serving
from tests.flow.worker_mesh import Mesh, ask, open_mesh, take
from tests.security.mutations import Mutator
from tests.security.test_admission import admission_process, scheduler_up
from tests.unit.engine.embedded.tiny_models import write_model
from tests.unit.tensors.owners import owned

ANSWER_S = 20.0
MAX_GROWTH_BYTES = 64 * 2**20
SETTLES_WITHIN_S = 30.0
CALLS_PER_SESSION = 100
"""A session keeps all of its answers."""
USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLS: dict[str, Any] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [{"role": "system", "content": [{"type": "text", "text": "s"}]}, USER],
        "tools": [TOOL],
        "max_tokens": 3,
        "stream": False,
        "logprobs": True,
        "stop": ["x"],
        "response_format": {"type": "text"},
    },
    "/v1/completions": {"model": "m", "prompt": ["a", "b"], "max_tokens": 3, "n": 2, "echo": True},
    "/v1/responses": {"model": "m", "input": [USER], "max_output_tokens": 3, "stream": True},
    "/v1/messages": {
        "model": "m",
        "max_tokens": 3,
        "system": [{"type": "text", "text": "s"}],
        "messages": [USER],
        "stream": True,
    },
}

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Surface(Protocol):
    """A server or socket that receives inputs."""

    pid: int
    max_growth_bytes: int

    async def send(self, mutator: Mutator) -> None:
        """Send one input, and read its answer; AssertionError for a 500."""

    async def check(self) -> None:
        """AssertionError unless a valid request is answered as it should be."""


async def exchange(address: str, request: bytes) -> bytes:
    """The server's answer to these bytes, until it closes the connection or stops sending."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        writer.write_eof()
        async with asyncio.timeout(ANSWER_S):
            return await reader.read()
    except (ConnectionError, TimeoutError):
        return b""
    finally:
        writer.close()


class HttpSurface:
    """Requests to one server, changed at random."""

    def __init__(
        self,
        pid: int,
        address: str,
        calls: dict[str, Any],
        headers: dict[str, str],
        check: Callable[[], Any],
    ) -> None:
        self.pid = pid
        self.max_growth_bytes = MAX_GROWTH_BYTES
        self._address, self._calls, self._headers = address, calls, headers
        self.check = check

    async def send(self, mutator: Mutator) -> None:
        path = mutator.rng.choice(list(self._calls))
        request = mutator.http(path, mutator.json(self._calls[path]), self._headers)
        answer = await exchange(self._address, request)
        assert not answer.startswith(b"HTTP/1.1 500"), (request[:2000], answer[:500])


class FrameSurface:
    """Messages to a ROUTER socket of ours, changed at random."""

    def __init__(self, pid: int, address: str, check: Callable[[], Any]) -> None:
        self.pid = pid
        self.max_growth_bytes = MAX_GROWTH_BYTES
        self.check = check
        self._context = zmq.asyncio.Context()
        self._address = address
        self._socket = self._connect()

    def _connect(self) -> "zmq.asyncio.Socket":
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._address)
        return socket

    async def send(self, mutator: Mutator) -> None:
        if mutator.rng.random() < 0.01:
            self._socket.close()
            self._socket = self._connect()
        async with asyncio.timeout(ANSWER_S):
            await self._socket.send_multipart(mutator.frames())
        while await self._socket.poll(0):
            await self._socket.recv_multipart()

    def close(self) -> None:
        self._context.destroy(linger=0)


class StreamSurface:
    """Bytes to a socket of ours, one connection for each input."""

    def __init__(
        self,
        pid: int,
        connect: Callable[[], Awaitable[Connection]],
        make: Callable[[Mutator], bytes],
        check: Callable[[], Any],
    ) -> None:
        self.pid = pid
        self.max_growth_bytes = MAX_GROWTH_BYTES
        self.check = check
        self._connect, self._make = connect, make

    async def send(self, mutator: Mutator) -> None:
        reader, writer = await self._connect()
        try:
            writer.write(self._make(mutator))
            writer.write_eof()
            async with asyncio.timeout(ANSWER_S):
                await reader.read()
        except TimeoutError:
            raise
        except OSError:  # the connection was closed
            pass
        finally:
            writer.close()


class MutatingProxy:
    """A proxy that changes the answers of an engine or a provider, unless it is honest."""

    def __init__(
        self, target: str, mutator: Mutator, headers: dict[str, str] | None = None
    ) -> None:
        self.url = ""
        self.is_honest = True
        self._target, self._headers = target, headers
        self._mutator = mutator

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["MutatingProxy"]:
        async with aiohttp.ClientSession() as client:

            async def forward(request: web.Request) -> web.StreamResponse:
                raw = await request.read()
                url = self._target + request.path_qs
                headers = self._headers
                async with client.request(request.method, url, data=raw, headers=headers) as got:
                    answer, status = await got.read(), got.status
                return self._changed(answer, status, got.content_type)

            app = web.Application(client_max_size=2**28)
            app.router.add_route("*", "/{path:.*}", forward)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            [address] = runner.addresses
            self.url = f"http://127.0.0.1:{address[1]}"
            try:
                yield self
            finally:
                await runner.cleanup()

    def _changed(self, answer: bytes, status: int, kind: str) -> web.Response:
        chance = self._mutator.rng.random()
        if not self.is_honest and chance < 0.6:
            try:
                answer = self._mutator.json(json.loads(answer))
            except ValueError:
                answer = self._mutator.raw(answer)
            if chance < 0.05:
                status = self._mutator.rng.choice([201, 302, 400, 404, 429, 503])
        return web.Response(body=answer, status=status, content_type=kind)


class AnswerSurface:
    """A gateway whose engine or provider answers at random."""

    def __init__(self, gateway: Gateway, opened: dict[str, str], proxy: MutatingProxy) -> None:
        self.pid = gateway.process.pid
        self.max_growth_bytes = MAX_GROWTH_BYTES
        self._gateway, self._opened, self._proxy = gateway, opened, proxy
        self._num_sent = 0

    async def send(self, mutator: Mutator) -> None:
        self._proxy.is_honest = False
        self._num_sent += 1
        if self._num_sent % CALLS_PER_SESSION == 0:
            over, self._opened = self._opened, await self._gateway.open()
            await self._gateway.admin("DELETE", f"/admin/sessions/{over['session_id']}")
        path = mutator.rng.choice(["/v1/chat/completions", "/v1/completions"])
        body = {**CALLS[path], "seed": mutator.rng.randrange(2**30)}
        status = await self._call(path, body)
        assert status != 500

    async def _call(self, path: str, body: Any) -> int:
        headers = {"Authorization": f"Bearer {self._opened['api_key']}"}
        url = self._gateway.address + path
        try:
            async with self._gateway.client.post(url, json=body, headers=headers) as response:
                await response.read()
                return response.status
        except aiohttp.ClientPayloadError:  # a stream that is cut
            return 0

    async def check(self) -> None:
        self._proxy.is_honest = True
        async with asyncio.timeout(SETTLES_WITHIN_S):
            while await self._call("/v1/completions", CALLS["/v1/completions"]) != 200:
                pass


@asynccontextmanager
async def gateway(folder: Path, _: Mutator) -> AsyncIterator[Surface]:
    """Agents' calls to the interception server."""
    async with ScriptedEngine(next_token) as engine, sampling(folder, engine) as served:
        opened = await served.open()

        async def check() -> None:
            fresh = await served.open()
            status, _ = await served.call(fresh, {"messages": [USER], "max_tokens": 2})
            assert status == 200

        headers = {"Authorization": f"Bearer {opened['api_key']}"}
        yield HttpSurface(served.process.pid, served.address, CALLS, headers, check)


@asynccontextmanager
async def admin(folder: Path, _: Mutator) -> AsyncIterator[Surface]:
    """The admin's routes, with the token."""
    async with ScriptedEngine(next_token) as engine, sampling(folder, engine) as served:
        body = {"metadata": {"a": 1}, "sampling": {"temperature": 1.0}, "seed": 1}
        opened = await served.open()
        calls = {
            "/admin/sessions": body,
            f"/admin/sessions/{opened['session_id']}/finish": {"reward": 1.0},
        }

        async def check() -> None:
            assert (await served.admin("GET", "/healthz"))[0] == 200

        headers = {"Authorization": f"Bearer {served.token}"}
        yield HttpSurface(served.process.pid, served.address, calls, headers, check)


@asynccontextmanager
async def engine(folder: Path, _: Mutator) -> AsyncIterator[Surface]:
    """The embedded engine's routes."""
    model = write_model(folder / "tiny", "qwen3", seed=0)
    with embedded_engine(model, "--skip-tokenizer-init") as process:
        generate = {
            "input_ids": [1, 2, 3],
            "sampling_params": {"max_new_tokens": 2, "temperature": 1.0, "stop_token_ids": [5]},
            "return_logprob": True,
            "stream": False,
            "rid": "r",
            "extra_key": "1",
        }
        calls = {
            "/generate": generate,
            "/abort_request": {"rid": "r"},
            "/update_weights_from_disk": {"model_path": "/nowhere", "weight_version": "1"},
            "/stage_weights": {"names": ["a"], "shapes": [[1]], "dtypes": ["float32"]},
            "/update_weight_version": {"new_version": "x", "abort_all_requests": False},
            "/load_lora_adapter": {"lora_name": "a", "lora_path": "/nowhere"},
            "/unload_lora_adapter": {"lora_name": "a"},
        }

        async def check() -> None:
            async with aiohttp.ClientSession() as client:
                url = f"{process.address}/generate"
                async with client.post(url, json={"input_ids": [1, 2]}) as response:
                    assert response.status == 200

        yield HttpSurface(process.pid, process.address, calls, {}, check)


async def still_serves(mesh: Mesh, client: RolloutClient) -> None:
    """The router gives a group to the worker, and the client gets its result."""
    asked = ask(client)
    arrivals = await take(client)
    assert [(each.group_id, type(each)) for each in arrivals] == [(asked, Finished)]
    assert mesh.status()


@asynccontextmanager
async def meshed(folder: Path) -> AsyncIterator[tuple[Mesh, RolloutClient]]:
    async with open_mesh(folder) as mesh:
        await asyncio.to_thread(mesh.worker, "w1")
        yield mesh, mesh.client()


@asynccontextmanager
async def router(folder: Path, _: Mutator) -> AsyncIterator[Surface]:
    """Messages to the router, as any member could send them, in a mesh without keys."""
    async with meshed(folder) as (mesh, client):
        pid, address = mesh.router.popen.pid, mesh.router.ready.address
        surface = FrameSurface(pid, address, lambda: still_serves(mesh, client))
        yield surface
        surface.close()


@asynccontextmanager
async def sink(folder: Path, _: Mutator) -> AsyncIterator[Surface]:
    """Results and other messages to a client's sink, which is in this process."""
    async with meshed(folder) as (mesh, client):
        surface = FrameSurface(
            psutil.Process().pid, client.address, lambda: still_serves(mesh, client)
        )
        surface.max_growth_bytes *= 4  # the inputs are made in this process too
        yield surface
        surface.close()


@asynccontextmanager
async def status(folder: Path, _: Mutator) -> AsyncIterator[Surface]:
    """The router's HTTP status."""
    async with meshed(folder) as (mesh, client):
        address = mesh.router.ready.http_address
        calls: dict[str, Any] = {
            "/status": {},
            "/metrics": {},
            "/healthz": {},
            "/%2e%2e/etc?x=1": {},
        }
        pid = mesh.router.popen.pid
        yield HttpSurface(pid, address, calls, {}, lambda: still_serves(mesh, client))


@asynccontextmanager
async def engine_answers(folder: Path, mutator: Mutator) -> AsyncIterator[Surface]:
    """Answers of an engine, as a gateway reads them."""
    async with AsyncExitStack() as stack:
        real = await stack.enter_async_context(ScriptedEngine(next_token))
        proxy = await stack.enter_async_context(MutatingProxy(real.url, mutator).serving())
        real.url, url = proxy.url, real.url
        served = await stack.enter_async_context(sampling(folder, real))
        real.url = url
        yield AnswerSurface(served, await served.open(), proxy)


@asynccontextmanager
async def upstream_answers(folder: Path, mutator: Mutator) -> AsyncIterator[Surface]:
    """Answers of a provider, as a relay reads them."""
    async with AsyncExitStack() as stack:
        real = await stack.enter_async_context(ScriptedEngine(next_token))
        behind = folder / "behind"
        behind.mkdir()
        provider = await stack.enter_async_context(sampling(behind, real))
        opened = await provider.open()
        target = opened["base_url"].removesuffix("/v1")
        headers = {"Authorization": f"Bearer {opened['api_key']}"}
        proxy = await stack.enter_async_context(MutatingProxy(target, mutator, headers).serving())
        args = ["--capture", "relay", "--engine", proxy.url]
        served = await stack.enter_async_context(serving(folder, *args))
        yield AnswerSurface(served, await served.open(), proxy)


@asynccontextmanager
async def scheduler(folder: Path, _: Mutator) -> AsyncIterator[Surface]:
    """Messages to a scheduler without keys."""
    with scheduler_up(folder, "--no-keys") as address:
        port = int(address.rpartition(":")[2])
        [pid] = {
            each.pid
            for each in psutil.net_connections("tcp4")
            if each.status == psutil.CONN_LISTEN and each.laddr[1:] == (port,) and each.pid
        }

        async def check() -> None:
            answer = await asyncio.to_thread(ask_scheduler, address, ReadScheduler("r", "math"))
            assert answer.ok, answer

        surface = FrameSurface(pid, address, check)
        yield surface
        surface.close()


@asynccontextmanager
async def admission(folder: Path, _: Mutator) -> AsyncIterator[Surface]:
    """Requests to the unix socket of an admission process, by its own user."""
    with admission_process(folder) as (process, path):

        def make(mutator: Mutator) -> bytes:
            raw = msgspec.msgpack.encode(mutator.frames())
            whole = len(raw).to_bytes(4, "big") + raw
            return mutator.raw(whole) if mutator.rng.random() < 0.2 else whole

        async def check() -> None:
            question = KillPipeline("k", "nope")
            assert not (await asyncio.to_thread(ask_admission, path, question)).ok

        def connect() -> Awaitable[Connection]:
            return asyncio.open_unix_connection(path)

        yield StreamSurface(process.pid, connect, make, check)


@asynccontextmanager
async def tensors(_folder: Path, _: Mutator) -> AsyncIterator[Surface]:
    """A consumer's messages to the tensor port, which is in this process."""
    ids = (7).to_bytes(8, "little")
    asks: list[Request] = [
        Fetch(ids, True),
        Fetch(ids, False),
        Clear(ids),
        TakeShards(ids, 1),
        EndStep(1),
        Returned(ids),
    ]
    greeting = frame(Hello(1, bytes(NONCE_BYTES))) + frame(KeyProof(b""))
    with owned() as owner:
        parts = urlsplit(owner.address)

        def connect() -> Awaitable[Connection]:
            return asyncio.open_connection(parts.hostname, parts.port)

        def make(mutator: Mutator) -> bytes:
            if mutator.rng.random() < 0.2:
                return mutator.raw(greeting)
            chosen = [mutator.msgpack(frame(mutator.rng.choice(asks))[4:]) for _ in range(3)]
            return greeting + b"".join(len(each).to_bytes(4, "little") + each for each in chosen)

        def fetched() -> int:
            with closing(Peers(None)) as peers:
                return len(peers.fetch(owner.address, owner.put([64])))

        async def check() -> None:
            assert await asyncio.to_thread(fetched) == 1

        surface = StreamSurface(psutil.Process().pid, connect, make, check)
        surface.max_growth_bytes *= 4  # the inputs are made in this process too
        yield surface


SURFACES: list[Callable[[Path, Mutator], AbstractAsyncContextManager[Surface]]] = [
    gateway,
    admin,
    engine,
    router,
    sink,
    status,
    engine_answers,
    upstream_answers,
    scheduler,
    admission,
    tensors,
]
