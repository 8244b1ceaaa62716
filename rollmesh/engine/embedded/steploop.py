"""The thread that makes the engine's steps, and its bridge to the HTTP side's event loop.

Owns the engine: everything that touches it runs on this thread, handed over as orders through one
queue. Invariant: progress goes back in batches, one wake-up of the event loop per step whatever its
number of tokens. Started and ended by the server; orders come from the routes.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from rollmesh.core.logs import get_logger
from rollmesh.engine.embedded.engine import Engine
from rollmesh.engine.embedded.request import Progress, Request

Result = TypeVar("Result")
Order = Callable[[Engine], object]

log = get_logger()


class Reader:
    """What one HTTP exchange has been told of its request; event loop side."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.latest: Progress | None = None
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> Progress:
        """The newest progress, once there is one that was not yet returned."""
        if self.latest is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        assert self.latest is not None, "woken without progress"
        progress, self.latest = self.latest, None
        return progress

    def put(self, progress: Progress) -> None:
        """Newer progress replaces older; it tells all that the older did."""
        self.latest = progress
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StepLoop:
    """Runs an engine in a thread of its own."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._readers: dict[str, Reader] = {}
        self._thread = threading.Thread(target=self._run, name="step-loop")
        self.failed: asyncio.Future[None] = loop.create_future()
        """Ends with the exception that ended the thread, if one did."""

    def start(self) -> None:
        """Begin to make steps."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step that it is at."""
        self._orders.put(None)
        self._thread.join()

    def knows(self, rid: str) -> bool:
        """Whether a request of that id is under way."""
        return rid in self._readers

    def submit(self, request: Request) -> Reader:
        """Queue `request`; its progress comes to the returned reader."""
        reader = self._readers[request.rid] = Reader(request)
        self._orders.put(lambda engine: engine.submit(request))
        return reader

    def leave(self, reader: Reader) -> None:
        """The reader has gone: abort its request, unless it has ended."""
        rid = reader.request.rid
        if self._readers.get(rid) is reader:  # the id may be another request's by now
            self.abort(rid)

    def abort(self, rid: str | None) -> None:
        """Order an abort of one request, or of all."""
        self._orders.put(lambda engine: engine.abort(rid))

    async def ask(self, order: Callable[[Engine], Result]) -> Result:
        """Run `order` between two steps and return its result."""
        answer: asyncio.Future[Result] = self._loop.create_future()

        def obey(engine: Engine) -> None:
            result = order(engine)
            self._loop.call_soon_threadsafe(settle, answer, result)

        self._orders.put(obey)
        return await answer

    def _run(self) -> None:
        try:
            while self._obey():
                progress = self._engine.step()
                if progress:
                    self._loop.call_soon_threadsafe(self._deliver, progress)
        except Exception as error:  # door: the step thread; its fault ends the process
            log.error("step_loop.failed", exc_info=error)
            self._loop.call_soon_threadsafe(self._fail, error)

    def _obey(self) -> bool:
        """Carry out all orders, waiting for one if there is nothing to compute; False to end."""
        orders = self._orders
        while not orders.empty() or not self._engine.has_work:
            order = orders.get()
            if order is None:
                return False
            order(self._engine)
            if orders.empty():
                break  # an order may have left progress to tell
        return True

    def _deliver(self, batch: list[Progress]) -> None:
        for progress in batch:
            rid = progress.request.rid
            reader = self._readers.get(rid)
            if reader is not None:
                reader.put(progress)
            if progress.finish is not None:
                self._readers.pop(rid, None)

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)


def settle(answer: asyncio.Future[Result], result: Result) -> None:
    """Set the result of a future whose reader may have left."""
    if not answer.done():
        answer.set_result(result)
