"""One forwarded call: the upstream behind it, the answer so far, and who reads it.

    WAITING --head--> ANSWERING --last byte--> WRITING --on disk, or it is not kept--> WHOLE
    WAITING --upstream fails or redirects--> WAITING, at another upstream or address
    WAITING, ANSWERING --upstream fails, last reader leaves, session sealed--> CUT
    WRITING --the disk does not take it--> UNWRITTEN --a retry--> WRITING

- Bytes are kept as they came and in order, so a repeated answer is byte-equal.
- A stream's pieces are shown as they come, except those that end it (ends.py), which wait until the
  answer is WHOLE. A stream that ends without its end event or a finish reason is CUT.
- Where another upstream could take over, the head is held back until the first byte of the body.
- A long answer moves to a blob once it has no reader; one that was cut is not kept.
- When the last reader leaves, the upstream connection is closed, since nothing could resume it.
- The request is dropped when an answer begins, since no other upstream receives it from then on.
"""

import asyncio
import enum
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from rollmesh.core.clock import Clock, SystemClock
from rollmesh.core.errors import EngineUnavailable, LocalShortage, RequestLost, SessionError
from rollmesh.engine.parser import Headers
from rollmesh.serve.interception.pieces import Piece, held, joined
from rollmesh.serve.interception.relay.ends import StreamEnd
from rollmesh.serve.interception.relay.headers import returned, tells_events
from rollmesh.serve.interception.relay.heard import read_answer
from rollmesh.serve.interception.relay.threads import Request

RETRY_AFTER_S = 1.0
REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CLOCK = SystemClock()


class CallState(enum.StrEnum):
    """See the module's drawing."""

    WAITING = "waiting"
    ANSWERING = "answering"
    WRITING = "writing"
    WHOLE = "whole"
    UNWRITTEN = "unwritten"
    CUT = "cut"


ANSWERED = frozenset({CallState.WRITING, CallState.WHOLE, CallState.UNWRITTEN})
"""States of a call of which the whole answer is here."""


class Carrier(Protocol):
    """What carries a call to an upstream, and to another one where that fails."""

    @property
    def url(self) -> str:
        """The address of the upstream that has the call."""

    @property
    def has_other(self) -> bool:
        """Another upstream could still take the call over."""

    def redirect(self, status: int, headers: Headers) -> str:
        """Send the request to the address that the upstream names; why not, or '' if it is sent."""

    def fail(self, error: EngineUnavailable, retries: bool) -> bool:
        """The upstream failed; whether another was found to send the same request to."""

    def settle(self) -> None:
        """An answer has begun: no other upstream will be asked."""

    def close(self) -> None:
        """Hang up; no effect where the answer is whole."""


class Asked(msgspec.Struct, frozen=True, eq=False):
    """What was asked, as far as it is kept."""

    number: int
    """Counts the session's calls from 0; the call's node."""
    route: str
    """`/chat/completions` and the like."""
    request: Request | None
    body: Sequence[Piece]
    """Whole, where it could not be taken apart; else empty."""
    key: str
    """The Idempotency-Key, '' if there was none."""
    asked_s: float
    """Unix time."""


class Ended(msgspec.Struct, frozen=True):
    """How a call came to its end."""

    state: CallState
    status: int = 0
    lines: bytes = b""
    body: bytes = b""
    failure: SessionError | None = None


class RelayCall:
    """Satisfies the HTTP client's Receiver."""

    __slots__ = (
        "_carrier",
        "_clock",
        "_ending",
        "_num_open",
        "_num_readers",
        "_on_ended",
        "_pieces",
        "_shown_failure",
        "_waiters",
        "asked",
        "failure",
        "fault",
        "heard_s",
        "is_delivered",
        "is_stream",
        "is_untaken",
        "lines",
        "max_bytes",
        "num_bytes",
        "state",
        "status",
    )

    def __init__(
        self,
        asked: Asked,
        max_bytes: int,
        on_ended: Callable[["RelayCall"], None],
        ended: Ended | None = None,
        clock: Clock = _CLOCK,
    ) -> None:
        """A call with `ended` came to its end in an earlier process."""
        self.asked = asked
        self.state = CallState.WAITING
        self.status = 0
        self.lines = b""
        """The headers to give back, as header lines."""
        self.num_bytes = 0
        """Of the answer's body so far."""
        self.max_bytes = max_bytes
        """A longer answer is cut."""
        self.is_delivered = False
        """Some reader got the whole answer."""
        self.is_stream = False
        """Its answer is a stream of events."""
        self.is_untaken = False
        """Its session wrote down that none did."""
        self.failure: SessionError | None = None
        """Why it is CUT or UNWRITTEN, for the record; it may name upstream hosts."""
        self._shown_failure: SessionError | None = None
        """The same for the agent, where it must not name them."""
        self.fault: str | None = None
        """See verdict.fault_of, which keeps it here; None until then."""
        self._clock = clock
        self.heard_s = clock.now_s()
        """When the upstream sent something last."""
        self._pieces: list[Piece] = []
        self._num_open = 0
        """Pieces that stand before the end of a stream; it counts while more may come."""
        self._ending: StreamEnd | None = None
        """Of a stream of which more is shown."""
        self._on_ended = on_ended
        self._num_readers = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._carrier: Carrier | None = None
        if ended is not None:
            self.state, self.status, self.lines = ended.state, ended.status, ended.lines
            self.is_delivered, self.failure = self.state is CallState.WHOLE, ended.failure
            self.is_stream = tells_events(self.lines)
            self.num_bytes = len(ended.body)
            self._pieces = [held(ended.body)] if ended.body else []

    def carry(self, carrier: Carrier) -> None:
        """It is on its way."""
        self._carrier = carrier

    @property
    def _is_running(self) -> bool:
        """More may come."""
        return self._carrier is not None

    @property
    def _is_open(self) -> bool:
        """Readers may be shown more."""
        return self._carrier is not None or self.state is CallState.WRITING

    @property
    def body(self) -> bytes:
        """The answer's bytes so far."""
        return joined(self._pieces)

    def since(self, num_pieces: int) -> tuple[bytes, int]:
        """The answer's bytes behind so many pieces, and behind how many the rest is."""
        return joined(self._pieces[num_pieces : self._num_told]), self._num_told

    @property
    def _num_told(self) -> int:
        """Pieces that readers may have."""
        return self._num_open if self._is_open else len(self._pieces)

    # readers

    def join(self) -> None:
        """A connection reads this call."""
        self._num_readers += 1

    def leave(self, silence_s: float) -> None:
        """A reader stopped; the last one closes a running call.

        The upstream is to blame if it has sent no body yet, or nothing for `silence_s`.
        """
        self._num_readers -= 1
        if not self._num_readers:
            if self._is_running:
                quiet_s = self._clock.now_s() - self.heard_s
                why = "the agent hung up"
                if not self.num_bytes or quiet_s >= silence_s:
                    self.cut(SessionError(504, "upstream_silent", f"{silence(quiet_s)}, and {why}"))
                else:
                    self.cut(SessionError(499, "abandoned", why))
            self._pieces = [] if self.state is CallState.CUT else [held(self.body)]
            self._num_open = 0

    async def wait(self, num_pieces: int) -> None:
        """Until there is a head and more than `num_pieces` are shown, or no more will be.

        SessionError if the call was cut, or could not be written.
        """
        while self._is_open and self._num_told <= num_pieces:
            await self._move()
        self.check()

    async def wait_for_head(self) -> None:
        """Until status and headers are known; SessionError if the call was cut."""
        while self.state is CallState.WAITING:
            await self._move()
        self.check()

    def check(self) -> None:
        """SessionError if it was cut, or could not be written."""
        if self.failure is not None:
            raise (self._shown_failure or self.failure).again()

    def cut(self, failure: SessionError, shown: SessionError | None = None) -> None:
        """End it as failed and wake its readers, which get `shown`. No effect on an ended call."""
        if self._carrier is not None:
            self._carrier.close()
            self.failure, self._shown_failure = failure, shown
            self._end(CallState.CUT)

    # its session, once it has ended

    def move(self, state: CallState, failure: SessionError | None = None) -> None:
        """It is written, or is not to be (WHOLE); was refused by the disk, with the `failure`
        (UNWRITTEN); is being written once more (WRITING)."""
        self.state, self.failure, self._shown_failure = state, failure, None
        self._wake()

    # the client's callbacks

    def on_head(self, status: int, headers: Headers) -> None:
        carrier = self._carrier
        self.heard_s = self._clock.now_s()
        if carrier is not None and status in REDIRECTS:
            if refusal := carrier.redirect(status, headers):
                self.on_error(EngineUnavailable(f"{carrier.url}: {refusal}"))
            return
        self.status, self.lines = status, returned(headers)
        self.is_stream = tells_events(self.lines)
        self._ending = StreamEnd(self.asked.route) if self.is_stream else None
        if carrier is None or not carrier.has_other:
            self._begin()

    def on_data(self, data: bytes) -> None:
        if self.state is CallState.WAITING:
            self._begin()
        self.heard_s = self._clock.now_s()
        self._pieces.append(data)
        self.num_bytes += len(data)
        if self.num_bytes > self.max_bytes:
            why = f"the upstream's answer is longer than {self.max_bytes} bytes"
            self.cut(SessionError(502, "answer_too_large", why))
        elif self._ending is not None:
            self._show(self._ending, data)

    def on_end(self) -> None:
        carrier = self._carrier
        if carrier is None:
            return
        if self._ending is not None and self.status == 200 and self.asked.route:
            answer = read_answer(self.asked.route, self.lines, self.body)
            if answer.is_cut:
                self.on_error(EngineUnavailable(f"{carrier.url}: {answer.failure}"))
                return
        if self.state is CallState.WAITING:
            self._begin()
        carrier.close()
        self._end(CallState.WRITING)

    def on_error(self, error: EngineUnavailable) -> None:
        if self._carrier is None:
            return
        if self._carrier.fail(error, retries=self.state is CallState.WAITING):
            return
        is_ours = isinstance(error, RequestLost | LocalShortage)
        shown = str(error) if is_ours else _without_host(str(error))
        self.cut(_unavailable(str(error)), _unavailable(shown))

    def _begin(self) -> None:
        """The answer begins: readers get its head, and no other upstream gets the request."""
        self.state = CallState.ANSWERING
        if self._carrier is not None:
            self._carrier.settle()
        self._wake()

    def _show(self, ending: StreamEnd, data: bytes) -> None:
        """The newest piece to all readers, unless the stream ends in it."""
        if ending.is_in(data):
            self._ending = None
        else:
            self._num_open = len(self._pieces)
            self._wake()

    def _end(self, state: CallState) -> None:
        self.state, self._carrier, self._ending = state, None, None
        self._on_ended(self)
        if state is CallState.CUT:
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
    """The fault of an upstream that is silent."""
    return f"the upstream has sent nothing for {quiet_s:.0f} s"


def _unavailable(why: str) -> SessionError:
    return SessionError(503, "upstream_unavailable", why, RETRY_AFTER_S)


def _without_host(fault: str) -> str:
    """The error for the agent; `fault` is `URL: WHAT: DETAILS`, and details may name hosts."""
    return f"the upstream: {fault.partition(': ')[2].partition(': ')[0]}"
