"""HTTP/1.1 server on one or more sockets, used by the agent server and the gateway's relay.

- Nothing of a request is logged, because paths and headers may hold secrets.
- A handler is cancelled when its client disconnects; connections without progress are closed.
- `stop` closes sockets and idle connections first, then waits for running handlers for at most
  `drain_s`.
"""

import asyncio
import resource
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable

from rollmesh.core.clock import SystemClock
from rollmesh.core.process import local_http_address
from rollmesh.serve.interception.body_limits import BodyBudget
from rollmesh.serve.interception.connection import (
    AgentConnection,
    ConnectionLimits,
    is_authenticated,
)
from rollmesh.serve.interception.request import HttpRequest

BACKLOG = 1024
SWEEP_S = 1.0

FILES_FRACTION = 0.8
"""Part of the process's file limit that connections may use."""

Handler = Callable[[HttpRequest], Awaitable[None]]
"""Answers a request."""


class HttpServer:
    """The server between `start` and `stop`."""

    def __init__(
        self,
        handle: Handler,
        drain_s: float,
        limits: ConnectionLimits | None = None,
        bodies: BodyBudget | None = None,
    ) -> None:
        """Create the server; `drain_s` is the time that running handlers get in `stop`."""
        self.handle = handle
        self.limits = limits or ConnectionLimits()
        self.bodies = bodies or BodyBudget(sys.maxsize)
        self.unix_s = SystemClock().unix_s
        self._drain_s = drain_s
        self._listener: asyncio.Server | None = None
        self._more: set[asyncio.Server] = set()
        """Additional listeners, in network namespaces of agent programs."""
        self._connections: dict[AgentConnection, None] = {}
        """Open connections, the oldest first."""
        self._max_connections = self.limits.num_connections or _share_of_files()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._emptied = asyncio.Event()
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, listening: socket.socket, tls: ssl.SSLContext | None = None) -> str:
        """Serve on the socket; return the base address for this machine, `http://host:port` or
        https with `tls`.
        """
        address = local_http_address(listening)
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
        """Close the sockets and all connections; running handlers get `drain_s`."""
        if self._listener is None:
            return
        self._is_stopping = True
        for listener in (self._listener, *self._more):
            listener.close()
        for each in list(self._connections):
            each.close_when_idle()
        if self._connections:
            self._emptied.clear()
            try:
                async with asyncio.timeout(self._drain_s):
                    await self._emptied.wait()
            except TimeoutError:
                for each in list(self._connections):
                    each.abort()
                await self._emptied.wait()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._sweeper:
            self._sweeper.cancel()
        self._listener = None

    @property
    def num_connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    # called by connections

    def connection_opened(self, connection: AgentConnection) -> None:
        """Add a new connection, and close one if there are too many."""
        self._connections[connection] = None
        if len(self._connections) > self._max_connections:
            # The new connection is the last candidate: it could not show a key yet.
            next(each for each in self._connections if not is_authenticated(each)).abort()
        if self._is_stopping:
            connection.abort()

    def connection_closed(self, connection: AgentConnection) -> None:
        """Remove a closed connection."""
        self._connections.pop(connection, None)
        if not self._connections:
            self._emptied.set()

    def spawn(self, connection: AgentConnection) -> asyncio.Task[None]:
        """Start a task that serves the connection."""
        task = asyncio.get_running_loop().create_task(connection.serve(), name="http.inbound")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = loop.time()
        for each in list(self._connections):
            each.check_timeouts(now_s)
        limits = self.limits
        period_s = min(SWEEP_S, limits.idle_s / 4, limits.head_s / 4, limits.linger_s / 4)
        self._sweeper = loop.call_later(period_s, self._sweep, loop)


def _share_of_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else int(FILES_FRACTION * soft)
