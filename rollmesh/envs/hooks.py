"""Calls of the methods that users write into the environments of this room.

Invariant: a coroutine runs on the loop and a plain method in a thread, so that none that waits
holds the loop; a plain method that runs when its rollout is cancelled is waited for, since what
comes next takes away what it works on; one that goes on even then is counted as left behind. Driven
by harness.py, single_turn.py and multi_turn.py.
"""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from rollmesh.envs.calls import Calls, begin_thread

P = ParamSpec("P")

CANCEL_WAIT_S = 5.0
"""So long a cancelled rollout waits for a plain method that still runs."""
_calls = Calls(grace_s=CANCEL_WAIT_S)
"""Counts those that run on."""


async def call_hook(method: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> Any:
    """What `method` gives in the end, or raises; its caller names the type."""
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    call = begin_thread(method, args, kwargs)
    try:
        found = await asyncio.shield(call)
    except asyncio.CancelledError:
        await _calls.leave(call, method)
        raise
    return await found if inspect.isawaitable(found) else found
