"""One forwarded call: the upstream behind it, the answer so far, and who reads it.

    WAITING --head--> ANSWERING --last byte--> WHOLE
    WAITING --upstream fails, another is there--> WAITING
    WAITING, ANSWERING --upstream fails, last reader leaves, session sealed--> CUT

Invariants: bytes are kept as they came and in order, so a repeated answer is byte-equal; a long one
lies in a blob once nobody reads it, and one that was cut is not kept; when the last reader leaves,
the upstream is hung up at once, since nothing could resume it; what was asked is let go when an
answer begins, since no other upstream gets it from then on; every reader is woken at each move.
Driven by the engine room's HTTP client, by edge.py and by session.py.
"""

import asyncio
import enum
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from rollmesh.core.errors import EngineUnavailable, SessionError
from rollmesh.engine.parser import Headers
from rollmesh.serve.interception.pieces import Piece, held, joined
from rollmesh.serve.interception.relay.headers import returned
from rollmesh.serve.interception.relay.threads import Request

RETRY_AFTER_S = 1.0


class CallState(enum.StrEnum):
    """See the module's drawing."""

    WAITING = "waiting"
    ANSWERING = "answering"
    WHOLE = "whole"
    CUT = "cut"


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


class RelayCall:
    """Satisfies the HTTP client's Receiver."""

    __slots__ = (
        "_carrier",
        "_num_readers",
        "_on_ended",
        "_pieces",
        "_waiters",
        "asked",
        "failure",
        "is_delivered",
        "lines",
        "max_bytes",
        "num_bytes",
        "state",
        "status",
    )

    def __init__(
        self, asked: Asked, max_bytes: int, on_ended: Callable[["RelayCall"], None]
    ) -> None:
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
        self.failure: SessionError | None = None
        """Of a CUT call."""
        self._pieces: list[Piece] = []
        self._on_ended = on_ended
        self._num_readers = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._carrier: Carrier | None = None

    def carry(self, carrier: Carrier) -> None:
        """It is on its way."""
        self._carrier = carrier

    @property
    def is_running(self) -> bool:
        """More may come."""
        return self._carrier is not None

    @property
    def body(self) -> bytes:
        """The answer's bytes so far."""
        return joined(self._pieces)

    def since(self, num_pieces: int) -> tuple[bytes, int]:
        """The answer's bytes behind so many pieces, and how many it has now."""
        return joined(self._pieces[num_pieces:]), len(self._pieces)

    # readers

    def join(self) -> None:
        """A connection reads this call."""
        self._num_readers += 1

    def leave(self) -> None:
        """It stopped; the last one hangs up what still runs."""
        self._num_readers -= 1
        if not self._num_readers:
            if self.is_running:
                self.cut(SessionError(499, "abandoned", "the client hung up"))
            self._pieces = [] if self.state is CallState.CUT else [held(self.body)]

    async def wait(self, num_pieces: int) -> None:
        """Until there is a head and there are more than `num_pieces`, or no more will come.

        SessionError if the call was cut.
        """
        while self.is_running and len(self._pieces) <= num_pieces:
            await self._move()
        self.check()

    async def wait_for_head(self) -> None:
        """Until status and headers are known; SessionError if the call was cut."""
        while self.state is CallState.WAITING:
            await self._move()
        self.check()

    def check(self) -> None:
        """SessionError if it was cut."""
        if self.failure is not None:
            raise self.failure.again()

    def cut(self, failure: SessionError) -> None:
        """End it as failed; its readers are told. No effect on a call that has ended."""
        if self._carrier is not None:
            self._carrier.close()
            self.failure = failure
            self._end(CallState.CUT)

    # the client's callbacks

    def on_head(self, status: int, headers: Headers) -> None:
        self.status, self.lines = status, returned(headers)
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
        else:
            self._wake()

    def on_end(self) -> None:
        if self._carrier is not None:
            self._carrier.close()
            self._end(CallState.WHOLE)

    def on_error(self, error: EngineUnavailable) -> None:
        if self._carrier is None:
            return
        if self._carrier.fail(error, retries=self.state is CallState.WAITING):
            return
        self.cut(SessionError(503, "upstream_unavailable", str(error), RETRY_AFTER_S))

    def _end(self, state: CallState) -> None:
        self.state, self._carrier = state, None
        self._wake()
        self._on_ended(self)

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
