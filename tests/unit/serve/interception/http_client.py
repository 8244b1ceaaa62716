"""An HTTP server with a handler of the test, and clients that send raw bytes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollmesh.core.errors import SessionError
from rollmesh.core.process import listen
from rollmesh.serve.interception.body_limits import BodyBudget
from rollmesh.serve.interception.connection import ConnectionLimits
from rollmesh.serve.interception.request import JSON, HttpRequest
from rollmesh.serve.interception.server import Handler, HttpServer

PATIENCE_S = 60.0
MAX_BYTES = 100_000
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
LAST_GET = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


class Client:
    """A client that sends raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> bytes:
        return await self.reader.readuntil(b"\r\n\r\n")

    async def answer(self) -> tuple[int, bytes]:
        """Return the status and body of an answer with a length."""
        head = await self.head()
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return int(head.split(b" ")[1]), await self.reader.readexactly(length)

    async def rest(self) -> bytes:
        """Return everything until the server closes the connection."""
        return await self.reader.read()

    @property
    def num_unsent(self) -> int:
        return self.writer.transport.get_write_buffer_size()

    def reset(self) -> None:
        self.writer.transport.abort()


class RunningServer:
    """A running server."""

    def __init__(self, server: HttpServer, port: int, clients: list[Client]) -> None:
        self.server, self._port, self._clients = server, port, clients

    async def client(self, limit: int = 1 << 20) -> Client:
        pair = await asyncio.open_connection("127.0.0.1", self._port, limit=limit)
        self._clients.append(Client(*pair))
        return self._clients[-1]

    async def ask(self, data: bytes) -> bytes:
        """Send bytes and return everything until the server closes the connection."""
        client = await self.client()
        client.send(data)
        return await client.rest()


@asynccontextmanager
async def serving(
    handle: Handler,
    drain_s: float = 0.1,
    limits: ConnectionLimits | None = None,
    bodies: BodyBudget | None = None,
) -> AsyncIterator[RunningServer]:
    async with asyncio.timeout(PATIENCE_S):
        server = HttpServer(handle, drain_s, limits, bodies)
        address = await server.start(listen("127.0.0.1:0"))
        clients: list[Client] = []
        try:
            yield RunningServer(server, int(address.rpartition(":")[2]), clients)
        finally:
            await server.stop()
            for client in clients:
                client.reset()


async def echo(request: HttpRequest) -> None:
    try:
        body = await request.read(MAX_BYTES, PATIENCE_S)
    except SessionError as error:
        request.answer(error.status, request.header_lines(JSON), error.code.encode())
    else:
        request.answer(200, request.header_lines(JSON), body)


class HeldHandler:
    """A handler that waits until it is released, and records whether it was cancelled."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, request: HttpRequest) -> None:
        self.begun.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        request.answer(200, request.header_lines(JSON), b"held")


def sized(body: bytes, *lines: bytes) -> bytes:
    head = [b"POST /p?q HTTP/1.1", b"Host: x", b"Content-Length: %d" % len(body), *lines, b"", b""]
    return b"\r\n".join(head) + body


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ")[1])
