"""The HTTP server that agents talk to: finds the dialect of a request and runs its exchange.

Routes are suffixes, so that clients may put any prefix before /v1 or leave /v1 out:

    POST .../chat/completions  .../completions  .../responses  .../messages
                                 an exchange in that dialect
    POST .../messages/count_tokens
    GET  .../models  .../models/{id}
    GET  /healthz  /openapi.json       no key needed

Invariants: loopback unless the listening socket says otherwise; an exchange is in the table while
it runs and gone at any end. Driven by the worker process and the gateway.
"""

import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from urllib.parse import unquote

from aiohttp import web

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import InterceptionConfig
from rollmesh.core.errors import SessionError
from rollmesh.runtime.registry import Runtime
from rollmesh.serve.interception.auth import find_secret
from rollmesh.serve.interception.dialects.chat import ChatDialect
from rollmesh.serve.interception.dialects.completions import CompletionsDialect
from rollmesh.serve.interception.dialects.dialect import Dialect
from rollmesh.serve.interception.dialects.messages import MessagesDialect
from rollmesh.serve.interception.dialects.responses import ResponsesDialect
from rollmesh.serve.interception.exchange import Exchange, ExchangeKit, ExchangeState, refusal
from rollmesh.serve.interception.face import Face
from rollmesh.serve.interception.models import model_list, one_model
from rollmesh.serve.interception.openapi import openapi_document
from rollmesh.serve.interception.view import EdgeView

SHUTDOWN_S = 1.0
COUNT_SUFFIX = "/messages/count_tokens"

DIALECTS: dict[str, Dialect] = {
    "/chat/completions": ChatDialect(),
    "/completions": CompletionsDialect(),
    "/responses": ResponsesDialect(),
    "/messages": MessagesDialect(),
}
"""By the end of the path; a longer end stands before one that ends it."""

Control = Callable[[web.BaseRequest, str], Awaitable[web.StreamResponse | None]]
"""Asked before any route of ours, with the path; None where the request is not for it."""


class Edge:
    """`start` serves until `stop`."""

    def __init__(
        self,
        runtime: Runtime,
        config: InterceptionConfig,
        model_name: str,
        control: Control | None = None,
        drain_s: float = SHUTDOWN_S,
    ) -> None:
        """`drain_s` is how long running exchanges may still take when it stops."""
        self.num_exchanges: Counter[tuple[str, ExchangeState]] = Counter()
        """Ended exchanges by their dialect's route and their last state."""
        self._open: set[Exchange] = set()
        self._control = control
        self._kit = ExchangeKit(
            runtime, SystemClock(), EdgeView(model_name), config.max_body_bytes, config.keepalive_s
        )
        self._face = Face(self._handle, config.max_body_bytes, drain_s)

    @property
    def num_open(self) -> int:
        """Exchanges that have not ended."""
        return len(self._open)

    async def start(self, listening: socket.socket) -> str:
        """Serve on the socket; returns its base address, `http://host:port`."""
        return await self._face.start(listening)

    async def stop(self) -> None:
        """Close the socket and all connections; running exchanges get their time."""
        await self._face.stop()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path.partition("?")[0].rstrip("/")
        if self._control is not None:
            response = await self._control(request, path)
            if response is not None:
                return response
        if request.method == "POST":
            for suffix, dialect in DIALECTS.items():
                if path.endswith(suffix):
                    return await self._exchange(request, suffix, dialect)
            if path.endswith(COUNT_SUFFIX):
                return await self._exchange(request, COUNT_SUFFIX, DIALECTS["/messages"])
        elif request.method == "GET":
            return self._look_up(request, path)
        return self._unknown()

    async def _exchange(
        self, request: web.BaseRequest, route: str, dialect: Dialect
    ) -> web.StreamResponse:
        exchange = Exchange(request, dialect, self._kit)
        self._open.add(exchange)
        try:
            return await (exchange.run_count() if route == COUNT_SUFFIX else exchange.run())
        finally:
            self._open.discard(exchange)
            self.num_exchanges[route, exchange.state] += 1

    def _look_up(self, request: web.BaseRequest, path: str) -> web.Response:
        if path.endswith("/healthz"):
            return web.Response(body=b'{"status":"ok"}', headers=_JSON)
        if path.endswith("/openapi.json"):
            return web.Response(body=openapi_document(), headers=_JSON)
        _, mark, model = path.rpartition("/models")
        if not mark or model[:1] not in ("", "/"):
            return self._unknown()
        try:
            self._kit.runtime.find(find_secret(path, request.headers))
        except SessionError as error:
            return _refuse(error)
        name = self._kit.view.model_name
        body = one_model(_unquoted(model[1:])) if model else model_list(name)
        return web.Response(body=body, headers=_JSON)

    def _unknown(self) -> web.Response:
        known = ", ".join(f"POST /v1{suffix}" for suffix in [*DIALECTS, COUNT_SUFFIX])
        why = f"no such route here; there are {known}, GET /v1/models and GET /healthz"
        return _refuse(SessionError(404, "unknown_route", why))


def _unquoted(name: str) -> str:
    """A name from a path, as text that every encoder takes."""
    return unquote(name).encode("utf-8", "replace").decode()


_JSON = {"Content-Type": "application/json"}


def _refuse(error: SessionError) -> web.Response:
    return refusal(DIALECTS["/chat/completions"].error(error), error)
