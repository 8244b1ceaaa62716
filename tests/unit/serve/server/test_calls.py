"""Calls into environment code: blocking methods stay off the loop, and all end in time."""

import asyncio
import threading

import pytest

from rollmesh.serve.server.calls import EscapedError, call_env


def plain(seen: list[int]) -> str:
    seen.append(threading.get_ident())
    return "plain"


async def coroutine(seen: list[int]) -> str:
    seen.append(threading.get_ident())
    return "coroutine"


async def test_plain_method_runs_in_a_thread_and_a_coroutine_on_the_loop() -> None:
    seen: list[int] = []
    assert await call_env(5.0, plain, seen) == "plain"
    assert await call_env(5.0, coroutine, seen) == "coroutine"
    assert seen[0] != threading.get_ident()
    assert seen[1] == threading.get_ident()


async def test_plain_method_may_give_an_awaitable() -> None:
    seen: list[int] = []
    assert await call_env(5.0, lambda: coroutine(seen)) == "coroutine"
    assert seen == [threading.get_ident()]


async def test_call_that_takes_too_long_is_a_timeout() -> None:
    async def never() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        await call_env(0.01, never)


@pytest.mark.parametrize("stray", [asyncio.CancelledError(), SystemExit(3)])
@pytest.mark.parametrize("in_thread", [False, True])
async def test_stray_cancellation_or_exit_does_not_end_the_caller(
    stray: BaseException, in_thread: bool
) -> None:
    def leave() -> None:
        raise stray

    async def leave_soon() -> None:
        raise stray

    with pytest.raises(EscapedError):
        await call_env(5.0, leave if in_thread else leave_soon)


async def test_cancelled_caller_is_cancelled_all_the_same() -> None:
    started = asyncio.Event()

    async def never() -> None:
        started.set()
        await asyncio.get_running_loop().create_future()

    task = asyncio.ensure_future(call_env(5.0, never))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
