"""One forwarded call."""

import contextlib
import weakref

import pytest

from rollmesh.core.errors import EngineUnavailable, SessionError
from rollmesh.engine.connection import Headers
from rollmesh.serve.interception.relay.call import CallRequest, RelayCall
from rollmesh.testing.clock import FakeClock


class OnlyUpstream:
    """A transport without another upstream."""

    url = "http://upstream"
    has_other = False

    def redirect(self, status: int, headers: Headers) -> str:
        return "no"

    def fail(self, error: EngineUnavailable, retries: bool) -> bool:
        return False

    def settle(self) -> None: ...

    def close(self) -> None: ...


async def test_a_failure_keeps_nobody_who_was_told_of_it() -> None:
    call = RelayCall(CallRequest(0, "/messages", None, (), "", 0.0), 10, lambda _: None)
    call.send_on(OnlyUpstream())
    call.on_error(EngineUnavailable("http://upstream: down: very"))

    async def ask() -> "weakref.ref[FakeClock]":
        request = FakeClock()  # any object of the reader
        with contextlib.suppress(SessionError):
            await call.wait(0)
        return weakref.ref(request)

    assert (await ask())() is None
    with pytest.raises(SessionError, match="down") as caught:
        await call.wait_for_head()
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1.0)
