"""The HTTP server inside a worker: finds the dialect of a request and runs its exchange.

Routes are suffixes, so that clients may put any prefix before /v1 or leave /v1 out:

    POST .../chat/completions    an exchange in that dialect
    GET  .../models              the one model
    GET  /healthz                no key needed

Invariants: loopback unless the listening socket says otherwise; no access log, since paths may hold
secrets; a handler is cancelled when its client hangs up. Driven by the worker process.
"""

import logging
import socket
from collections import Counter

import orjson
from aiohttp import web
from aiohttp.http import HttpProcessingError

from rollmesh.core.config import InterceptionConfig
from rollmesh.core.errors import SessionError
from rollmesh.core.process import http_address
from rollmesh.runtime.registry import Runtime
from rollmesh.serve.interception.auth import find_secret
from rollmesh.serve.interception.dialects.chat import ChatDialect
from rollmesh.serve.interception.dialects.dialect import Dialect
from rollmesh.serve.interception.exchange import Exchange, ExchangeKit, ExchangeState, refusal

SHUTDOWN_S = 1.0
BACKLOG = 1024

DIALECTS: dict[str, Dialect] = {"/chat/completions": ChatDialect()}
"""By the end of the path."""


class Edge:
    """`start` serves until `stop`."""

    def __init__(self, runtime: Runtime, config: InterceptionConfig, model_name: str) -> None:
        self.num_exchanges: Counter[ExchangeState] = Counter()
        """Ended exchanges by their last state."""
        self._kit = ExchangeKit(runtime, model_name, config.max_body_bytes, config.keepalive_s)
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
        self._runner = web.ServerRunner(server, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        await web.SockSite(self._runner, listening, backlog=BACKLOG).start()
        return http_address(listening)

    async def stop(self) -> None:
        """Close the socket and all connections; running exchanges get a second."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path.partition("?")[0].rstrip("/")
        if request.method == "POST":
            for suffix, dialect in DIALECTS.items():
                if path.endswith(suffix):
                    return await self._exchange(request, dialect)
        elif request.method == "GET":
            if path.endswith("/healthz"):
                return web.Response(body=b'{"status":"ok"}', headers=_JSON)
            if path.endswith("/models"):
                return self._models(request, path)
        known = ", ".join(f"POST /v1{suffix}" for suffix in DIALECTS)
        why = f"no such route here; there are {known}, GET /v1/models and GET /healthz"
        return _refuse(SessionError(404, "unknown_route", why))

    async def _exchange(self, request: web.BaseRequest, dialect: Dialect) -> web.StreamResponse:
        exchange = Exchange(request, dialect, self._kit)
        try:
            return await exchange.run()
        finally:
            self.num_exchanges[exchange.state] += 1

    def _models(self, request: web.BaseRequest, path: str) -> web.Response:
        try:
            self._kit.runtime.find(find_secret(path, request.headers))
        except SessionError as error:
            return _refuse(error)
        model = {
            "id": self._kit.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "rollmesh",
        }
        return web.Response(body=orjson.dumps({"object": "list", "data": [model]}), headers=_JSON)

    def _make_request(self, *parts: object) -> web.BaseRequest:
        message, payload, protocol, writer, task = parts
        return web.BaseRequest(
            message,  # type: ignore[arg-type]
            payload,  # type: ignore[arg-type]
            protocol,  # type: ignore[arg-type]
            writer,  # type: ignore[arg-type]
            task,  # type: ignore[arg-type]
            task.get_loop(),  # type: ignore[attr-defined]
            client_max_size=self._kit.max_body_bytes,
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


_JSON = {"Content-Type": "application/json"}


def _refuse(error: SessionError) -> web.Response:
    return refusal(DIALECTS["/chat/completions"].error(error), error)
