"""Calls into environment code: coroutines on the loop, plain methods in a thread, all with a limit.

Invariants: a slow or blocking method of an environment never holds the event loop, unless it is a
coroutine that blocks, which the beat thread then names; whatever it raises is an Exception, unless
our own task is cancelled. Driven by rollouts.py and groups.py.
"""

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Iterator
from typing import ParamSpec, TypeVar, overload

P = ParamSpec("P")
T = TypeVar("T")


class EscapedError(Exception):
    """Foreign code let something out that would have ended our task or the process."""


@contextlib.contextmanager
def fenced() -> Iterator[None]:
    """Around code of others: raises EscapedError for its stray cancellations and its sys.exit."""
    try:
        yield
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise EscapedError("a CancelledError of its own came out of environment code") from None
    except SystemExit as error:
        raise EscapedError(f"environment code called sys.exit({error.code!r})") from None


@overload
async def call_env(
    timeout_s: float, method: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
) -> T:
    """A coroutine method."""


@overload
async def call_env(
    timeout_s: float, method: Callable[P, T | Awaitable[T]], *args: P.args, **kwargs: P.kwargs
) -> T:
    """A method of which only its author knows."""


async def call_env(
    timeout_s: float, method: Callable[P, T | Awaitable[T]], *args: P.args, **kwargs: P.kwargs
) -> T:
    """What `method` gives; TimeoutError after `timeout_s`, when its thread is left behind."""
    async with asyncio.timeout(timeout_s):
        with fenced():
            return await _call(method, *args, **kwargs)


async def _call(method: Callable[P, T | Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    if inspect.iscoroutinefunction(method):
        found: T | Awaitable[T] = method(*args, **kwargs)
    else:
        found = await asyncio.to_thread(method, *args, **kwargs)
    if inspect.isawaitable(found):
        return await found
    return found
