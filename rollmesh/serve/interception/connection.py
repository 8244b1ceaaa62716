"""One HTTP/1.1 connection of an agent: parses requests and has them handled in order.

    IDLE --first byte--> READING --head is complete--> BUSY --answered, kept alive--> IDLE
    BUSY --answered, not kept--> CLOSING --client closed, or timeout--> closed;  any --> closed

- One request is handled at a time. Reading pauses beyond MAX_READ_AHEAD_BYTES of unrequested data,
  and handling pauses while the client does not read its answers.
- Invalid HTTP is answered once, after the earlier answers, and closes the connection.
- If the client closes the connection or its sending half, the handler is cancelled.
- The parser is llhttp, which rejects duplicate lengths, malformed chunks, folded lines and bare
  line ends; the Host header is checked here. An upgrade is declined by ignoring it.
"""

import asyncio
import contextlib
import enum
import re
from collections import deque
from collections.abc import Awaitable
from typing import Protocol, cast

import httptools
import msgspec
from httptools.parser.protocol import HTTPProtocol

from rollmesh.core.logs import get_logger
from rollmesh.engine.connection import MAX_OVERHEAD_BYTES, Headers
from rollmesh.serve.interception.body_limits import BodyBudget
from rollmesh.serve.interception.request import JSON, HttpRequest, RequestTransport

MAX_PIPELINED = 32
"""Maximum number of pipelined requests."""


class HttpFault(msgspec.Struct, frozen=True):
    """Why a connection cannot be read further."""

    status: int
    why: str


class HttpRequestParser(HTTPProtocol):
    """Parses the requests of one connection; reads nothing after a fault."""

    # llhttp does not call callbacks that are None.
    on_status = on_chunk_header = on_chunk_complete = None  # type: ignore[assignment]

    def __init__(self, transport: RequestTransport) -> None:
        self.requests: deque[HttpRequest] = deque()
        """Requests to handle; the body of the last one may be incomplete."""
        self.incoming: HttpRequest | None = None
        """The request whose body is incomplete."""
        self.fault: HttpFault | None = None
        self.is_in_head = False
        """A request has begun, and its head is incomplete."""
        self._wire = transport
        self._llhttp = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: Headers = []
        self._num_overhead_bytes = 0
        """Bytes since the last byte of a body or the end of the last request."""

    def feed(self, data: bytes) -> None:
        """Parse the bytes of one read."""
        self._num_overhead_bytes += len(data)
        while data and self.fault is None:
            try:
                self._llhttp.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = self._without_upgrade(data[upgrade.args[0] :])
            except httptools.HttpParserError as error:
                self.fail(400, f"invalid HTTP: {error}")
        if self._num_overhead_bytes > MAX_OVERHEAD_BYTES:
            self.fail(431, "headers or chunk extensions are too long")

    def fail(self, status: int, why: str) -> None:
        """Stop reading."""
        if self.fault is None:
            self.fault = HttpFault(status, why)
        if self.incoming:
            self.incoming.is_broken, self.incoming = True, None

    def close(self) -> None:
        """Release all references, because this, llhttp and the transport form a cycle that would
        keep all data until a garbage collection."""
        self.requests.clear()
        self.incoming = None
        del self._llhttp, self._wire

    def _without_upgrade(self, rest: bytes) -> bytes:
        """Return the head again without its upgrade header, which would hide its body."""
        method = self._llhttp.get_method()
        if method == b"CONNECT":
            self.fail(405, "CONNECT is not supported")
            return b""
        protocol = self._llhttp.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self._url, protocol)]
        lines += [b"%b: %b" % line for line in self._headers if line[0].lower() != b"upgrade"]
        self._llhttp = httptools.HttpRequestParser(self)
        return b"\r\n".join([*lines, b"", rest])

    # llhttp's callbacks

    def on_message_begin(self) -> None:
        self.is_in_head = True
        self._url = b""
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers are ignored.
        if self.incoming is None:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        llhttp = self._llhttp
        protocol = llhttp.get_http_version()
        if llhttp.should_upgrade() or self.fault:
            return
        self.is_in_head = False
        if protocol not in ("1.1", "1.0"):
            self.fail(400, "only HTTP/1.0 and 1.1 are supported")
        elif len(self.requests) > MAX_PIPELINED:
            self.fail(400, f"more than {MAX_PIPELINED} pipelined requests")
        else:
            url = self._url if self._url.startswith(b"/") else _origin_form(self._url)
            path = url.decode("utf-8", "surrogateescape")
            request = HttpRequest(self._wire, llhttp.get_method().decode(), path, self._headers)
            request.set_protocol(protocol, llhttp.should_keep_alive())
            num_hosts = int(b"host" in request.headers)
            if len(request.headers) < len(self._headers):  # some name is repeated
                num_hosts = sum([name.lower() == b"host" for name, _ in self._headers])
            if num_hosts > 1 or (num_hosts == 0 and protocol == "1.1"):
                self.fail(400, f"expected one Host header, found {num_hosts} (RFC 9112, 3.2)")
                return
            if request.headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
                self.fail(501, "only the transfer coding chunked is supported")
                return
            self.incoming = request
            self.requests.append(request)

    def on_body(self, body: bytes) -> None:
        self._num_overhead_bytes = 0
        if self.incoming:
            self.incoming.add(body)

    def on_message_complete(self) -> None:
        self._num_overhead_bytes = 0
        if self.incoming:
            self.incoming.is_whole = True
            self.incoming = None


def _origin_form(target: bytes) -> bytes:
    """Return the path of a request target in absolute form, as sent to proxies."""
    _, mark, rest = target.partition(b"://")
    if not mark:
        return target
    host = re.match(rb"[^/?#]*", rest)
    assert host
    path = rest[host.end() :]
    return path if path.startswith(b"/") else b"/" + path


MAX_READ_AHEAD_BYTES = 64 * 1024
"""Maximum of data read ahead of the handler, checked once per read."""

log = get_logger()


class AgentConnectionState(enum.StrEnum):
    """States of the drawing above."""

    IDLE = "idle"
    READING = "reading"
    BUSY = "busy"
    CLOSING = "leaving"


class ConnectionLimits(msgspec.Struct, frozen=True):
    """How long a connection may stay in a state without progress."""

    idle_s: float = 120.0
    """Limit for idle connections and for clients that do not read; client pools keep 90 s at
    most."""
    head_s: float = 20.0
    """Limit from a request's first byte to the end of its head."""
    unauthenticated_s: float = 10.0
    """Limit from the start of a connection without a valid key."""
    num_connections: int | None = None
    """Maximum of open connections, beyond which the oldest without a valid key is closed. None: 80
    % of the process's file limit, which leaves descriptors for engines."""
    linger_s: float = 5.0
    """Time for reading an answer that was sent before the whole request was read: closing at once
    would discard the answer."""


class ConnectionOwner(Protocol):
    """Server of a connection: its limits, and callbacks for its events."""

    limits: ConnectionLimits
    bodies: BodyBudget

    def connection_opened(self, connection: "AgentConnection") -> None:
        """Add a new connection."""

    def connection_closed(self, connection: "AgentConnection") -> None:
        """Remove a closed connection."""

    def spawn(self, connection: "AgentConnection") -> asyncio.Task[None]:
        """Start a task that runs `serve`."""

    def handle(self, request: HttpRequest, /) -> Awaitable[None]:
        """Answer a request."""

    def unix_s(self) -> float:
        """Return the time of day."""


class AgentConnection(asyncio.Protocol):
    """A connection, as asyncio protocol and as transport of its requests."""

    def __init__(self, owner: ConnectionOwner, loop: asyncio.AbstractEventLoop) -> None:
        self.state = AgentConnectionState.IDLE
        self.is_write_paused = False
        self.bodies = owner.bodies
        self._owner = owner
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = HttpRequestParser(self)
        self._task: asyncio.Task[None] | None = None
        self._progress_s = self._opened_s = loop.time()
        """Times of the last progress and of the start."""
        self.was_authenticated = False
        self.current: HttpRequest | None = None
        """The request that is being handled."""
        self._is_paused = False
        self._num_read_ahead_bytes = 0
        self._num_unsent_bytes = 0
        self._data_arrived: asyncio.Future[None] | None = None
        """Awaited by the handler, or by `serve` between requests."""
        self._drained: asyncio.Future[None] | None = None

    # called by the server

    async def serve(self) -> None:
        """Have requests handled until the connection ends."""
        keep_alive = True
        while keep_alive:
            if self.is_write_paused:
                # Answers must not pile up; `check_timeouts` closes clients that do not read.
                await self.drain(self._owner.limits.idle_s)
            elif self._parser.requests:
                keep_alive = await self._serve_one(self._parser.requests.popleft())
            elif self._parser.fault:
                self._refuse(self._parser.fault)
                keep_alive = False
            else:
                is_begun = self._parser.is_in_head
                self.state = AgentConnectionState.READING if is_begun else AgentConnectionState.IDLE
                self._progress_s = self._loop.time()
                await self.more_data()
        self._linger()

    def close_when_idle(self) -> None:
        """Close after the current request."""
        last = self.current or next(iter(self._parser.requests), None)
        if last:
            last.keep_alive = False
        elif self._transport:
            self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        if self._transport:
            self._transport.abort()

    def check_timeouts(self, now_s: float) -> None:
        """Close the connection if it makes no progress."""
        assert self._transport
        num_unsent = self._transport.get_write_buffer_size()
        if num_unsent != self._num_unsent_bytes:
            self._num_unsent_bytes, self._progress_s = num_unsent, now_s
        waited_s = now_s - self._progress_s
        limits = self._owner.limits
        is_overdue = (
            not is_authenticated(self) and now_s - self._opened_s > limits.unauthenticated_s
        )
        if self.state is AgentConnectionState.CLOSING:
            if waited_s > limits.linger_s:
                self.abort()
        elif self.state is AgentConnectionState.READING:
            if is_overdue or waited_s > limits.head_s:
                self._parser.fail(408, "the request's head stopped coming")
                self._notify()
        elif (self.is_write_paused or self.state is AgentConnectionState.IDLE) and (
            is_overdue or waited_s > limits.idle_s
        ):
            self.abort()

    # called by requests

    def write(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client hung up")
        transport.write(data)

    def more_data(self) -> "asyncio.Future[None]":
        self._num_read_ahead_bytes = 0
        self._read_on()
        self._data_arrived = self._loop.create_future()
        return self._data_arrived

    async def drain(self, timeout_s: float) -> None:
        if self.is_write_paused:
            if self._drained is None or self._drained.done():
                self._drained = self._loop.create_future()
            await asyncio.wait([self._drained], timeout=timeout_s)

    def unix_s(self) -> float:
        return self._owner.unix_s()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._owner.connection_opened(self)

    def data_received(self, data: bytes) -> None:
        if self._parser.fault is None and self.state is not AgentConnectionState.CLOSING:
            self._num_read_ahead_bytes += len(data)
            self._parser.feed(data)
            self._notify()

    def eof_received(self) -> None:
        """Handle a client's close: close both directions, at once if an answer is being written,
        because a client that does not read would block its handler."""
        if self.current and not self.current.is_answered:
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self._task:
            self._task.cancel()
        # Drop the references that form cycles, so that everything is freed now.
        self._task = self._transport = None
        self._parser.close()
        self._owner.connection_closed(self)

    def pause_writing(self) -> None:
        self.is_write_paused, self._progress_s = True, self._loop.time()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        if self._drained and not self._drained.done():
            self._drained.set_result(None)

    # internal

    def _notify(self) -> None:
        """Resume whatever waits for the data that was read."""
        wanted = self._data_arrived
        is_due = self._parser.requests or self._parser.fault
        if wanted is not None and not wanted.done():
            if is_due or self.state is AgentConnectionState.BUSY:
                wanted.set_result(None)
        elif self._task is None and is_due:
            self._task = self._owner.spawn(self)
        elif self._num_read_ahead_bytes > MAX_READ_AHEAD_BYTES:
            self._pause()
        if self.state is AgentConnectionState.IDLE:
            self.state, self._progress_s = AgentConnectionState.READING, self._loop.time()

    def _pause(self) -> None:
        if not self._is_paused and self._transport and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def _read_on(self) -> None:
        if self._is_paused and self._transport and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    async def _serve_one(self, request: HttpRequest) -> bool:
        """Handle one request; return whether the connection stays open."""
        self.state, self.current = AgentConnectionState.BUSY, request
        if not self._parser.requests and self._is_paused:
            # A paused transport does not notice that the client closes.
            self._num_read_ahead_bytes = 0
            self._read_on()
        try:
            await self._owner.handle(request)
            if not request.is_answered:
                raise RuntimeError("a handler did not answer its request")
        except ConnectionError:
            self.abort()
            return False
        except asyncio.CancelledError:
            self.abort()
            raise
        except Exception:  # door: a fault in one call must not affect the others
            log.exception("http.broken")
            if request.is_opened:
                self.abort()
            else:
                request.keep_alive = False
                self._refuse(HttpFault(500, "a fault in the server"))
            return False
        finally:
            self.current = None
            self.was_authenticated = self.was_authenticated or request.owner is not None
            request.release_body()
        return request.keep_alive

    def _refuse(self, fault: HttpFault) -> None:
        body = msgspec.json.encode({"error": {"message": fault.why, "code": "invalid_http"}})
        answer = HttpRequest(self, "", "", [])
        with contextlib.suppress(ConnectionError):
            answer.answer(fault.status, answer.header_lines(JSON), body)

    def _linger(self) -> None:
        """Close after the client has received what was written."""
        self.state, self._progress_s = AgentConnectionState.CLOSING, self._loop.time()
        if self._transport is None or self._transport.is_closing():
            return
        if self._parser.fault is None and self._parser.incoming is None:
            self._transport.close()
            return
        self._read_on()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:  # TLS has no half-closed connections
            self._transport.close()


def is_authenticated(connection: AgentConnection) -> bool:
    """Whether a request on the connection has shown a valid key."""
    current = connection.current
    return connection.was_authenticated or (current is not None and current.owner is not None)
