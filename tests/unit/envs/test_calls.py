"""Calls into environment code: blocking methods stay off the loop, and all end in time."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from rollmesh.envs.calls import EnvCalls, EscapedError, OvertimeError, TimeLimit

SOON = TimeLimit("score_timeout_s", 5.0)
NOW = TimeLimit("score_timeout_s", 0.01)


def plain(seen: list[int]) -> str:
    seen.append(threading.get_ident())
    return "plain"


async def coroutine(seen: list[int]) -> str:
    seen.append(threading.get_ident())
    return "coroutine"


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def test_plain_method_runs_in_a_thread_and_a_coroutine_on_the_loop() -> None:
    seen: list[int] = []
    calls = EnvCalls()
    assert await calls.call(SOON, plain, seen) == "plain"
    assert await calls.call(SOON, coroutine, seen) == "coroutine"
    assert seen[0] != threading.get_ident()
    assert seen[1] == threading.get_ident()
    assert calls.num_left == 0


async def test_a_plain_method_may_return_an_awaitable() -> None:
    seen: list[int] = []
    assert await EnvCalls().call(SOON, lambda: coroutine(seen)) == "coroutine"
    assert seen == [threading.get_ident()]


async def test_pauses_do_not_count_towards_a_time_limit() -> None:
    calls, pauses = EnvCalls(), iter([0.0, 0.02, 0.04, 0.04])
    limit = TimeLimit("run_timeout_s", 0.01, paused_s=lambda: next(pauses))
    with pytest.raises(OvertimeError):
        await calls.call(limit, never)
    assert not list(pauses), "the limit is extended by the pauses"


async def test_a_call_that_exceeds_its_limit_fails_after_its_code_has_ended() -> None:
    calls, ended = EnvCalls(), list[str]()

    async def tidy() -> None:
        try:
            await never()
        finally:
            await asyncio.sleep(0)
            ended.append("tidied up")

    over = TimeLimit("score_timeout_s", 0.01, lambda: ended.append("over"))
    with pytest.raises(OvertimeError, match=r"score_timeout_s = 0\.01 is over"):
        await calls.call(over, tidy)
    assert ended == ["over", "tidied up"]
    assert calls.num_left == 0


async def test_a_timeout_error_of_the_code_is_passed_on() -> None:
    async def time_out() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await EnvCalls().call(SOON, time_out)


async def test_a_coroutine_that_ignores_its_cancellation_is_abandoned_and_counted() -> None:
    calls, gate = EnvCalls(grace_s=0.01), asyncio.Event()

    async def stubborn() -> None:
        while not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                continue

    with pytest.raises(OvertimeError):
        await calls.call(NOW, stubborn)
    assert calls.num_left == 1
    gate.set()
    me = asyncio.current_task()
    await asyncio.wait([task for task in asyncio.all_tasks() if task is not me])
    assert calls.num_left == 0


async def test_a_thread_that_never_ends_is_abandoned_and_delays_no_other() -> None:
    calls, gate = EnvCalls(), threading.Event()
    for _ in range(50):
        with pytest.raises(OvertimeError):
            await calls.call(TimeLimit("score_timeout_s", 0.001), gate.wait, 30.0)
    assert calls.num_left == 50
    assert await calls.call(SOON, plain, []) == "plain"
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "env-call":
            await asyncio.to_thread(thread.join)
    assert calls.num_left == 0


def leave_by(stray: BaseException) -> Callable[[], None]:
    def leave() -> None:
        raise stray

    return leave


class PanicError(BaseException):
    """A BaseException, as a Rust library's panic or pytest's `fail` raises."""


STRAYS = [
    asyncio.CancelledError(),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    PanicError("index out of bounds"),
]


@pytest.mark.parametrize("stray", [*STRAYS, StopIteration()])
async def test_an_exit_raised_in_a_thread_does_not_end_the_caller(stray: BaseException) -> None:
    with pytest.raises(EscapedError):
        await EnvCalls().call(SOON, leave_by(stray))


@pytest.mark.parametrize("stray", STRAYS)
async def test_stray_cancellation_or_exit_does_not_end_the_caller(stray: BaseException) -> None:
    async def leave_soon() -> None:
        raise stray

    with pytest.raises(EscapedError):
        await EnvCalls().call(SOON, leave_soon)


async def test_a_librarys_panic_is_reported() -> None:
    async def panic() -> None:
        raise PanicError("index out of bounds")

    with pytest.raises(EscapedError, match=r"a PanicError came out .*: index out of bounds"):
        await EnvCalls().call(SOON, panic)


async def test_coroutine_that_cancels_its_own_task_does_not_end_the_caller() -> None:
    async def cancel_me() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await never()

    with pytest.raises(EscapedError):
        await EnvCalls().call(SOON, cancel_me)


async def test_cancelled_caller_is_cancelled_at_once_and_so_is_the_call() -> None:
    started, ended = asyncio.Event(), list[str]()
    over = TimeLimit("run_timeout_s", 5.0, lambda: ended.append("over"))

    async def tidy() -> None:
        started.set()
        try:
            await never()
        finally:
            ended.append("tidied up")

    calls = EnvCalls()
    task = asyncio.ensure_future(calls.call(over, tidy))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["over", "tidied up"]
    assert calls.num_left == 0


async def test_call_that_is_cancelled_before_it_begins_leaves_no_coroutine_unawaited() -> None:
    calls = EnvCalls()
    task = asyncio.ensure_future(calls.call(SOON, never))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls.num_left == 0
