"""Users' methods: a coroutine runs on the loop, a plain one in a thread, which is awaited."""

import asyncio
import sys
import threading

import pytest

from rollmesh.envs.calls import EscapedError, call_hook, num_left_behind


async def test_coroutine_runs_on_the_loop_and_a_plain_method_in_a_thread() -> None:
    async def where_async() -> int:
        return threading.get_ident()

    assert await call_hook(where_async) == threading.get_ident()
    assert await call_hook(threading.get_ident) != threading.get_ident()


async def test_an_awaitable_from_a_plain_method_is_awaited() -> None:
    async def late(number: int) -> int:
        return number + 1

    def plain(number: int) -> object:
        return late(number)

    assert await call_hook(plain, 2) == 3


async def test_an_error_of_a_method_is_raised_to_its_caller() -> None:
    def broken() -> None:
        raise KeyError("gone")

    with pytest.raises(KeyError):
        await call_hook(broken)


async def test_a_plain_method_cannot_end_the_process() -> None:
    def leaves() -> None:
        sys.exit(3)

    with pytest.raises(EscapedError, match=r"sys\.exit\(3\)"):
        await call_hook(leaves)


async def test_cancellation_waits_for_the_plain_method_that_still_runs() -> None:
    began, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    ended = []

    def slow() -> None:
        loop.call_soon_threadsafe(began.set)
        may_end.wait()
        ended.append(True)

    calling = asyncio.create_task(call_hook(slow))
    await began.wait()
    calling.cancel()
    loop.call_soon(may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert ended


async def test_a_plain_method_that_cannot_be_ended_is_counted_until_it_ends() -> None:
    began, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    num_before = num_left_behind()

    def stuck() -> None:
        loop.call_soon_threadsafe(began.set)
        may_end.wait()

    calling = asyncio.create_task(call_hook(stuck))
    await began.wait()
    calling.cancel()
    await asyncio.sleep(0)
    calling.cancel()  # a second cancellation stops waiting for the method
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert num_left_behind() == num_before + 1
    may_end.set()
    async with asyncio.timeout(60):
        while num_left_behind() > num_before:  # noqa: ASYNC110 - a thread's end sets no event
            await asyncio.sleep(0)
