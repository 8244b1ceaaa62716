"""A scripted provider on a real loopback socket: whatever bytes a relay is to pass through.

Invariant: every request is kept as it came, every answer comes from the script, piece by piece, and
a gated piece waits for the test; nothing sleeps. Driven by tests.
"""

import asyncio
import types
from collections.abc import Callable, Iterable
from typing import Self

import msgspec
from aiohttp import web


class Told(msgspec.Struct, frozen=True):
    """One scripted answer."""

    pieces: tuple[bytes, ...] = (b"{}",)
    """Written one by one; all but the first wait for `release`, if the provider holds."""
    status: int = 200
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)
    is_cut: bool = False
    """The connection is cut after the last piece."""


class SeenRequest(msgspec.Struct, frozen=True):
    """What came in."""

    method: str
    path: str
    """With the query."""
    headers: tuple[tuple[str, str], ...]
    body: bytes


Script = Callable[[SeenRequest], Told]


def events(*data: bytes) -> Told:
    """A stream of server-sent events, each a piece."""
    pieces = tuple(b"data: %b\n\n" % each for each in data)
    return Told(pieces, headers=(("Content-Type", "text/event-stream"),))


class ScriptedProvider:
    """`async with ScriptedProvider(script) as provider:` serves until the block ends."""

    def __init__(self, script: Script | Iterable[Told]) -> None:
        pending = None if callable(script) else iter(script)
        self._script: Script = script if callable(script) else lambda _: next(pending)  # type: ignore[arg-type]
        self.seen: list[SeenRequest] = []
        self.url = ""
        self.holds = False
        """Pieces after the first wait for `release`; a first one too if `holds_first`."""
        self.holds_first = False
        self.num_left = 0
        """Connections that the relay closed before their answer was whole."""
        self._released = 0
        self._moved = asyncio.Condition()
        server = web.Server(self._handle, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.1)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        await self._runner.cleanup()

    async def release(self, num_pieces: int = 1) -> None:
        """Let so many more pieces go."""
        self._released += num_pieces
        await self._notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds, looking again whenever something happens here."""
        async with asyncio.timeout(10), self._moved:
            await self._moved.wait_for(condition)

    async def _notify(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.content.read()  # of any length
        headers = tuple((name.lower(), value) for name, value in request.headers.items())
        self.seen.append(SeenRequest(request.method, request.raw_path, headers, body))
        told = self._script(self.seen[-1])
        await self._notify()
        try:
            return await self._answer(request, told)
        except asyncio.CancelledError:
            self.num_left += 1
            await asyncio.shield(self._notify())
            raise

    async def _answer(self, request: web.BaseRequest, told: Told) -> web.StreamResponse:
        response = web.StreamResponse(status=told.status)
        response.headers.extend(told.headers)
        for number, piece in enumerate(told.pieces):
            if self.holds and (number or self.holds_first):
                await self.until(lambda: self._released > 0)
                self._released -= 1
            if not response.prepared:
                await response.prepare(request)
            await response.write(piece)
        if told.is_cut and request.transport is not None:
            request.transport.abort()
            raise ConnectionResetError
        await response.write_eof()
        return response
