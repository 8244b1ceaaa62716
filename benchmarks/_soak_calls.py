"""One agent's HTTP connection: bodies go out in pieces, answers come whole or event by event.

Only as much HTTP/1.1 as the soak's servers speak. Invariant: no body is joined or copied here;
whoever wants to be gone closes in mid-answer. Driven by _soak_agents.py.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from benchmarks._soak_load import Pieces, num_bytes

EVENT = b"data: "
DONE = b"[DONE]"
MAX_LINE_BYTES = 2**20
PATIENCE_S = 120.0


class CallError(Exception):
    """An answer that is not as it should be."""


class Line:
    """A kept connection; opened when first used."""

    def __init__(self, port: int, key: str) -> None:
        self._port = port
        self._key = key.encode()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, path: str, pieces: Pieces, *, is_retry: bool, is_cut: bool = False) -> None:
        """Send a request, or of its body the first half; returns when it is written or buffered."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(
                "127.0.0.1", self._port, limit=MAX_LINE_BYTES
            )
        retry = b"x-stainless-retry-count: 1\r\n" if is_retry else b""
        head = (
            b"POST %b HTTP/1.1\r\nHost: soak\r\nAuthorization: Bearer %b\r\n%b"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        ) % (path.encode(), self._key, retry, num_bytes(pieces))
        self._writer.writelines([head, *(pieces[: len(pieces) // 2] if is_cut else pieces)])
        await self._writer.drain()

    async def plain(self) -> bytes:
        """The answer's body."""
        async with asyncio.timeout(PATIENCE_S):
            length = await self._head()
            if length < 0:
                raise CallError("a stream, where a plain answer was asked for")
            assert self._reader
            return await self._reader.readexactly(length)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The data of each event of a stream, but for its end."""
        async with asyncio.timeout(PATIENCE_S):
            if await self._head() >= 0:
                raise CallError("a plain answer, where a stream was asked for")
            rest = b""
            async for chunk in self._chunks():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.startswith(EVENT) and not line.startswith(EVENT + DONE):
                        yield line[len(EVENT) :]

    def close(self) -> None:
        """At once, whatever is under way; the next `ask` opens anew."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None

    async def _head(self) -> int:
        """The length of the body; -1 where it is chunked. CallError for what is no 200."""
        assert self._reader
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        mark, _, rest = head.partition(b"content-length:")
        length = int(rest.partition(b"\r\n")[0]) if rest else -1
        if not mark.startswith(b"http/1.1 200"):
            why = await self._reader.readexactly(length) if length > 0 else b""
            raise CallError(f"{head[:40]!r}: {why[:300].decode(errors='replace')}")
        return length

    async def _chunks(self) -> AsyncIterator[bytes]:
        assert self._reader
        while length := int(await self._reader.readuntil(b"\r\n"), 16):
            yield (await self._reader.readexactly(length + 2))[:-2]
        await self._reader.readexactly(2)
