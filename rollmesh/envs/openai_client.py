"""OpenAI clients of many rollouts over one connection pool per event loop.

Building an `AsyncOpenAI` with a pool of its own takes 0.1 s of the event loop, because it loads the
system's certificates; one that shares a pool takes a millisecond or less.
"""

import asyncio
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from rollmesh.core.errors import EnvError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()


def openai_client(base_url: str, api_key: str, **options: Any) -> "AsyncOpenAI":
    """A client for one endpoint; `options` as AsyncOpenAI's, such as `max_retries`.

    Call it on the event loop that will use the client. EnvError if `openai` is not installed.
    """
    try:
        from openai import AsyncOpenAI  # noqa: PLC0415 - takes seconds, and is used by few
    except ModuleNotFoundError:
        raise EnvError("agent.openai() needs the package openai: pip install openai") from None
    loop = asyncio.get_running_loop()
    if loop not in _pools:
        _pools[loop] = _pool_class()(trust_env=False)
    return AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=_pools[loop], **options)


async def close_pool() -> None:
    """Close the pool of the running loop; a later client opens a new one."""
    pool = _pools.pop(asyncio.get_running_loop(), None)
    if pool is not None:
        await pool.end()


@cache
def _pool_class() -> Any:
    from openai import DefaultAsyncHttpxClient  # noqa: PLC0415 - as above

    class Pool(DefaultAsyncHttpxClient):
        """Closing one rollout's client leaves the pool to the others."""

        async def aclose(self) -> None:
            return

        async def end(self) -> None:
            await super().aclose()

    return Pool
