"""An HTTP/1.1 server on one socket: what edge, relay and gateway have in common beneath routes.

Owns the connections and the tasks that serve them, one each. Invariants: nothing of a request is
logged, since paths and headers may hold secrets; a handler is cancelled when its client hangs up;
connections that do not get on are closed; `stop` closes the socket and idle connections first, then
lets running handlers end within a bound. Driven by edge.py and by the gateway.
"""

import asyncio
import resource
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable

from rollmesh.core.clock import SystemClock
from rollmesh.core.process import http_address
from rollmesh.serve.interception.body_limits import BodyBudget
from rollmesh.serve.interception.connection import AgentConnection, ConnectionLimits, is_known
from rollmesh.serve.interception.request import HttpRequest

BACKLOG = 1024
SWEEP_S = 1.0

FILES_FRACTION = 0.8
"""Connections may take this part of the files that the process may hold open."""

Handler = Callable[[HttpRequest], Awaitable[None]]
"""Answers its request."""


class HttpServer:
    """`start` serves until `stop`."""

    def __init__(
        self,
        handle: Handler,
        drain_s: float,
        limits: ConnectionLimits | None = None,
        bodies: BodyBudget | None = None,
    ) -> None:
        """`drain_s` is how long `stop` waits for running handlers."""
        self.handle = handle
        self.limits = limits or ConnectionLimits()
        self.bodies = bodies or BodyBudget(sys.maxsize)
        self.unix_s = SystemClock().unix_s
        self._drain_s = drain_s
        self._listener: asyncio.Server | None = None
        self._more: set[asyncio.Server] = set()
        """Listeners in the network namespaces of programs."""
        self._connections: dict[AgentConnection, None] = {}
        """The oldest first."""
        self._max_connections = self.limits.num_connections or _share_of_files()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._emptied = asyncio.Event()
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, listening: socket.socket, tls: ssl.SSLContext | None = None) -> str:
        """Serve on the socket; returns its base address, `http://host:port`, https with `tls`."""
        address = http_address(listening)
        if tls is not None:
            address = address.replace("http://", "https://", 1)
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: AgentConnection(self, loop), sock=listening, backlog=BACKLOG, ssl=tls
        )
        self._sweep(loop)
        return address

    async def serve_also(self, listening: socket.socket) -> Callable[[], None]:
        """Serve on one more socket until the returned function is called, or `stop`."""
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(
            lambda: AgentConnection(self, loop), sock=listening, backlog=BACKLOG
        )
        self._more.add(listener)

        def close() -> None:
            self._more.discard(listener)
            listener.close()

        return close

    async def stop(self) -> None:
        """Close the socket and all connections; running handlers get their bound."""
        if self._listener is None:
            return
        self._is_stopping = True
        for listener in (self._listener, *self._more):
            listener.close()
        for each in list(self._connections):
            each.retire()
        if self._connections:
            self._emptied.clear()
            try:
                async with asyncio.timeout(self._drain_s):
                    await self._emptied.wait()
            except TimeoutError:
                for each in list(self._connections):
                    each.hang_up()
                await self._emptied.wait()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._sweeper:
            self._sweeper.cancel()
        self._listener = None

    @property
    def num_connections(self) -> int:
        """That are open."""
        return len(self._connections)

    # what connections say

    def opened(self, inbound: AgentConnection) -> None:
        """It is there."""
        self._connections[inbound] = None
        if len(self._connections) > self._max_connections:
            # The new one is the last to go: it has not shown a key yet.
            next(each for each in self._connections if not is_known(each)).hang_up()
        if self._is_stopping:
            inbound.hang_up()

    def lost(self, inbound: AgentConnection) -> None:
        """It is gone."""
        self._connections.pop(inbound, None)
        if not self._connections:
            self._emptied.set()

    def employ(self, inbound: AgentConnection) -> asyncio.Task[None]:
        """A task that serves it."""
        task = asyncio.get_running_loop().create_task(inbound.serve(), name="http.inbound")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = loop.time()
        for each in list(self._connections):
            each.look(now_s)
        limits = self.limits
        period_s = min(SWEEP_S, limits.idle_s / 4, limits.head_s / 4, limits.linger_s / 4)
        self._sweeper = loop.call_later(period_s, self._sweep, loop)


def _share_of_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else int(FILES_FRACTION * soft)
