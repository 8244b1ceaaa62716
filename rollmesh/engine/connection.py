"""One HTTP/1.1 connection to a server, the parser of its response, and the pieces of a request
body.

    busy --whole answer, kept alive--> idle --next call--> busy;  any --> lost

- A receiver gets at most one end, `on_end` or `on_error`, and nothing once its call is closed. It
  may close its call or begin another from any callback.
- A connection is idle only after exactly one whole answer to its last call, which it sent whole.
- A peer that sends bytes without progress in its answer is disconnected.
- Unread pieces of a body are read at most one part ahead of what the peer accepts; nothing is
  joined or kept.
- The parser's (llhttp's) callbacks only collect, so that receivers run outside the parser.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import httptools
import msgspec
from httptools.parser.protocol import HTTPProtocol

from rollmesh.core.errors import ContentLost, EngineUnavailable, RequestLost

PART_BYTES = 2**18
"""Bytes of an unread piece that are read at once, on the loop; runtime/blobs.py has the figures."""


class Unread(Protocol):
    """Bytes stored elsewhere, perhaps on disk."""

    @property
    def num_bytes(self) -> int:
        """Total size."""

    def part(self, start: int, stop: int) -> "Ready":
        """Return a part; ContentLost if it cannot be read."""


Ready = bytes | memoryview
"""A view is valid until the call has ended."""
Piece = Ready | Unread


def ready_head(body: Sequence[Piece]) -> list[Ready]:
    """Return the pieces before the first unread one: usually all of them."""
    head: list[Ready] = []
    for piece in body:
        if not isinstance(piece, (bytes, memoryview)):
            break
        head.append(piece)
    return head


def size_of(piece: Piece) -> int:
    """Return the number of bytes in `piece`."""
    return len(piece) if isinstance(piece, (bytes, memoryview)) else piece.num_bytes


def parts(body: Sequence[Piece]) -> Iterator[Ready]:
    """Yield the body part by part as it is written; ContentLost if a piece cannot be read."""
    for piece in body:
        if isinstance(piece, (bytes, memoryview)):
            yield piece
        else:
            for start in range(0, piece.num_bytes, PART_BYTES):
                yield piece.part(start, start + PART_BYTES)


Headers = list[tuple[bytes, bytes]]


class AnswerParser(HTTPProtocol):
    """Parses one response at a time; callers take what each read added."""

    # llhttp skips callbacks that are None: two calls less for each chunk of a stream.
    on_url = on_status = on_chunk_header = on_chunk_complete = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self._llhttp = httptools.HttpResponseParser(self)
        self.begin(is_head=False)

    def begin(self, *, is_head: bool) -> None:
        """Start the next response."""
        self.status = 0
        """0 until the head is complete."""
        self.headers: Headers = []
        self.num_overhead_bytes = 0
        """Bytes since the last byte of a body."""
        self.has_bytes = False
        self.is_whole = False
        self.keeps_alive = False
        """Whether the connection may be reused once the response is whole."""
        self._pieces: list[bytes] = []
        self._is_head = is_head

    def feed(self, data: bytes) -> str:
        """Parse the bytes of one read; return an error text, '' if none."""
        self.has_bytes = True
        self.num_overhead_bytes += len(data)
        try:
            self._llhttp.feed_data(data)
        except httptools.HttpParserError as error:
            return f"sent invalid HTTP: {error}"
        except httptools.HttpParserUpgrade:
            return "switches to another protocol"
        return ""

    def take(self) -> bytes:
        """Return the new part of the body, chunk framing removed."""
        if not self._pieces:
            return b""
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces = []
        self.num_overhead_bytes = 0
        return data

    def close(self) -> None:
        """Break the reference cycle with llhttp."""
        del self._llhttp

    @property
    def ends_with_connection(self) -> bool:
        """Whether the response has no length, so that it ends with the connection (RFC 9112,
        6.3)."""
        names = {name.lower() for name, _ in self.headers}
        return not names & {b"content-length", b"transfer-encoding"}

    # llhttp's callbacks

    def on_message_begin(self) -> None:
        if self.is_whole:
            self.keeps_alive = False
        elif not self.status:
            self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.status:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._llhttp.get_status_code()
        if status >= 200 and not self.is_whole:
            self.status = status
            # llhttp waits for the body that the head of a HEAD response announces; a fresh parser
            # does not.
            self.is_whole = self._is_head

    def on_body(self, body: bytes) -> None:
        if not self.is_whole:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self.status and not self.is_whole:
            self.is_whole = True
            self.keeps_alive = self._llhttp.should_keep_alive()


MAX_OVERHEAD_BYTES = 64 * 1024
"""A peer that sends more than this besides the body (endless headers or chunk extensions) is
disconnected. Checked once per read, so the true limit is one read more."""

STALE_S = 1.0
"""If a reused connection is lost this soon after a request, it had been closed before the
request."""

PARTS_A_TURN = 4
"""Parts of an unread body that are sent before other tasks run."""


class ResponseReceiver(Protocol):
    """Callbacks for one response. They run on the event loop and do not raise."""

    def on_head(self, status: int, headers: Headers) -> None:
        """The response begins; header names have the peer's spelling."""

    def on_data(self, data: bytes) -> None:
        """Receive the body bytes of one read, chunk framing removed."""

    def on_end(self) -> None:
        """The response is whole; its connection may already carry another call."""

    def on_error(self, error: EngineUnavailable) -> None:
        """No response will come, or no more of it."""


class Target(msgspec.Struct, frozen=True):
    """Destination and headers of a kind of request; made once by `target` and reused."""

    origin: str
    """`http://host:port`"""
    host: str
    port: int
    is_tls: bool
    is_head: bool
    prelude: bytes
    """Request line and headers, up to the body's length."""


class HttpCall:
    """One request in progress; made by `HttpClient.send`."""

    __slots__ = ("_connection", "_opening", "body", "is_resent", "receiver", "target")

    def __init__(self, target: Target, body: Sequence[Piece], receiver: ResponseReceiver) -> None:
        self.target = target
        self.body = body
        self.receiver = receiver
        self.is_resent = False
        self._connection: HttpConnection | None = None
        self._opening: asyncio.Task[None] | None = None

    def attach(
        self,
        *,
        connection: "HttpConnection | None" = None,
        opening: "asyncio.Task[None] | None" = None,
    ) -> None:
        """Set what carries the call; for the client only."""
        self._connection, self._opening = connection, opening

    def over(self) -> ResponseReceiver:
        """Detach the call and return its receiver; breaks the cycle between the two."""
        receiver, self.receiver = self.receiver, _discard
        self.body = ()
        self.attach()
        return receiver

    def close(self) -> None:
        """Hang up if the call is in progress; the receiver gets no further callback."""
        connection, opening = self._connection, self._opening
        self.over()
        if connection:
            connection.drop_call()
        if opening:
            opening.cancel()

    def pause(self) -> None:
        """Stop reading the response until `resume`, so that the peer must wait."""
        if self._connection:
            self._connection.pause()

    def resume(self) -> None:
        """Continue reading."""
        if self._connection:
            self._connection.resume()


class _Discard:
    """Receiver of calls that are over."""

    def on_head(self, status: int, headers: Headers) -> None:
        pass

    def on_data(self, data: bytes) -> None:
        pass

    def on_end(self) -> None:
        pass

    def on_error(self, error: EngineUnavailable) -> None:
        pass


_discard = _Discard()


class ConnectionPool(Protocol):
    """Callbacks from a connection to its owner."""

    def opened(self, connection: "HttpConnection") -> None:
        """The connection is open."""

    def rest(self, connection: "HttpConnection") -> None:
        """The connection is free for another call."""

    def lost(self, connection: "HttpConnection") -> None:
        """The connection is closed."""

    def connect(self, call: "HttpCall") -> None:
        """Carry `call` on a new connection."""


class HttpConnection(asyncio.Protocol):
    """One connection and its current response."""

    def __init__(self, pool: ConnectionPool, origin: str) -> None:
        self.origin = origin
        self.idle_since_s = 0.0
        self.transport: asyncio.Transport | None = None
        self._pool = pool
        # Stored because each lookup costs a system call on CPython 3.11.
        self._loop = asyncio.get_running_loop()
        self._answer = AnswerParser()
        self._call: HttpCall | None = None
        self._num_calls = 0
        self._begun_s = 0.0
        self._is_paused = False
        self._is_clogged = False
        """The peer does not accept written bytes."""
        self._unsent: Iterator[Ready] | None = None
        """Rest of the request's body."""
        self._unread = ""
        """Why not all of the request could be sent."""
        self._has_sent_head = False

    def begin(self, call: HttpCall) -> None:
        """Send the request of `call`."""
        assert self.transport
        self._call = call
        self._num_calls += 1
        self._begun_s = self._loop.time()
        call.attach(connection=self)
        self._answer.begin(is_head=call.target.is_head)
        self._has_sent_head = False
        prelude, body = call.target.prelude, call.body
        if body:
            ready = ready_head(body)
            rest = body[len(ready) :]
            num_bytes = sum(map(len, ready)) + sum(map(size_of, rest))
            self.transport.writelines([prelude, b"Content-Length: %d\r\n\r\n" % num_bytes, *ready])
            if rest:
                self._unsent = parts(rest)
                self._send_on()
        else:
            self.transport.write(prelude + b"\r\n")

    def drop_call(self) -> None:
        """Close the connection, since the caller needs no more of the response."""
        self._call = None
        self.hang_up()

    def hang_up(self) -> None:
        """Close immediately."""
        self._unsent = None
        if self.transport:
            self.transport.abort()

    def pause(self) -> None:
        if self.transport and not self._is_paused and not self.transport.is_closing():
            self._is_paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.transport and self._is_paused and not self.transport.is_closing():
            self._is_paused = False
            self.transport.resume_reading()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self.transport = cast("asyncio.Transport", transport)
        self._pool.opened(self)

    def pause_writing(self) -> None:
        self._is_clogged = True

    def resume_writing(self) -> None:
        self._is_clogged = False
        self._send_on()

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:
            # Unrequested bytes: what follows would answer the wrong request.
            self.hang_up()
            return
        self._deliver(call, self._answer.feed(data))

    def eof_received(self) -> None:
        """Close both directions, since the peer sends no more."""

    def connection_lost(self, error: Exception | None) -> None:
        call, self._call = self._call, None
        self._unsent = None
        self._answer.close()
        self._pool.lost(self)
        if call is None:
            return
        if self._has_sent_head and error is None and self._answer.ends_with_connection:
            call.over().on_end()
        elif self._unread:
            call.over().on_error(RequestLost(self._unread))
        elif self._was_stale() and not call.is_resent:
            call.is_resent = True
            self._pool.connect(call)
        else:
            why = one_line(error) if error else _CLOSED
            call.over().on_error(EngineUnavailable(f"{self.origin}: {why}"))

    # sending

    def _send_on(self) -> None:
        """Send parts of the body until the peer accepts no more or other tasks should run."""
        for _ in range(PARTS_A_TURN):
            if self._unsent is None or self._is_clogged or self.transport is None:
                return
            try:
                part = next(self._unsent, None)
            except ContentLost as error:
                # The peer has a part of the body, and the rest cannot be read.
                self._unread = str(error)
                self.hang_up()
                return
            if part is None:
                self._unsent = None
            else:
                self.transport.write(part)
        self._loop.call_soon(self._send_on)

    # delivering to the receiver

    def _deliver(self, call: HttpCall, fault: str) -> None:
        """Deliver the result of one read; the receiver may close its call or send another at any
        time."""
        receiver, answer = call.receiver, self._answer
        if answer.status and not self._has_sent_head:
            self._has_sent_head = True
            receiver.on_head(answer.status, answer.headers)
        data = answer.take()
        if data and self._call is call:
            receiver.on_data(data)
        if self._call is not call:
            return
        if answer.is_whole:
            self._release(call, not fault)
            receiver.on_end()
        elif fault or answer.num_overhead_bytes > MAX_OVERHEAD_BYTES:
            call.over()
            self.drop_call()
            why = fault or "sends headers without end"
            receiver.on_error(EngineUnavailable(f"{self.origin}: {why}"))

    def _release(self, call: HttpCall, is_sound: bool) -> None:
        call.over()
        self._call = None
        is_sound = is_sound and self._answer.keeps_alive and self._unsent is None
        if is_sound and self.transport and not self.transport.is_closing():
            if self._is_paused:
                self.resume()
            self._pool.rest(self)
        else:
            self.hang_up()

    def _was_stale(self) -> bool:
        """Whether the peer closed before it could receive the request."""
        waited_s = self._loop.time() - self._begun_s
        return self._num_calls > 1 and not self._answer.has_bytes and waited_s < STALE_S


_CLOSED = "the connection was closed before the answer's end"


def one_line(error: Exception) -> str:
    """Return the type and message of an error."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
