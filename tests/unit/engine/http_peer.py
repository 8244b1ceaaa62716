"""HTTP servers that a test scripts byte by byte, and a receiver that records its calls.

A script runs once for each connection and reads the client's real bytes; nothing waits by sleeping.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

from rollmesh.core.errors import ContentLost, EngineUnavailable
from rollmesh.engine.connection import Headers
from rollmesh.engine.http import HttpClient, Response, target

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
PATIENCE_S = 60.0


class Wire:
    """One connection, on the server's side."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def read(self) -> bytes:
        """Read one request."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        _, has_length, rest = head.partition(b"Content-Length: ")
        length = int(rest.split(b"\r\n")[0]) if has_length else 0
        return head + await self._reader.readexactly(length)

    async def answer(self, *pieces: bytes) -> None:
        """Send each piece in its own write."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()

    async def gone(self) -> None:
        """Wait until the client disconnects."""
        with contextlib.suppress(ConnectionError):
            while await self._reader.read(2**16):
                pass


Script = Callable[[Wire], Awaitable[None]]


class Server:
    """Run a script on each connection, then close it."""

    def __init__(self, script: Script) -> None:
        self.url = ""
        self.num_connections = 0
        self._script = script
        self._serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The callback of asyncio.start_server."""
        self.num_connections += 1
        task = asyncio.current_task()
        assert task
        self._serving[task] = writer
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._script(Wire(reader, writer))
        writer.close()
        del self._serving[task]

    async def cut(self) -> None:
        """End every connection and its script."""
        serving = dict(self._serving)
        for writer in serving.values():
            writer.transport.abort()
        await asyncio.gather(*serving)


@contextlib.asynccontextmanager
async def serving(script: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server(script)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    port = listening.sockets[0].getsockname()[1]
    server.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    try:
        yield server
    finally:
        listening.close()
        await listening.wait_closed()
        await server.cut()


def answering(*pieces: bytes) -> Script:
    """Answer one request with these pieces."""

    async def script(wire: Wire) -> None:
        await wire.read()
        await wire.answer(*pieces)

    return script


async def forever(wire: Wire) -> None:
    """Answer every request."""
    while True:
        await wire.read()
        await wire.answer(OK)


class Unread:
    """A piece of a body that is read on demand; counts the bytes read."""

    def __init__(self, content: bytes, is_lost: bool = False) -> None:
        self.num_bytes = len(content)
        self.num_read = 0
        self._content = content
        self._is_lost = is_lost

    def part(self, start: int, stop: int) -> bytes | memoryview:
        if self._is_lost and start:
            raise ContentLost(self.num_bytes, "the disk is gone")
        part = self._content[start:stop]
        self.num_read += len(part)
        return part


class ResponseRecorder:
    """Record the calls of one response; wait for them."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self.data: list[bytes] = []
        self.ends: list[EngineUnavailable | None] = []
        self._moved = asyncio.Event()

    def on_head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        self._moved.set()

    def on_data(self, data: bytes) -> None:
        self.data.append(data)
        self._moved.set()

    def on_end(self) -> None:
        self.ends.append(None)
        self._moved.set()

    def on_error(self, error: EngineUnavailable) -> None:
        self.ends.append(error)
        self._moved.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._moved.clear()
                await self._moved.wait()


async def get(client: HttpClient, url: str, method: str = "GET") -> Response:
    return await client.fetch(target(method, url), timeout_s=PATIENCE_S)
