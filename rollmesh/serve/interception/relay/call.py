"""One forwarded call: the upstream behind it, the answer so far, and who reads it.

    WAITING --head--> ANSWERING --last byte--> WRITING --on disk, or it is not kept--> WHOLE
    WAITING --upstream fails, another is there--> WAITING
    WAITING, ANSWERING --upstream fails, last reader leaves, session sealed--> CUT
    WRITING --the disk does not take it--> UNWRITTEN --a retry--> WRITING

Invariants: bytes are kept as they came and in order, so a repeated answer is byte-equal; a
stream's pieces are shown as they come, but for those that end it (ends.py), which wait until the
answer is WHOLE; a long answer lies in a blob once nobody reads it, and
one that was cut is not kept; when the last reader leaves, the upstream is hung up at once, since
nothing could resume it; what was asked is let go when an answer begins, since no other upstream
gets it from then on; every reader is woken by what concerns it. Driven by the engine room's HTTP
client, by edge.py and by session.py.
"""

import asyncio
import enum
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from rollmesh.core.errors import EngineUnavailable, SessionError
from rollmesh.engine.parser import Headers
from rollmesh.serve.interception.pieces import Piece, held, joined
from rollmesh.serve.interception.relay.ends import StreamEnd
from rollmesh.serve.interception.relay.headers import returned, tells_events
from rollmesh.serve.interception.relay.threads import Request

RETRY_AFTER_S = 1.0


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
        "_ending",
        "_num_open",
        "_num_readers",
        "_on_ended",
        "_pieces",
        "_waiters",
        "asked",
        "failure",
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
    ) -> None:
        """One that has `ended` did so in another process."""
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
        """Of a CUT or UNWRITTEN call."""
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

    def leave(self) -> None:
        """It stopped; the last one hangs up what still runs."""
        self._num_readers -= 1
        if not self._num_readers:
            if self._is_running:
                self.cut(SessionError(499, "abandoned", "the client hung up"))
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
            raise self.failure.again()

    def cut(self, failure: SessionError) -> None:
        """End it as failed; its readers are told. No effect on a call that has ended."""
        if self._carrier is not None:
            self._carrier.close()
            self.failure = failure
            self._end(CallState.CUT)

    # its session, once it has ended

    def move(self, state: CallState, failure: SessionError | None = None) -> None:
        """It is written, or is not to be (WHOLE); was refused by the disk, with the `failure`
        (UNWRITTEN); is being written once more (WRITING)."""
        self.state, self.failure = state, failure
        self._wake()

    # the client's callbacks

    def on_head(self, status: int, headers: Headers) -> None:
        self.status, self.lines = status, returned(headers)
        self.is_stream = tells_events(self.lines)
        self._ending = StreamEnd(self.asked.route) if self.is_stream else None
        self.state = CallState.ANSWERING
        if self._carrier is not None:
            self._carrier.settle()
        self._wake()

    def on_data(self, data: bytes) -> None:
        self._pieces.append(data)
        self.num_bytes += len(data)
        if self.num_bytes > self.max_bytes:
            why = f"the upstream's answer is longer than {self.max_bytes} bytes"
            self.cut(SessionError(502, "answer_too_large", why))
        elif self._ending is not None:
            self._show(self._ending, data)

    def on_end(self) -> None:
        if self._carrier is not None:
            self._carrier.close()
            self._end(CallState.WRITING)

    def on_error(self, error: EngineUnavailable) -> None:
        if self._carrier is None:
            return
        if self._carrier.fail(error, retries=self.state is CallState.WAITING):
            return
        self.cut(SessionError(503, "upstream_unavailable", str(error), RETRY_AFTER_S))

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
