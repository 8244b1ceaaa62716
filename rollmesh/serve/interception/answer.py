"""An answer's way onto its connection: status line, headers and bytes, written as they stand.

aiohttp reads requests for us; its responses cost more than a short answer is worth, so those of the
hot path are written to the transport by hand. Invariants: one write per call; a stream is chunked,
or ends with its connection where the client speaks HTTP/1.0; whoever writes awaits `drain` before
writing more. Driven by exchange.py.
"""

import contextlib
import email.utils
import functools

from aiohttp import web
from aiohttp.http import HttpVersion11

from rollmesh.core.clock import Clock

KEEP_ALIVE = b": keep-alive\n\n"
_SIZED = b"Content-Length: %d\r\n"
_CHUNKED = b"Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class Answer:
    """One answer; a stream's first event opens it."""

    __slots__ = ("_clock", "_extra_headers", "_is_chunked", "_is_fresh", "_request", "is_open")

    def __init__(self, request: web.BaseRequest, clock: Clock) -> None:
        self.is_open = False
        """The first byte left."""
        self._request = request
        self._clock = clock
        self._extra_headers = b""
        self._is_chunked = request.version >= HttpVersion11
        self._is_fresh = False
        """Something was written since the last beat."""

    def add_header(self, name: bytes, value: bytes) -> None:
        """One more header; before the first byte, and without line breaks."""
        self._extra_headers += b"%b: %b\r\n" % (name, value)

    def send_whole(self, body: bytes) -> web.StreamResponse:
        """The whole of a plain answer in JSON."""
        self.is_open = True
        keeps = self._request.keep_alive
        self._write(self._head(b"application/json", _SIZED % len(body), keeps) + body)
        return written(keeps)

    def send(self, events: bytes) -> None:
        """Events of a stream."""
        self._is_fresh = True
        self._write(self._framed(events))

    def close(self, events: bytes) -> web.StreamResponse:
        """The last events of a stream, and its end."""
        framed = self._framed(events)
        self._write(framed + _LAST_CHUNK if self._is_chunked else framed)
        return written(self._keeps_stream)

    def beat(self) -> None:
        """Send a comment where nothing was sent since the last beat; a lost client is no matter."""
        if not self._is_fresh:
            with contextlib.suppress(ConnectionError):
                self.send(KEEP_ALIVE)
        self._is_fresh = False

    async def drain(self) -> None:
        """Until the connection takes more."""
        await self._request.writer.drain()

    def _framed(self, events: bytes) -> bytes:
        """Events as they go on the wire; the first with the head before them."""
        if self._is_chunked:
            events = b"%x\r\n%b\r\n" % (len(events), events)
        if self.is_open:
            return events
        self.is_open = True
        framing = _CHUNKED if self._is_chunked else b""
        kind = b"text/event-stream; charset=utf-8"
        return self._head(kind, framing, self._keeps_stream) + events

    @property
    def _keeps_stream(self) -> bool:
        """Without chunks only the connection's end can end a stream."""
        return self._is_chunked and self._request.keep_alive

    def _head(self, kind: bytes, framing: bytes, keeps: bool) -> bytes:
        return b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n%bDate: %b\r\n%b%b\r\n" % (
            kind,
            framing,
            _date(int(self._clock.unix_s())),
            self._extra_headers,
            CONNECTION_LINES[keeps, self._is_chunked],
        )

    def _write(self, data: bytes) -> None:
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client hung up")
        transport.write(data)


CONNECTION_LINES = {
    (True, True): b"",
    (True, False): b"Connection: keep-alive\r\n",
    (False, True): b"Connection: close\r\n",
    (False, False): b"Connection: close\r\n",
}
"""By whether the connection is kept, and whether it would be without saying so (HTTP/1.1)."""


@functools.lru_cache(maxsize=2)
def _date(unix_s: int) -> bytes:
    return email.utils.formatdate(unix_s, usegmt=True).encode()


class _Written(web.StreamResponse):
    """What aiohttp is told of an answer that was written already."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self._keeps = keeps

    @property
    def keep_alive(self) -> bool:
        return self._keeps

    async def prepare(self, request: web.BaseRequest) -> None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None


def written(keeps: bool) -> web.StreamResponse:
    """What a handler returns for an answer that it wrote itself; whether its connection is kept."""
    return _KEPT if keeps else _CLOSED


_KEPT, _CLOSED = _Written(True), _Written(False)
