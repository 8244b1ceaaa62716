"""One HTTP/1.1 connection of an agent: reads requests, has them handled one after the other.

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
from collections.abc import Awaitable
from typing import Protocol, cast

import msgspec

from rollmesh.core.logs import get_logger
from rollmesh.serve.interception.bodies import Bodies
from rollmesh.serve.interception.parser import Fault, RequestParser
from rollmesh.serve.interception.request import JSON, Request

MAX_UNASKED_BYTES = 64 * 1024
"""What is read beyond that which somebody waits for; looked at once a read."""

log = get_logger()


class InboundState(enum.StrEnum):
    """See the module's drawing."""

    IDLE = "idle"
    READING = "reading"
    BUSY = "busy"
    LEAVING = "leaving"


class Limits(msgspec.Struct, frozen=True):
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


class House(Protocol):
    """What a connection asks of its owner."""

    limits: Limits
    bodies: Bodies

    def opened(self, inbound: "Inbound") -> None:
        """It is there."""

    def lost(self, inbound: "Inbound") -> None:
        """It is gone."""

    def employ(self, inbound: "Inbound") -> asyncio.Task[None]:
        """A task of its `serve`."""

    def handle(self, request: Request, /) -> Awaitable[None]:
        """Answer it."""

    def unix_s(self) -> float:
        """The time of day."""


class Inbound(asyncio.Protocol):
    """See the module."""

    def __init__(self, house: House, loop: asyncio.AbstractEventLoop) -> None:
        self.state = InboundState.IDLE
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
        self.current: Request | None = None
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
                self.state = InboundState.READING if is_begun else InboundState.IDLE
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
        if self.state is InboundState.LEAVING:
            if waited_s > limits.linger_s:
                self.hang_up()
        elif self.state is InboundState.READING:
            if is_strange or waited_s > limits.head_s:
                self._parser.fail(408, "the request's head stopped coming")
                self._tell()
        elif (self.is_clogged or self.state is InboundState.IDLE) and (
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
        self._transport = cast(asyncio.Transport, transport)
        self._house.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._parser.fault is None and self.state is not InboundState.LEAVING:
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
            if is_due or self.state is InboundState.BUSY:
                wanted.set_result(None)
        elif self._task is None and is_due:
            self._task = self._house.employ(self)
        elif self._num_unasked_bytes > MAX_UNASKED_BYTES:
            self._pause()
        if self.state is InboundState.IDLE:
            self.state, self._since_s = InboundState.READING, self._loop.time()

    def _pause(self) -> None:
        if not self._is_paused and self._transport and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def _read_on(self) -> None:
        if self._is_paused and self._transport and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    async def _serve_one(self, request: Request) -> bool:
        """Whether the connection goes on."""
        self.state, self.current = InboundState.BUSY, request
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
                self._refuse(Fault(500, "a fault in the server"))
            return False
        finally:
            self.current = None
            self.was_known = self.was_known or request.owner is not None
            request.release_body()
        return request.keeps

    def _refuse(self, fault: Fault) -> None:
        told = msgspec.json.encode({"error": {"message": fault.why, "code": "invalid_http"}})
        answer = Request(self, "", "", [])
        with contextlib.suppress(ConnectionError):
            answer.answer(fault.status, answer.dated(JSON), told)

    def _part(self) -> None:
        """Close, once the client has what was written."""
        self.state, self._since_s = InboundState.LEAVING, self._loop.time()
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


def is_known(inbound: Inbound) -> bool:
    """Whether a request on the connection has shown a known key."""
    current = inbound.current
    return inbound.was_known or (current is not None and current.owner is not None)
