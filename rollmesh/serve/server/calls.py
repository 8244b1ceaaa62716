"""Calls into environment code: coroutines on the loop, plain methods in a thread, all with a limit.

Invariant: a slow or blocking method of an environment never holds the event loop, unless it is a
coroutine that blocks, which the beat thread then names. Driven by rollouts.py and groups.py.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar, overload

P = ParamSpec("P")
T = TypeVar("T")


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
        if inspect.iscoroutinefunction(method):
            found: T | Awaitable[T] = method(*args, **kwargs)
        else:
            found = await asyncio.to_thread(method, *args, **kwargs)
        if inspect.isawaitable(found):
            return await found
        return found
