"""An HTTP server on one socket: what edge and relay have in common beneath their routes.

Invariants: no access log, since paths may hold secrets; a handler is cancelled when its client
hangs up; `stop` closes the socket first, then lets running handlers end within a bound. Driven by
edge.py and by the gateway.
"""

import logging
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http import HttpProcessingError

from rollmesh.core.process import http_address

BACKLOG = 1024

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Face:
    """`start` serves until `stop`."""

    def __init__(self, handle: Handler, max_body_bytes: int, drain_s: float) -> None:
        """`drain_s` is how long `stop` waits for running handlers."""
        self._handle = handle
        self._max_body_bytes = max_body_bytes
        self._drain_s = drain_s
        self._runner: web.ServerRunner | None = None

    async def start(self, listening: socket.socket) -> str:
        """Serve on the socket; returns its base address, `http://host:port`."""
        server = web.Server(
            self._handle,
            request_factory=self._make_request,
            handler_cancellation=True,
            access_log=None,
            logger=_new_http_logger(),
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=self._drain_s)
        await self._runner.setup()
        await web.SockSite(self._runner, listening, backlog=BACKLOG).start()
        return http_address(listening)

    async def stop(self) -> None:
        """Close the socket and all connections; running handlers get their bound."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _make_request(self, *parts: object) -> web.BaseRequest:
        message, payload, protocol, writer, task = parts
        return web.BaseRequest(
            message,  # type: ignore[arg-type]
            payload,  # type: ignore[arg-type]
            protocol,  # type: ignore[arg-type]
            writer,  # type: ignore[arg-type]
            task,  # type: ignore[arg-type]
            task.get_loop(),  # type: ignore[attr-defined]
            client_max_size=self._max_body_bytes,
        )


class _ClientFaults(logging.Filter):
    """Drops what clients did wrong: they were answered, and the lines quote their headers."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError | ConnectionError)


def _new_http_logger() -> logging.Logger:
    logger = logging.getLogger("rollmesh.edge")
    if not logger.filters:
        logger.addFilter(_ClientFaults())
    return logger
