"""The requests that came on one connection, in their order, and why it can be read no further.

- The parser is llhttp (httptools), which refuses two lengths, garbled chunks, folded lines and bare
  line ends. A request of HTTP/1.1 has one Host header, which is checked here.
- Nothing is read behind a fault.
- A body ends where its own head says, also if the client asks for another protocol, which is
  declined by not answering to it.

One HTTP/1.1 connection of an agent: reads requests, has them handled one after the other.

    IDLE --first byte--> READING --head is whole--> BUSY --answered, kept--> IDLE
    BUSY --answered, not kept--> LEAVING --client closed, or time is over--> lost;  any --> lost

Invariants: one request is handled at a time, in the order they came; who sends what nobody has
asked for is read only so far, and who takes no answer gets no other; whatever is no HTTP is
answered once, in one line, behind the answers before it, and ends the connection; when the client
hangs up, its handler is cancelled. A client that closes only its own direction hangs up, too. A
lost connection refers to nothing. Owned and driven by server.py.
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
from rollmesh.engine.connection import MAX_MUTE_BYTES
from rollmesh.engine.parser import Headers
from rollmesh.serve.interception.body_limits import BodyBudget
from rollmesh.serve.interception.request import JSON, HttpRequest, RequestTransport

MAX_AHEAD = 32
"""Requests that may wait behind the one that is handled."""


class HttpFault(msgspec.Struct, frozen=True):
    """Why a connection can be read no further."""

    status: int
    why: str


class RequestParser(HTTPProtocol):
    """See the module."""

    # What is None llhttp does not call.
    on_status = on_chunk_header = on_chunk_complete = None  # type: ignore[assignment]

    def __init__(self, wire: RequestTransport) -> None:
        self.requests: deque[HttpRequest] = deque()
        """That nobody handles yet; the last one's body may not be whole."""
        self.incoming: HttpRequest | None = None
        """Whose body is not whole."""
        self.fault: HttpFault | None = None
        self.is_in_head = False
        """A request has begun, and its head is not whole."""
        self._wire = wire
        self._llhttp = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: Headers = []
        self._num_mute_bytes = 0
        """Since the last byte of a body or the last request's end."""

    def feed(self, data: bytes) -> None:
        """What one read brought."""
        self._num_mute_bytes += len(data)
        while data and self.fault is None:
            try:
                self._llhttp.feed_data(data)
                break
            except httptools.HttpParserUpgrade as upgrade:
                data = self._declined(data[upgrade.args[0] :])
            except httptools.HttpParserError as error:
                self.fail(400, f"this is no HTTP: {error}")
        if self._num_mute_bytes > MAX_MUTE_BYTES:
            self.fail(431, "headers or chunk extensions are too long")

    def fail(self, status: int, why: str) -> None:
        """Read no further."""
        if self.fault is None:
            self.fault = HttpFault(status, why)
        if self.incoming:
            self.incoming.is_broken, self.incoming = True, None

    def close(self) -> None:
        """Nothing more comes. Else this, llhttp and the wire would hold each other, and all that
        was read, until the garbage collector comes."""
        self.requests.clear()
        self.incoming = None
        del self._llhttp, self._wire

    def _declined(self, rest: bytes) -> bytes:
        """The head again without its wish for another protocol, which would hide its body."""
        method = self._llhttp.get_method()
        if method == b"CONNECT":
            self.fail(405, "this is no proxy")
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
        # What comes behind the body is of no use to us.
        if self.incoming is None:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        llhttp = self._llhttp
        protocol = llhttp.get_http_version()
        if llhttp.should_upgrade() or self.fault:
            return
        self.is_in_head = False
        if protocol not in ("1.1", "1.0"):
            self.fail(400, "only HTTP/1.0 and 1.1 are spoken here")
        elif len(self.requests) > MAX_AHEAD:
            self.fail(400, f"more than {MAX_AHEAD} requests wait for their answers")
        else:
            url = self._url if self._url.startswith(b"/") else _path_of(self._url)
            path = url.decode("utf-8", "surrogateescape")
            request = HttpRequest(self._wire, llhttp.get_method().decode(), path, self._headers)
            request.speak(protocol, llhttp.should_keep_alive())
            num_hosts = int(b"host" in request.headers)
            if len(request.headers) < len(self._headers):  # some name came twice
                num_hosts = sum([name.lower() == b"host" for name, _ in self._headers])
            if num_hosts > 1 or (num_hosts == 0 and protocol == "1.1"):
                self.fail(400, f"expected one Host header, found {num_hosts} (RFC 9112, 3.2)")
                return
            if request.headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
                self.fail(501, "of transfer codings only chunked is known here")
                return
            self.incoming = request
            self.requests.append(request)

    def on_body(self, body: bytes) -> None:
        self._num_mute_bytes = 0
        if self.incoming:
            self.incoming.add(body)

    def on_message_complete(self) -> None:
        self._num_mute_bytes = 0
        if self.incoming:
            self.incoming.is_whole = True
            self.incoming = None


def _path_of(target: bytes) -> bytes:
    """A request's target without the scheme and the host that stand before it for a proxy."""
    _, mark, rest = target.partition(b"://")
    if not mark:
        return target
    host = re.match(rb"[^/?#]*", rest)
    assert host
    path = rest[host.end() :]
    return path if path.startswith(b"/") else b"/" + path


MAX_UNASKED_BYTES = 64 * 1024
"""What is read beyond that which somebody waits for; looked at once a read."""

log = get_logger()


class AgentConnectionState(enum.StrEnum):
    """See the module's drawing."""

    IDLE = "idle"
    READING = "reading"
    BUSY = "busy"
    LEAVING = "leaving"


class ConnectionLimits(msgspec.Struct, frozen=True):
    """How long a connection may stay in a state without getting on."""

    idle_s: float = 120.0
    """Kept connections, and clients that take nothing; the pools of clients keep 90 s at most."""
    head_s: float = 20.0
    """From a request's first byte to the end of its head."""
    unknown_s: float = 10.0
    """From the beginning of a connection on which no known key was shown."""
    num_connections: int | None = None
    """Open ones, at most; past it the oldest that has not shown a known key is closed. None: 80 %
    of the files that the process may hold open, so that engines can still be dialled."""
    linger_s: float = 5.0
    """To take an answer before which not all was read: closing at once would destroy it."""


class ConnectionOwner(Protocol):
    """What a connection asks of its owner."""

    limits: ConnectionLimits
    bodies: BodyBudget

    def opened(self, inbound: "AgentConnection") -> None:
        """It is there."""

    def lost(self, inbound: "AgentConnection") -> None:
        """It is gone."""

    def employ(self, inbound: "AgentConnection") -> asyncio.Task[None]:
        """A task of its `serve`."""

    def handle(self, request: HttpRequest, /) -> Awaitable[None]:
        """Answer it."""

    def unix_s(self) -> float:
        """The time of day."""


class AgentConnection(asyncio.Protocol):
    """See the module."""

    def __init__(self, house: ConnectionOwner, loop: asyncio.AbstractEventLoop) -> None:
        self.state = AgentConnectionState.IDLE
        self.is_clogged = False
        self.bodies = house.bodies
        self._house = house
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = RequestParser(self)
        self._task: asyncio.Task[None] | None = None
        self._since_s = self._opened_s = loop.time()
        """When it last made progress, and when it began."""
        self.was_known = False
        self.current: HttpRequest | None = None
        """Which is handled."""
        self._is_paused = False
        self._num_unasked_bytes = 0
        self._num_unsent_bytes = 0
        self._wanted: asyncio.Future[None] | None = None
        """By the handler, or by `serve` between two requests."""
        self._unclogged: asyncio.Future[None] | None = None

    # what the owner does

    async def serve(self) -> None:
        """Have requests handled until the last; ends with the connection."""
        keeps = True
        while keeps:
            if self.is_clogged:
                # Answers must not pile up; a client that takes none is cut by `look`.
                await self.drain(self._house.limits.idle_s)
            elif self._parser.requests:
                keeps = await self._serve_one(self._parser.requests.popleft())
            elif self._parser.fault:
                self._refuse(self._parser.fault)
                keeps = False
            else:
                is_begun = self._parser.is_in_head
                self.state = AgentConnectionState.READING if is_begun else AgentConnectionState.IDLE
                self._since_s = self._loop.time()
                await self.want()
        self._part()

    def retire(self) -> None:
        """Close once nothing is handled."""
        last = self.current or next(iter(self._parser.requests), None)
        if last:
            last.keeps = False
        elif self._transport:
            self._transport.close()

    def hang_up(self) -> None:
        """Close at once."""
        if self._transport:
            self._transport.abort()

    def look(self, now_s: float) -> None:
        """Close it if it does not get on."""
        assert self._transport
        num_unsent = self._transport.get_write_buffer_size()
        if num_unsent != self._num_unsent_bytes:
            self._num_unsent_bytes, self._since_s = num_unsent, now_s
        waited_s = now_s - self._since_s
        limits = self._house.limits
        is_strange = not is_known(self) and now_s - self._opened_s > limits.unknown_s
        if self.state is AgentConnectionState.LEAVING:
            if waited_s > limits.linger_s:
                self.hang_up()
        elif self.state is AgentConnectionState.READING:
            if is_strange or waited_s > limits.head_s:
                self._parser.fail(408, "the request's head stopped coming")
                self._tell()
        elif (self.is_clogged or self.state is AgentConnectionState.IDLE) and (
            is_strange or waited_s > limits.idle_s
        ):
            self.hang_up()

    # what its requests do

    def write(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client hung up")
        transport.write(data)

    def want(self) -> "asyncio.Future[None]":
        self._num_unasked_bytes = 0
        self._read_on()
        self._wanted = self._loop.create_future()
        return self._wanted

    async def drain(self, most_s: float) -> None:
        if self.is_clogged:
            if self._unclogged is None or self._unclogged.done():
                self._unclogged = self._loop.create_future()
            await asyncio.wait([self._unclogged], timeout=most_s)

    def unix_s(self) -> float:
        return self._house.unix_s()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        self._house.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._parser.fault is None and self.state is not AgentConnectionState.LEAVING:
            self._num_unasked_bytes += len(data)
            self._parser.feed(data)
            self._tell()

    def eof_received(self) -> None:
        """The client hung up: the connection is closed in both directions; at once where an answer
        is under way, since a client that takes none of it would hold its handler."""
        if self.current and not self.current.is_answered:
            self.hang_up()

    def connection_lost(self, error: Exception | None) -> None:
        if self._task:
            self._task.cancel()
        # What refers back here is let go, so that all of it is freed now.
        self._task = self._transport = None
        self._parser.close()
        self._house.lost(self)

    def pause_writing(self) -> None:
        self.is_clogged, self._since_s = True, self._loop.time()

    def resume_writing(self) -> None:
        self.is_clogged = False
        if self._unclogged and not self._unclogged.done():
            self._unclogged.set_result(None)

    # within

    def _tell(self) -> None:
        """Whoever waits for what was read."""
        wanted = self._wanted
        is_due = self._parser.requests or self._parser.fault
        if wanted is not None and not wanted.done():
            if is_due or self.state is AgentConnectionState.BUSY:
                wanted.set_result(None)
        elif self._task is None and is_due:
            self._task = self._house.employ(self)
        elif self._num_unasked_bytes > MAX_UNASKED_BYTES:
            self._pause()
        if self.state is AgentConnectionState.IDLE:
            self.state, self._since_s = AgentConnectionState.READING, self._loop.time()

    def _pause(self) -> None:
        if not self._is_paused and self._transport and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def _read_on(self) -> None:
        if self._is_paused and self._transport and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    async def _serve_one(self, request: HttpRequest) -> bool:
        """Whether the connection goes on."""
        self.state, self.current = AgentConnectionState.BUSY, request
        if not self._parser.requests and self._is_paused:
            # While nothing is read it would not be seen that the client hangs up.
            self._num_unasked_bytes = 0
            self._read_on()
        try:
            await self._house.handle(request)
            if not request.is_answered:
                raise RuntimeError("a request was left unanswered")
        except ConnectionError:
            self.hang_up()
            return False
        except asyncio.CancelledError:
            self.hang_up()
            raise
        except Exception:  # door: a fault of ours must not take other calls along
            log.exception("http.broken")
            if request.is_opened:
                self.hang_up()
            else:
                request.keeps = False
                self._refuse(HttpFault(500, "a fault in the server"))
            return False
        finally:
            self.current = None
            self.was_known = self.was_known or request.owner is not None
            request.release_body()
        return request.keeps

    def _refuse(self, fault: HttpFault) -> None:
        told = msgspec.json.encode({"error": {"message": fault.why, "code": "invalid_http"}})
        answer = HttpRequest(self, "", "", [])
        with contextlib.suppress(ConnectionError):
            answer.answer(fault.status, answer.dated(JSON), told)

    def _part(self) -> None:
        """Close, once the client has what was written."""
        self.state, self._since_s = AgentConnectionState.LEAVING, self._loop.time()
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


def is_known(inbound: AgentConnection) -> bool:
    """Whether a request on the connection has shown a known key."""
    current = inbound.current
    return inbound.was_known or (current is not None and current.owner is not None)
