"""One HTTP/1.1 connection to a server, and the answer that it is in the middle of.

    busy --whole answer, kept alive--> idle --next call--> busy;  any --> lost

Invariants: a receiver hears at most one end, `on_end` or `on_error`, and nothing once its call is
closed; a connection is idle only after exactly one whole answer to its last call; a peer that sends
without getting on with its answer is cut off. The parser is llhttp (httptools); its callbacks only
collect, so that a receiver may close its call or begin another while it is being told. Owned and
driven by http.py.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol, cast

import httptools
import msgspec

from rollmesh.core.errors import EngineUnavailable

MAX_MUTE_BYTES = 64 * 1024
"""A peer that sends more than this beside the body (endless headers or chunk extensions) is cut
off; looked at once a read, so the true limit is one read more."""

STALE_S = 1.0
"""A kept connection that is lost so soon after a request had been closed before it."""

Headers = list[tuple[bytes, bytes]]


Piece = bytes | memoryview
"""Of a body; a view lasts until the call has ended."""


class Receiver(Protocol):
    """Hears one answer. Its methods are called from the loop and do not raise."""

    def on_head(self, status: int, headers: Headers) -> None:
        """The answer begins; header names as the peer wrote them."""

    def on_data(self, data: bytes) -> None:
        """The next piece of the body: all of it that one read brought, chunk frames removed."""

    def on_end(self) -> None:
        """The answer is whole; its connection may already carry another call."""

    def on_error(self, error: EngineUnavailable) -> None:
        """There will be no answer, or no more of it."""


class Target(msgspec.Struct, frozen=True):
    """Where requests of one kind go; made once by `target` and used for each."""

    origin: str
    """`http://host:port`"""
    host: str
    port: int
    is_tls: bool
    is_head: bool
    prelude: bytes
    """Request line and headers, up to the body's length."""


class Call:
    """One request on its way; made by `HttpClient.send`."""

    __slots__ = ("_connection", "_opening", "body", "is_resent", "receiver", "target")

    def __init__(self, target: Target, body: Sequence[Piece], receiver: Receiver) -> None:
        self.target = target
        self.body = body
        self.receiver = receiver
        self.is_resent = False
        self._connection: Connection | None = None
        self._opening: asyncio.Task[None] | None = None

    def attach(
        self, *, connection: "Connection | None" = None, opening: "asyncio.Task[None] | None" = None
    ) -> None:
        """What carries the call from now on. The client's."""
        self._connection, self._opening = connection, opening

    def over(self) -> Receiver:
        """Nothing carries it any more: gives up its receiver, which may hold the call in turn."""
        receiver, self.receiver = self.receiver, _nobody
        self.body = ()
        self.attach()
        return receiver

    def close(self) -> None:
        """Hang up if it is not over; the receiver hears nothing more."""
        connection, opening = self._connection, self._opening
        self.over()
        if connection:
            connection.drop_call()
        if opening:
            opening.cancel()

    def pause(self) -> None:
        """Read no more of the answer until `resume`, so that the peer must wait."""
        if self._connection:
            self._connection.pause()

    def resume(self) -> None:
        """Read on."""
        if self._connection:
            self._connection.resume()


class _Nobody:
    """Receives for calls that are over."""

    def on_head(self, status: int, headers: Headers) -> None:
        pass

    def on_data(self, data: bytes) -> None:
        pass

    def on_end(self) -> None:
        pass

    def on_error(self, error: EngineUnavailable) -> None:
        pass


_nobody = _Nobody()


class Pool(Protocol):
    """What a connection tells its owner."""

    def opened(self, connection: "Connection") -> None:
        """It is there."""

    def rest(self, connection: "Connection") -> None:
        """It is free for another call."""

    def lost(self, connection: "Connection") -> None:
        """It is gone."""

    def connect(self, call: "Call") -> None:
        """Carry `call` by a new connection."""


class Connection(asyncio.Protocol):
    """One connection and the answer that it is in the middle of."""

    def __init__(self, pool: Pool, origin: str) -> None:
        self.origin = origin
        self.idle_since_s = 0.0
        self.transport: asyncio.Transport | None = None
        self._pool = pool
        # Kept, because asking for it costs a system call each time on CPython 3.11.
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._call: Call | None = None
        self._num_calls = 0
        self._begun_s = 0.0
        self._is_paused = False
        self._begin_answer()

    def _begin_answer(self) -> None:
        self._status = 0
        self._headers: Headers = []
        self._pieces: list[bytes] = []
        self._num_mute_bytes = 0
        self._has_bytes = False
        self._has_told_head = False
        self._is_whole = False
        self._keeps_alive = False

    def begin(self, call: Call) -> None:
        """Send the request of `call`."""
        assert self.transport
        self._call = call
        self._num_calls += 1
        self._begun_s = self._loop.time()
        call.attach(connection=self)
        self._begin_answer()
        prelude, body = call.target.prelude, call.body
        if body:
            length = b"Content-Length: %d\r\n\r\n" % sum(map(len, body))
            self.transport.writelines([prelude, length, *body])
        else:
            self.transport.write(prelude + b"\r\n")

    def drop_call(self) -> None:
        """The caller hung up: what would still come is of no use to anybody."""
        self._call = None
        self.hang_up()

    def hang_up(self) -> None:
        """Close at once."""
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
        self.transport = cast(asyncio.Transport, transport)
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:
            # Bytes that nobody asked for: whatever follows would answer the wrong request.
            self.hang_up()
            return
        self._has_bytes = True
        self._num_mute_bytes += len(data)
        fault = ""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            fault = f"answered what is no HTTP: {error}"
        except httptools.HttpParserUpgrade:
            fault = "wants to speak another protocol"
        self._tell(call, fault)

    def eof_received(self) -> None:
        """The peer will send no more, so the connection is closed in both directions."""

    def connection_lost(self, error: Exception | None) -> None:
        call, self._call = self._call, None
        self._pool.lost(self)
        if call is None:
            return
        if self._has_told_head and error is None and self._ends_with_connection():
            call.over().on_end()
        elif self._was_stale() and not call.is_resent:
            call.is_resent = True
            self._pool.connect(call)
        else:
            told = one_line(error) if error else "the connection was closed before the answer's end"
            call.over().on_error(EngineUnavailable(f"{self.origin}: {told}"))

    # the parser's callbacks: they only collect, so that a receiver may do what it likes

    def on_message_begin(self) -> None:
        if self._is_whole:
            self._keeps_alive = False
        elif not self._has_told_head:
            self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._status:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            return
        self._status = status
        call = self._call
        if call and call.target.is_head:
            # The parser waits for the body that the head speaks of; a new one does not.
            self._is_whole = True

    def on_body(self, body: bytes) -> None:
        if not self._is_whole:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._status and not self._is_whole:
            self._is_whole = True
            self._keeps_alive = self._parser.should_keep_alive()

    # telling the receiver

    def _tell(self, call: Call, fault: str) -> None:
        """What one read brought; the receiver may close its call, or send another, at any time."""
        receiver = call.receiver
        if self._status and not self._has_told_head:
            self._has_told_head = True
            receiver.on_head(self._status, self._headers)
        if self._pieces:
            data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces = []
            self._num_mute_bytes = 0
            if self._call is call:
                receiver.on_data(data)
        if self._call is not call:
            return
        if self._is_whole:
            self._release(call, not fault)
            receiver.on_end()
        elif fault or self._num_mute_bytes > MAX_MUTE_BYTES:
            call.over()
            self.drop_call()
            told = fault or "sends headers without end"
            receiver.on_error(EngineUnavailable(f"{self.origin}: {told}"))

    def _release(self, call: Call, is_sound: bool) -> None:
        call.over()
        self._call = None
        if is_sound and self._keeps_alive and self.transport and not self.transport.is_closing():
            if self._is_paused:
                self.resume()
            self._pool.rest(self)
        else:
            self.hang_up()

    def _was_stale(self) -> bool:
        """Whether the peer closed before it can have seen the request."""
        waited_s = self._loop.time() - self._begun_s
        return self._num_calls > 1 and not self._has_bytes and waited_s < STALE_S

    def _ends_with_connection(self) -> bool:
        """Whether the answer says nothing of its length (RFC 9112, 6.3)."""
        names = {name.lower() for name, _ in self._headers}
        return not names & {b"content-length", b"transfer-encoding"}


def one_line(error: Exception) -> str:
    """An error's kind and words."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
