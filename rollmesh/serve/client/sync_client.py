"""SyncRolloutClient: the same calls for programs without an event loop, and for notebooks.

    with SyncRolloutClient("tcp://host:port") as client:
        finished = client.run(task, env="guess")
        for task in tasks:
            client.ask(task, 8, env="guess")
        for arrival in client.stream(): ...

- Each method waits for the method of AsyncRolloutClient with its name, which runs on an event loop
  in another thread. Every method may be called from any thread; it blocks a running loop.
- Ctrl-C in a waiting call cancels its group in the mesh. In a forked process a call is an error.
"""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import ClientClosed
from rollmesh.core.ids import GroupId
from rollmesh.core.types import Task
from rollmesh.serve.client.arrivals import Arrival, Finished
from rollmesh.serve.client.async_client import AsyncRolloutClient, CallOptions
from rollmesh.wire.keys import Keys

T = TypeVar("T")


class SyncRolloutClient:
    """The client; it serves from its construction until `close` or the end of a `with`."""

    def __init__(
        self,
        router: str,
        folder: Path | None = None,
        *,
        journal: JournalConfig | None = None,
        keys: Keys | None = None,
        bind: str = "",
        advertise: str = "",
        weight: int = 1,
        keep: bool = False,
    ) -> None:
        """Connect; the arguments are AsyncRolloutClient's."""
        self._client = AsyncRolloutClient(
            router,
            folder,
            journal=journal,
            keys=keys,
            bind=bind,
            advertise=advertise,
            weight=weight,
            keep=keep,
        )
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._is_open = True
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rollout-client", daemon=True
        )
        self._thread.start()
        with ExitStack() as undo:
            undo.callback(self._end_loop)
            self._wait(self._client.__aenter__())
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave; the mesh cancels what is open here unless it is kept."""
        if not self._is_ours():
            return
        with self._lock:
            was_open, self._is_open = self._is_open, False
        if was_open:
            asyncio.run_coroutine_threadsafe(self._leave_mesh(), self._loop).result()
            self._end_loop()

    @property
    def reopened(self) -> Mapping[GroupId, Task]:
        """Groups that the journal reopened; see AsyncRolloutClient.reopened."""
        return self._client.reopened

    def meet_router(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the first answer of a router; return whether one answered."""
        return self._wait(self._client.meet_router(timeout_s))

    def run(self, task: Task, **options: Unpack[CallOptions]) -> Finished:
        """Run one rollout of `task`; see `run_group`."""
        return self._wait(self._client.run(task, **options))

    def run_group(self, task: Task, num_samples: int, **options: Unpack[CallOptions]) -> Finished:
        """Run `num_samples` rollouts of `task`; each has its outcome.

        Raises GroupError of the kind that says why there is no result, Overloaded or ClientClosed.
        """
        return self._wait(self._client.run_group(task, num_samples, **options))

    def ask(self, task: Task, num_samples: int, **options: Unpack[CallOptions]) -> GroupId:
        """Ask for a group that `stream` hands out; wait while too many are open.

        Raises Overloaded.
        """
        return self._wait(self._client.ask(task, num_samples, **options))

    def stream(self) -> Iterator[Arrival]:
        """Yield the groups asked for by `ask` as they end, until none is open."""
        arrivals = self._client.stream()
        while arrival := self._wait(_next(arrivals)):
            with ExitStack() as leaving:
                leaving.callback(self._leave, arrivals)
                yield arrival
                leaving.pop_all()
            del arrival  # do not keep it alive while the next is awaited

    def cancel(self, group_id: GroupId, reason: str = "no longer wanted") -> None:
        """End an open group: `stream` hands it out as Dropped. Does nothing if it has ended."""
        self._wait(self._client.cancel(group_id, reason))

    def _leave(self, arrivals: AsyncGenerator[Arrival, None]) -> None:
        """Close a stream that the caller has left; by then the client may be closed."""
        with suppress(ClientClosed):
            self._wait(arrivals.aclose())

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        if not self._is_ours():
            call.close()
            raise ClientClosed(f"this client is that of process {self._pid}: open another")
        with self._lock:
            if not self._is_open:
                call.close()
                raise ClientClosed("this client was closed: ask before that, or open another")
            found = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return found.result()
        finally:
            found.cancel()  # nothing, unless Ctrl-C ended the waiting
            del found  # an error would keep this frame and those of the callers alive

    def _is_ours(self) -> bool:
        """Return False in a forked process: its threads do not exist there."""
        return os.getpid() == self._pid

    async def _leave_mesh(self) -> None:
        """Close, and end every call of other threads."""
        await self._client.__aexit__()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next(arrivals: AsyncGenerator[Arrival, None]) -> Arrival | None:
    return await anext(arrivals, None)
