"""Calls into environment code: each in a task or thread of its own, each with a limit.

    RUNNING --it ends--> what it gave, or raised
       +----time is over, or its caller is cancelled--> TOLD --it ends--> gone
                                                          +--GRACE_S--> LEFT BEHIND

Coroutines run on the loop and are told by a cancellation; plain methods run in a thread, which
nobody can tell anything. Invariants: the caller goes on in time, whatever the code does, even where
it swallows its cancellation; what comes out of it is an Exception, unless the caller itself is
cancelled; what is left behind is counted until it ends, and keeps no process alive. A coroutine
that blocks holds the loop, which the beat thread then names. Driven by the worker and by
tools.py.
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
"""What a coroutine that was told to end has for its `finally` blocks."""

P = ParamSpec("P")
T = TypeVar("T")


class EscapedError(Exception):
    """Foreign code let something out that would have ended our task or the process."""


class OvertimeError(Exception):
    """A call did not end in its time."""


def nothing() -> None:
    """For a limit with nothing to do at its end."""


def never_paused() -> float:
    """For a limit of which all time counts."""
    return 0.0


class Limit(msgspec.Struct, frozen=True):
    """How long a call may take, and the setting that says so."""

    key: str
    timeout_s: float
    when_over: Callable[[], None] = nothing
    """Done as soon as the call is given up, before its code had time to end."""
    paused_s: Callable[[], float] = never_paused
    """A sum that grows while nobody could get on, which is not counted."""


_all: "weakref.WeakSet[Calls]" = weakref.WeakSet()


def num_left_behind() -> int:
    """Calls of this process, whoever made them, that were given up and have not ended."""
    return sum(calls.num_left for calls in _all)


class Calls:
    """Those of one owner: the worker, or an environment with tools."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._left: set[asyncio.Future[Any]] = set()
        _all.add(self)

    @property
    def num_left(self) -> int:
        """Calls that were given up and have not ended."""
        return len(self._left)

    @overload
    async def call(
        self, limit: Limit, method: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """A coroutine method."""

    @overload
    async def call(
        self,
        limit: Limit,
        method: Callable[P, T | Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """A method of which only its author knows."""

    async def call(
        self,
        limit: Limit,
        method: Callable[P, T | Awaitable[T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """What `method` gives; OvertimeError, EscapedError, or whatever Exception it raises."""
        found: T | Awaitable[T]
        if inspect.iscoroutinefunction(method):
            return await self._ended(limit, _begin_task(method, args, kwargs), method)
        found = await self._ended(limit, begin_thread(method, args, kwargs), method)
        if inspect.isawaitable(found):
            return await self._ended(limit, _begin_task(lambda: found, (), {}), method)
        return found

    async def _ended(
        self, limit: Limit, call: asyncio.Future[T], method: Callable[..., object]
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
        if call.cancelled():  # by its own code: we have not told it to end
            raise tamed(asyncio.CancelledError())
        error = call.exception()
        if error is None:
            return call.result()
        try:
            raise tamed(error)
        finally:
            # Else the error, and all that its frames hold, would wait for the collector.
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
        """Wait a moment for a thread that nobody wants any more, and count it if it goes on."""
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
            call.exception()  # looked at, so that asyncio does not complain of it


async def _done_in_time(call: asyncio.Future[Any], limit: Limit) -> None:
    """Until `call` is done or has had its time, and as much again as there were pauses."""
    paused_s, wait_s, had_s = limit.paused_s(), limit.timeout_s, 0.0
    while wait_s > 0 and not call.done():
        await _done_within(call, wait_s)
        had_s += wait_s
        wait_s = limit.timeout_s + limit.paused_s() - paused_s - had_s


async def _done_within(call: asyncio.Future[Any], timeout_s: float) -> None:
    """Until `call` is done or its time is over. asyncio.wait, which is for many, takes twice as
    long: 12 us where a rollout without calls takes 100."""
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
            raise tamed(error) from None

    return asyncio.get_running_loop().create_task(run())


def begin_thread(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> asyncio.Future[Any]:
    """What `method` gives, in the end. A thread of its own: a pool would fill with those that never
    end, and wait for them."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def work(ended: asyncio.Future[Any]) -> None:
        try:
            found, error = context.run(method, *args, **kwargs), None
        except BaseException as raised:  # noqa: BLE001 - door: env code may raise anything
            found, error = None, tamed(raised)
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            loop.call_soon_threadsafe(_settle, ended, found, error)
        del ended, found, error  # this frame is held by the error, and must not hold it

    threading.Thread(target=work, args=(ended,), name="env-call", daemon=True).start()
    return ended


def _settle(ended: asyncio.Future[Any], found: Any, error: Exception | None) -> None:
    if error is None:
        ended.set_result(found)
    else:
        ended.set_exception(error)


def tamed(error: BaseException) -> Exception:
    """`error` as an Exception that ends only its own call; it keeps its traceback."""
    match error:
        case asyncio.CancelledError():
            text = "a CancelledError of its own came out of environment code"
        case SystemExit():
            text = f"environment code called sys.exit({error.code!r})"
        case StopIteration():  # a Future does not take it
            text = "a StopIteration came out of environment code"
        case Exception():
            return error
        case _:
            # Such as a Rust library's panic, or pytest's `fail`.
            message = f": {error}".removesuffix(": ")
            text = f"a {type(error).__name__} came out of environment code{message}"
    return EscapedError(text).with_traceback(error.__traceback__)
