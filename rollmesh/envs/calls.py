"""Calls into environment code: each in a task or thread of its own, with a time limit.

    RUNNING --it ends--> its result or error
       +----time is over, or its caller is cancelled--> CANCELLED --it ends--> gone
                                                           +--GRACE_S--> LEFT BEHIND

- Coroutines run on the loop and are cancelled; plain methods run in a thread, which cannot be.
- The caller continues in time, even if the code swallows its cancellation. Errors are Exceptions,
  unless the caller itself is cancelled.
- Calls left behind are counted until they end, and keep no process alive. A coroutine that blocks
  holds the loop; the heartbeat thread then reports it.
"""

import asyncio
import contextlib
import contextvars
import inspect
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar, overload

import msgspec

from rollmesh.core.logs import get_logger

log = get_logger()

GRACE_S = 5.0
"""Time that a cancelled coroutine has for its `finally` blocks."""

P = ParamSpec("P")
T = TypeVar("T")


class EscapedError(Exception):
    """Environment code raised something that would have ended our task or the process."""


class OvertimeError(Exception):
    """A call did not end in time."""


def do_nothing() -> None:
    """Default for a limit without an action at its end."""


def never_paused() -> float:
    """Default for a limit that counts all time."""
    return 0.0


class TimeLimit(msgspec.Struct, frozen=True):
    """Duration that a call may take, and the setting that defines it."""

    key: str
    timeout_s: float
    when_over: Callable[[], None] = do_nothing
    """Called as soon as the call is abandoned, before its code had time to end."""
    paused_s: Callable[[], float] = never_paused
    """A growing sum of paused time, which does not count."""


_all: "weakref.WeakSet[EnvCalls]" = weakref.WeakSet()


def num_left_behind() -> int:
    """Return the number of abandoned calls of this process that have not ended."""
    return sum(calls.num_left for calls in _all)


class EnvCalls:
    """Calls of one owner: the worker, or an environment with tools."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._left: set[asyncio.Future[Any]] = set()
        _all.add(self)

    @property
    def num_left(self) -> int:
        """Abandoned calls that have not ended."""
        return len(self._left)

    @overload
    async def call(
        self,
        limit: TimeLimit,
        method: Callable[P, Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T: ...

    @overload
    async def call(
        self,
        limit: TimeLimit,
        method: Callable[P, T | Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T: ...

    async def call(
        self,
        limit: TimeLimit,
        method: Callable[P, T | Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Return the result of `method`; OvertimeError, EscapedError, or any Exception that it
        raises."""
        found: T | Awaitable[T]
        if inspect.iscoroutinefunction(method):
            return await self._ended(limit, _begin_task(method, args, kwargs), method)
        found = await self._ended(limit, start_thread(method, args, kwargs), method)
        if inspect.isawaitable(found):
            return await self._ended(limit, _begin_task(lambda: found, (), {}), method)
        return found

    async def _ended(
        self, limit: TimeLimit, call: asyncio.Future[T], method: Callable[..., object]
    ) -> T:
        is_over = True
        try:
            await _done_in_time(call, limit)
            is_over = not call.done()
        finally:
            if is_over:
                limit.when_over()
                await self._end(call, method)
        if is_over:
            raise OvertimeError(f"{limit.key} = {limit.timeout_s:g} is over")
        if call.cancelled():  # by its own code, since this class has not cancelled it
            raise as_exception(asyncio.CancelledError())
        error = call.exception()
        if error is None:
            return call.result()
        try:
            raise as_exception(error)
        finally:
            # Else the error and its frames would wait for the garbage collector.
            del call, error

    async def _end(self, call: asyncio.Future[Any], method: Callable[..., object]) -> None:
        self._left.add(call)
        call.add_done_callback(self._forget)
        if isinstance(call, asyncio.Task):
            call.cancel()
            await _done_within(call, self._grace_s)
            call.cancel()
        self._tell_if_left(call, method)

    async def leave(self, call: asyncio.Future[Any], method: Callable[..., object]) -> None:
        """Wait briefly for a thread whose result is not needed, and count it if it continues."""
        self._left.add(call)
        call.add_done_callback(self._forget)
        await asyncio.wait((call,), timeout=self._grace_s)
        self._tell_if_left(call, method)

    def _tell_if_left(self, call: asyncio.Future[Any], method: Callable[..., object]) -> None:
        if not call.done():
            name = getattr(method, "__qualname__", repr(method))
            log.warning("call.left_behind", method=name, num_left=self.num_left)

    def _forget(self, call: asyncio.Future[Any]) -> None:
        self._left.discard(call)
        if not call.cancelled():
            call.exception()  # marks it as retrieved, so that asyncio does not report it


async def _done_in_time(call: asyncio.Future[Any], limit: TimeLimit) -> None:
    """Wait until `call` is done or its time, without pauses, is over."""
    paused_s, wait_s, had_s = limit.paused_s(), limit.timeout_s, 0.0
    while wait_s > 0 and not call.done():
        await _done_within(call, wait_s)
        had_s += wait_s
        wait_s = limit.timeout_s + limit.paused_s() - paused_s - had_s


async def _done_within(call: asyncio.Future[Any], timeout_s: float) -> None:
    """Wait until `call` is done or `timeout_s` is over. asyncio.wait, which is for many, takes
    twice as long: 12 us in a rollout without calls that takes 100."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not woken.done():
            woken.set_result(None)

    timer = loop.call_later(timeout_s, wake)
    call.add_done_callback(wake)
    try:
        await woken
    finally:
        timer.cancel()
        call.remove_done_callback(wake)


def _begin_task(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> asyncio.Task[Any]:
    async def run() -> Any:
        try:
            return await method(*args, **kwargs)
        except (SystemExit, KeyboardInterrupt) as error:
            raise as_exception(error) from None

    return asyncio.get_running_loop().create_task(run())


def start_thread(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> asyncio.Future[Any]:
    """Run `method` in a new thread. A pool would fill with calls that never end, and wait for
    them."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def work(ended: asyncio.Future[Any]) -> None:
        try:
            found, error = context.run(method, *args, **kwargs), None
        except BaseException as raised:  # noqa: BLE001 - door: env code may raise anything
            found, error = None, as_exception(raised)
        with contextlib.suppress(RuntimeError):  # the loop is closed, and no task waits
            loop.call_soon_threadsafe(_settle, ended, found, error)
        del ended, found, error  # the error holds this frame, which must not hold the error

    threading.Thread(target=work, args=(ended,), name="env-call", daemon=True).start()
    return ended


def _settle(ended: asyncio.Future[Any], found: Any, error: Exception | None) -> None:
    if error is None:
        ended.set_result(found)
    else:
        ended.set_exception(error)


def as_exception(error: BaseException) -> Exception:
    """Return `error` as an Exception that ends only its own call, with its traceback."""
    match error:
        case asyncio.CancelledError():
            text = "a CancelledError of its own came out of environment code"
        case SystemExit():
            text = f"environment code called sys.exit({error.code!r})"
        case StopIteration():  # a Future rejects it
            text = "a StopIteration came out of environment code"
        case Exception():
            return error
        case _:
            # Such as a Rust library's panic, or pytest's `fail`.
            message = f": {error}".removesuffix(": ")
            text = f"a {type(error).__name__} came out of environment code{message}"
    return EscapedError(text).with_traceback(error.__traceback__)


CANCEL_WAIT_S = 5.0
"""Time that a cancelled rollout waits for a plain method that still runs."""
_calls = EnvCalls(grace_s=CANCEL_WAIT_S)
"""Counts those that continue."""


async def call_hook(method: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Any:
    """Call a method that users write in a built-in environment, a plain one in a thread.

    A plain method that runs when its rollout is cancelled is waited for, since its files are
    removed next; one that continues is counted as left behind.
    """
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    call = start_thread(method, args, kwargs)
    try:
        found = await asyncio.shield(call)
    except asyncio.CancelledError:
        await _calls.leave(call, method)
        raise
    return await found if inspect.isawaitable(found) else found
