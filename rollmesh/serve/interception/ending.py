"""How an exchange ends, in either capture mode: its last state, and what its client is told.

    whole                       DELIVERED, as the exchange itself says
    SessionError, Overloaded    FAILED, of a sealed session SEALED     a refusal
    client hung up, cancelled   ABANDONED                              nothing, nobody listens
    a fault of ours             FAILED                                 500, and it is logged

Invariants: before the first byte of the answer a refusal has its true status, behind it a refusal
is the stream's last event, and behind the last byte nothing is said; a client that took nothing
until its session was sealed is hung up on, with all that it did not take; no error but a lost
client or cancellation, which are the connection's, passes on. Driven by exchange.py and the
relay's edge.
"""

import asyncio
import enum
from collections.abc import Awaitable
from typing import Protocol

from rollmesh.core.errors import Overloaded, SessionError
from rollmesh.core.logs import get_logger
from rollmesh.serve.interception.request import JSON, Request

log = get_logger()


class ExchangeState(enum.StrEnum):
    """Drawn in exchange.py."""

    RECEIVED = "received"
    MATCHED = "matched"
    ATTACHED = "attached"
    STREAMING = "streaming"
    DELIVERED = "delivered"
    ABANDONED = "abandoned"
    FAILED = "failed"
    SEALED = "sealed"


class Guarded(Protocol):
    """An exchange, as `guard` ends it."""

    state: ExchangeState

    @property
    def request(self) -> Request:
        """Whose answer it is."""

    def refusal(self, error: SessionError) -> bytes:
        """The body of a refusal, in the client's dialect."""

    def last_event(self, error: SessionError) -> bytes:
        """The same, for a stream that has begun."""


async def guard(exchange: Guarded, work: Awaitable[None]) -> None:
    """Await an exchange's work; every error of it ends here."""
    try:
        await work
    except SessionError as error:
        _refuse(exchange, error)
    except Overloaded as error:
        _refuse(exchange, SessionError(429, "overloaded", str(error), error.retry_after_s))
    except (asyncio.CancelledError, ConnectionError):
        exchange.state = ExchangeState.ABANDONED
        raise
    except Exception:  # door: a fault of ours must not take other calls along
        log.exception("exchange.broken")
        _refuse(exchange, SessionError(500, "internal_error", "a fault in the server"))


def refuse(request: Request, body: bytes, error: SessionError) -> None:
    """Answer with an error whose body a dialect has encoded."""
    lines = request.dated(JSON)
    if error.retry_after_s is not None:
        lines += b"Retry-After: %d\r\n" % max(1, round(error.retry_after_s))
    request.answer(error.status, lines, body)


def _refuse(exchange: Guarded, error: SessionError) -> None:
    exchange.state = ExchangeState.SEALED if error.status == 410 else ExchangeState.FAILED
    request = exchange.request
    try:
        if not request.is_opened:
            refuse(request, exchange.refusal(error), error)
        elif not request.is_answered:
            request.close(exchange.last_event(error))
    except ConnectionError:
        exchange.state = ExchangeState.ABANDONED
        raise
    if request.is_clogged and exchange.state is ExchangeState.SEALED:
        raise ConnectionAbortedError("its client takes nothing, and its rollout is over")
