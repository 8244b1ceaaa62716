"""One HTTP/1.1 connection to a server, and the answer that it is in the middle of.

    busy --whole answer, kept alive--> idle --next call--> busy;  any --> lost

Invariants: a receiver hears at most one end, `on_end` or `on_error`, and nothing once its call is
closed; a connection is idle only after exactly one whole answer to its last call, which it sent
whole; a peer that sends without getting on with its answer is cut off; of a body that is not read
yet, no more is read than the peer takes, but for one part. Receivers may close their call or begin
another while they are told. Owned and driven by http.py.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import msgspec

from rollmesh.core.errors import ContentLost, EngineUnavailable, RequestLost
from rollmesh.engine.parser import AnswerParser, Headers
from rollmesh.engine.pieces import Piece, Ready, parts, ready_head, size_of

MAX_MUTE_BYTES = 64 * 1024
"""A peer that sends more than this beside the body (endless headers or chunk extensions) is cut
off; looked at once a read, so the true limit is one read more."""

STALE_S = 1.0
"""A kept connection that is lost so soon after a request had been closed before it."""

PARTS_A_TURN = 4
"""Of a body that is read while it is sent; then others have their turn."""


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
        """Set what carries the call from now on. For the client only."""
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
        self._answer = AnswerParser()
        self._call: Call | None = None
        self._num_calls = 0
        self._begun_s = 0.0
        self._is_paused = False
        self._is_clogged = False
        """The peer does not take what was written."""
        self._unsent: Iterator[Ready] | None = None
        """Of the request's body."""
        self._unread = ""
        """Why not all of the request could be sent."""
        self._has_told_head = False

    def begin(self, call: Call) -> None:
        """Send the request of `call`."""
        assert self.transport
        self._call = call
        self._num_calls += 1
        self._begun_s = self._loop.time()
        call.attach(connection=self)
        self._answer.begin(is_head=call.target.is_head)
        self._has_told_head = False
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
        """The caller hung up: what would still come is of no use to anybody."""
        self._call = None
        self.hang_up()

    def hang_up(self) -> None:
        """Close at once."""
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
        self.transport = cast(asyncio.Transport, transport)
        self._pool.opened(self)

    def pause_writing(self) -> None:
        self._is_clogged = True

    def resume_writing(self) -> None:
        self._is_clogged = False
        self._send_on()

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:
            # Bytes that nobody asked for: whatever follows would answer the wrong request.
            self.hang_up()
            return
        self._tell(call, self._answer.feed(data))

    def eof_received(self) -> None:
        """The peer will send no more, so the connection is closed in both directions."""

    def connection_lost(self, error: Exception | None) -> None:
        call, self._call = self._call, None
        self._unsent = None
        self._answer.close()
        self._pool.lost(self)
        if call is None:
            return
        if self._has_told_head and error is None and self._answer.ends_with_connection:
            call.over().on_end()
        elif self._unread:
            call.over().on_error(RequestLost(self._unread))
        elif self._was_stale() and not call.is_resent:
            call.is_resent = True
            self._pool.connect(call)
        else:
            told = one_line(error) if error else _CLOSED
            call.over().on_error(EngineUnavailable(f"{self.origin}: {told}"))

    # sending

    def _send_on(self) -> None:
        """More of the body, until the peer takes no more of it, or others should have a turn."""
        for _ in range(PARTS_A_TURN):
            if self._unsent is None or self._is_clogged or self.transport is None:
                return
            try:
                part = next(self._unsent, None)
            except ContentLost as error:
                # The peer has a part of it, and the rest is not to be had.
                self._unread = str(error)
                self.hang_up()
                return
            if part is None:
                self._unsent = None
            else:
                self.transport.write(part)
        self._loop.call_soon(self._send_on)

    # telling the receiver

    def _tell(self, call: Call, fault: str) -> None:
        """What one read brought; the receiver may close its call, or send another, at any time."""
        receiver, answer = call.receiver, self._answer
        if answer.status and not self._has_told_head:
            self._has_told_head = True
            receiver.on_head(answer.status, answer.headers)
        data = answer.take()
        if data and self._call is call:
            receiver.on_data(data)
        if self._call is not call:
            return
        if answer.is_whole:
            self._release(call, not fault)
            receiver.on_end()
        elif fault or answer.num_mute_bytes > MAX_MUTE_BYTES:
            call.over()
            self.drop_call()
            told = fault or "sends headers without end"
            receiver.on_error(EngineUnavailable(f"{self.origin}: {told}"))

    def _release(self, call: Call, is_sound: bool) -> None:
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
        """Whether the peer closed before it can have seen the request."""
        waited_s = self._loop.time() - self._begun_s
        return self._num_calls > 1 and not self._answer.has_bytes and waited_s < STALE_S


_CLOSED = "the connection was closed before the answer's end"


def one_line(error: Exception) -> str:
    """An error's kind and words."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
