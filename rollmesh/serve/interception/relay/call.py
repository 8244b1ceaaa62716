"""One forwarded call: its request, its upstream, the answer so far, its readers, its fault.

    WAITING --head--> ANSWERING --last byte--> WRITING --on disk, or it is not kept--> WHOLE
    WAITING --upstream fails or redirects--> WAITING, at another upstream or address
    WAITING, ANSWERING --upstream fails, last reader leaves, session sealed--> CUT
    WRITING --the write fails--> UNWRITTEN --a retry--> WRITING

- Answer bytes are stored unchanged and in order, so a repeated answer is byte-equal.
- A stream's pieces are sent on at once, except those of its end event, which wait until the answer
  is WHOLE. A stream that ends without its end event or a finish reason is CUT.
- If another upstream could take over, the head is held back until the first byte of the body.
- When the last reader leaves, a running call is cut, since nothing could resume it; a whole long
  answer moves to a blob.
"""

import asyncio
import enum
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from rollmesh.core.clock import Clock, SystemClock
from rollmesh.core.errors import (
    ContentLost,
    EngineUnavailable,
    LocalShortage,
    RequestLost,
    SessionError,
)
from rollmesh.core.types import Outcome
from rollmesh.engine.connection import Headers
from rollmesh.serve.interception.dialects.dialect import Dialect
from rollmesh.serve.interception.dialects.registry import DIALECTS
from rollmesh.serve.interception.pieces import Piece, held, joined
from rollmesh.serve.interception.relay.history import StoredRequest
from rollmesh.serve.interception.relay.upstream_answer import (
    StreamEndDetector,
    UpstreamAnswer,
    error_in,
    is_event_stream,
    read_answer,
    returned_headers,
)

RETRY_AFTER_S = 1.0
REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CLOCK = SystemClock()


class ForwardState(enum.StrEnum):
    """State of a forwarded call (drawn above)."""

    WAITING = "waiting"
    ANSWERING = "answering"
    WRITING = "writing"
    WHOLE = "whole"
    UNWRITTEN = "unwritten"
    CUT = "cut"


ANSWERED = frozenset({ForwardState.WRITING, ForwardState.WHOLE, ForwardState.UNWRITTEN})
"""States in which the whole answer has been received."""


class CallTransport(Protocol):
    """Sends a call to an upstream, and to another one if that fails."""

    @property
    def url(self) -> str:
        """The address of the upstream that has the call."""

    @property
    def has_other(self) -> bool:
        """Another upstream could still take the call over."""

    def redirect(self, status: int, headers: Headers) -> str:
        """Send the request to the address that the upstream names; return why not, or ''."""

    def fail(self, error: EngineUnavailable, retries: bool) -> bool:
        """Handle an upstream's failure; return whether another upstream gets the request."""

    def settle(self) -> None:
        """Drop the request: an answer has begun, so no other upstream gets it."""

    def close(self) -> None:
        """Close the connection; no effect if the answer is whole."""


class CallRequest(msgspec.Struct, frozen=True, eq=False):
    """The request of a call, as far as it is stored."""

    number: int
    """Position of the call in its session, from 0; its node in the account."""
    route: str
    """The dialect's route; '' for a call that is not recorded."""
    stored: StoredRequest | None
    """None if the body could not be parsed."""
    body: Sequence[Piece]
    """The whole body if it could not be parsed, else empty."""
    key: str
    """The Idempotency-Key; '' if there was none."""
    asked_s: float
    """Unix time."""

    @property
    def dialect(self) -> Dialect | None:
        """The dialect of the route."""
        return DIALECTS.get(self.route)


class CallResult(msgspec.Struct, frozen=True):
    """The end of a call in an earlier process."""

    state: ForwardState
    status: int = 0
    lines: bytes = b""
    body: bytes = b""
    failure: SessionError | None = None


class RelayCall:
    """One call; receives the HTTP client's callbacks."""

    __slots__ = (
        "_clock",
        "_ending",
        "_num_open",
        "_num_readers",
        "_on_ended",
        "_pieces",
        "_shown_failure",
        "_transport",
        "_waiters",
        "failure",
        "fault",
        "is_delivered",
        "is_stream",
        "is_undelivered",
        "lines",
        "max_bytes",
        "num_bytes",
        "received_s",
        "request",
        "state",
        "status",
    )

    def __init__(
        self,
        request: CallRequest,
        max_bytes: int,
        on_ended: Callable[["RelayCall"], None],
        ended: CallResult | None = None,
        clock: Clock = _CLOCK,
    ) -> None:
        """A call with `ended` ended in an earlier process."""
        self.request = request
        self.state = ForwardState.WAITING
        self.status = 0
        self.lines = b""
        """Header lines of the answer."""
        self.num_bytes = 0
        """Bytes of the answer's body so far."""
        self.max_bytes = max_bytes
        """A longer answer is cut."""
        self.is_delivered = False
        """Some reader received the whole answer."""
        self.is_stream = False
        """The answer is a stream of events."""
        self.is_undelivered = False
        """The session recorded that no reader received the whole answer."""
        self.failure: SessionError | None = None
        """Why it is CUT or UNWRITTEN, for the record; it may name upstream hosts."""
        self._shown_failure: SessionError | None = None
        """The failure for the agent, without upstream hosts; None if both are equal."""
        self.fault: str | None = None
        """Cache of `fault_of`; None until it is computed."""
        self._clock = clock
        self.received_s = clock.now_s()
        """When the upstream last sent something."""
        self._pieces: list[Piece] = []
        self._num_open = 0
        """Pieces before the end of a stream; used while more may arrive."""
        self._ending: StreamEndDetector | None = None
        """Detector of a stream whose end event has not been received."""
        self._on_ended = on_ended
        self._num_readers = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._transport: CallTransport | None = None
        if ended is not None:
            self.state, self.status, self.lines = ended.state, ended.status, ended.lines
            self.is_delivered, self.failure = self.state is ForwardState.WHOLE, ended.failure
            self.is_stream = is_event_stream(self.lines)
            self.num_bytes = len(ended.body)
            self._pieces = [held(ended.body)] if ended.body else []

    def send_on(self, transport: CallTransport) -> None:
        """Set the transport that sends the call."""
        self._transport = transport

    @property
    def _is_running(self) -> bool:
        """Whether more may arrive."""
        return self._transport is not None

    @property
    def _is_open(self) -> bool:
        """Whether more may become visible to readers."""
        return self._transport is not None or self.state is ForwardState.WRITING

    @property
    def body(self) -> bytes:
        """The answer's bytes so far."""
        return joined(self._pieces)

    def since(self, num_pieces: int) -> tuple[bytes, int]:
        """The visible bytes after the first `num_pieces`, and the number of visible pieces."""
        return joined(self._pieces[num_pieces : self._num_visible]), self._num_visible

    @property
    def _num_visible(self) -> int:
        """Pieces that readers may receive."""
        return self._num_open if self._is_open else len(self._pieces)

    # readers

    def join(self) -> None:
        """Add a reader."""
        self._num_readers += 1

    def leave(self, silence_s: float) -> None:
        """Remove a reader; the last one cuts a running call.

        The failure is the upstream's (504) if it has sent no body, or nothing for `silence_s`.
        """
        self._num_readers -= 1
        if not self._num_readers:
            if self._is_running:
                quiet_s = self._clock.now_s() - self.received_s
                why = "the agent hung up"
                if not self.num_bytes or quiet_s >= silence_s:
                    self.cut(SessionError(504, "upstream_silent", f"{silence(quiet_s)}, and {why}"))
                else:
                    self.cut(SessionError(499, "abandoned", why))
            self._pieces = [] if self.state is ForwardState.CUT else [held(self.body)]
            self._num_open = 0

    async def wait(self, num_pieces: int) -> None:
        """Wait until more than `num_pieces` are visible, or all are.

        SessionError if the call was cut or could not be written.
        """
        while self._is_open and self._num_visible <= num_pieces:
            await self._move()
        self.check()

    async def wait_for_head(self) -> None:
        """Wait until status and headers are known; SessionError if the call was cut."""
        while self.state is ForwardState.WAITING:
            await self._move()
        self.check()

    def check(self) -> None:
        """SessionError if the call was cut or could not be written."""
        if self.failure is not None:
            raise (self._shown_failure or self.failure).again()

    def cut(self, failure: SessionError, shown: SessionError | None = None) -> None:
        """End the call as failed; its readers get `shown`. No effect on an ended call."""
        if self._transport is not None:
            self._transport.close()
            self.failure, self._shown_failure = failure, shown
            self._end(ForwardState.CUT)

    # called by the session, after the call has ended

    def move(self, state: ForwardState, failure: SessionError | None = None) -> None:
        """Set the state of an ended call: WHOLE (written, or not kept), UNWRITTEN (the write failed
        with `failure`) or WRITING (it is written again)."""
        self.state, self.failure, self._shown_failure = state, failure, None
        self._wake()

    # callbacks of the HTTP client

    def on_head(self, status: int, headers: Headers) -> None:
        transport = self._transport
        self.received_s = self._clock.now_s()
        if transport is not None and status in REDIRECTS:
            if refusal := transport.redirect(status, headers):
                self.on_error(EngineUnavailable(f"{transport.url}: {refusal}"))
            return
        self.status, self.lines = status, returned_headers(headers)
        self.is_stream = is_event_stream(self.lines)
        dialect = self.request.dialect
        self._ending = StreamEndDetector(dialect) if dialect and self.is_stream else None
        if transport is None or not transport.has_other:
            self._begin()

    def on_data(self, data: bytes) -> None:
        if self.state is ForwardState.WAITING:
            self._begin()
        self.received_s = self._clock.now_s()
        self._pieces.append(data)
        self.num_bytes += len(data)
        if self.num_bytes > self.max_bytes:
            why = f"the upstream's answer is longer than {self.max_bytes} bytes"
            self.cut(SessionError(502, "answer_too_large", why))
        elif self._ending is not None:
            self._show(self._ending, data)

    def on_end(self) -> None:
        transport = self._transport
        if transport is None:
            return
        dialect = self.request.dialect
        if self._ending is not None and self.status == 200 and dialect is not None:
            answer = read_answer(dialect, self.lines, self.body)
            if answer.is_cut:
                self.on_error(EngineUnavailable(f"{transport.url}: {answer.failure}"))
                return
        if self.state is ForwardState.WAITING:
            self._begin()
        transport.close()
        self._end(ForwardState.WRITING)

    def on_error(self, error: EngineUnavailable) -> None:
        if self._transport is None:
            return
        if self._transport.fail(error, retries=self.state is ForwardState.WAITING):
            return
        is_ours = isinstance(error, RequestLost | LocalShortage)
        shown = str(error) if is_ours else _without_host(str(error))
        self.cut(_unavailable(str(error)), _unavailable(shown))

    def _begin(self) -> None:
        """Begin the answer: readers get its head, and no other upstream gets the request."""
        self.state = ForwardState.ANSWERING
        if self._transport is not None:
            self._transport.settle()
        self._wake()

    def _show(self, ending: StreamEndDetector, data: bytes) -> None:
        """Make the newest piece visible, unless the stream ends in it."""
        if ending.is_in(data):
            self._ending = None
        else:
            self._num_open = len(self._pieces)
            self._wake()

    def _end(self, state: ForwardState) -> None:
        self.state, self._transport, self._ending = state, None, None
        self._on_ended(self)
        if state is ForwardState.CUT:
            self._wake()

    async def _move(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)


def silence(quiet_s: float) -> str:
    """The fault of an upstream that sends nothing."""
    return f"the upstream has sent nothing for {quiet_s:.0f} s"


def _unavailable(why: str) -> SessionError:
    return SessionError(503, "upstream_unavailable", why, RETRY_AFTER_S)


def _without_host(fault: str) -> str:
    """The error for the agent; `fault` is `URL: WHAT: DETAILS`, and details may name hosts."""
    return f"the upstream: {fault.partition(': ')[2].partition(': ')[0]}"


UPSTREAM_FAULTS = frozenset({401, 402, 403, 405, 407, 408, 409, 425, 429})
"""Statuses below 500 that do not blame the request."""


def answer_of(call: RelayCall) -> UpstreamAnswer:
    """The parsed answer of a call with status 200."""
    dialect = call.request.dialect
    if dialect is None:
        route = call.request.route
        return UpstreamAnswer(unread=f"no dialect with the route {route!r} is registered")
    return read_answer(dialect, call.lines, call.body)


def fault_of(call: RelayCall) -> str:
    """Why an ended call has no answer, if that is not the agent's error; else ''."""
    if call.fault is None:
        try:
            call.fault = _find_fault(call)
        except ContentLost as error:
            return str(error)
    return call.fault


def outcome_of(call: RelayCall) -> Outcome:
    """The outcome of a rollout whose last call this is, unless its finisher names one.

    infra_error   no answer, or a status that blames the provider, its key, its quota or its load
    agent_error   404 from the API itself: the agent named a model or object that does not exist
    completed     everything else, including a request refused as invalid or too long
    """
    if fault_of(call):
        return Outcome.INFRA_ERROR
    is_missing = call.state in ANSWERED and call.status == 404
    return Outcome.AGENT_ERROR if is_missing else Outcome.COMPLETED


def _find_fault(call: RelayCall) -> str:
    if call.state not in ANSWERED:
        is_blamed = call.failure is not None and call.failure.status >= 500
        return str(call.failure) if is_blamed else ""
    status = call.status
    if status == 200:
        return answer_of(call).failure
    is_blamed = status in UPSTREAM_FAULTS or not 400 <= status < 500
    if is_blamed or (status == 404 and not error_in(call.request.dialect, call.body)):
        return f"the upstream answered {status}"
    return ""
