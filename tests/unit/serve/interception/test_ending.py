"""What is told of each kind of error, before the first byte, in a stream, and behind the last."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rollmesh.core.errors import Overloaded, SessionError
from rollmesh.serve.interception.ending import ExchangeState, guard
from rollmesh.serve.interception.request import Request
from tests.unit.serve.interception.http_client import GET, LAST_GET, Held, serving


def busy() -> SessionError:
    return SessionError(503, "engine_down", "no engine", 0.2)


def sealed() -> SessionError:
    return SessionError(410, "session_sealed", "the session has ended")


ENDS: list[tuple[Callable[[], Exception], ExchangeState, int]] = [
    (busy, ExchangeState.FAILED, 503),
    (sealed, ExchangeState.SEALED, 410),
    (lambda: Overloaded("full", 2.6), ExchangeState.FAILED, 429),
    (lambda: ValueError("rk-secret"), ExchangeState.FAILED, 500),
]


class Odd:
    """An exchange that fails at a point of the test's own choice."""

    def __init__(self, request: Request, work: Callable[[Request], Awaitable[None]]) -> None:
        self.state = ExchangeState.RECEIVED
        self.request = request
        self._work = work

    async def run(self) -> None:
        await guard(self, self._work(self.request))

    def refusal(self, error: SessionError) -> bytes:
        return b"[%s]" % error.code.encode()

    def last_event(self, error: SessionError) -> bytes:
        return b"event %s" % error.code.encode()


async def ended(work: Callable[[Request], Awaitable[None]]) -> tuple[bytes, ExchangeState]:
    """What the client is told, and the exchange's last state."""
    states: list[ExchangeState] = []

    async def handle(request: Request) -> None:
        exchange = Odd(request, work)
        try:
            await exchange.run()
        finally:
            states.append(exchange.state)

    async with serving(handle) as place:
        told = await place.ask(LAST_GET)
    return told, states[0]


@pytest.mark.parametrize(("error", "state", "status"), ENDS, ids=["busy", "sealed", "full", "odd"])
async def test_an_error_before_the_first_byte_has_its_true_status(
    error: Callable[[], Exception], state: ExchangeState, status: int
) -> None:
    async def work(request: Request) -> None:
        request.open(200, b"")
        raise error()

    told, last = await ended(work)
    head, _, body = told.partition(b"\r\n\r\n")
    assert (int(head.split(b" ")[1]), last) == (status, state)
    assert body.startswith(b"[")
    waits = {503: b"\r\nRetry-After: 1\r\n", 429: b"\r\nRetry-After: 3\r\n"}
    assert waits.get(status, b"Content-Length") in head
    assert (b"Retry-After" in head) == (status in waits)
    assert b"rk-secret" not in told


@pytest.mark.parametrize(("error", "state", "status"), ENDS, ids=["busy", "sealed", "full", "odd"])
async def test_an_error_in_a_stream_is_its_last_event(
    error: Callable[[], Exception], state: ExchangeState, status: int
) -> None:
    async def work(request: Request) -> None:
        request.open(200, b"")
        request.send(b"first")
        raise error()

    told, last = await ended(work)
    assert told.startswith(b"HTTP/1.1 200 ")
    assert b"event " in told.partition(b"first")[2]
    assert told.endswith(b"\r\n0\r\n\r\n")
    assert last is state


async def test_an_error_behind_the_last_byte_is_not_told() -> None:
    async def work(request: Request) -> None:
        request.answer(200, b"", b"whole")
        raise sealed()

    told, last = await ended(work)
    assert told.endswith(b"\r\n\r\nwhole")
    assert last is ExchangeState.SEALED


async def test_a_client_that_hangs_up_is_told_nothing_and_abandons() -> None:
    held, states = Held(), []

    async def handle(request: Request) -> None:
        exchange = Odd(request, held)
        try:
            await exchange.run()
        finally:
            states.append(exchange.state)

    async with serving(handle) as place:
        client = await place.client()
        client.send(GET)
        await held.begun.wait()
        client.reset()
        await held.cancelled.wait()
        await place.server.stop()
    assert states == [ExchangeState.ABANDONED]


async def test_a_client_that_is_gone_when_it_is_refused_abandons() -> None:
    begun, states = asyncio.Event(), []

    async def work(request: Request) -> None:
        begun.set()
        # Cancelled when its client is lost, it ends by an error of its own.
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise busy() from None

    async def handle(request: Request) -> None:
        exchange = Odd(request, work)
        try:
            await exchange.run()
        finally:
            states.append(exchange.state)

    async with serving(handle) as place:
        client = await place.client()
        client.send(GET)
        await begun.wait()
        client.reset()
        while not states:  # noqa: ASYNC110 - the lost client is noticed by the server alone
            await asyncio.sleep(0)
    assert states == [ExchangeState.ABANDONED]
