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
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from urllib.parse import unquote

import msgspec

from rollmesh.core.config import InterceptionConfig
from rollmesh.core.errors import SessionError
from rollmesh.runtime.registry import Runtime
from rollmesh.serve.interception.auth import find_secret
from rollmesh.serve.interception.bodies import Bodies
from rollmesh.serve.interception.dialects.chat import ChatDialect
from rollmesh.serve.interception.dialects.completions import CompletionsDialect
from rollmesh.serve.interception.dialects.dialect import Dialect
from rollmesh.serve.interception.dialects.messages import MessagesDialect
from rollmesh.serve.interception.dialects.responses import ResponsesDialect
from rollmesh.serve.interception.ending import ExchangeState, refuse
from rollmesh.serve.interception.exchange import Exchange, ExchangeKit
from rollmesh.serve.interception.intercepts import Intercepts
from rollmesh.serve.interception.models import model_list, one_model
from rollmesh.serve.interception.openapi import openapi_document
from rollmesh.serve.interception.request import JSON, Request
from rollmesh.serve.interception.server import HttpServer
from rollmesh.serve.interception.turnstile import Turnstile
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

Control = Callable[[Request, str], Awaitable[bool]]
"""Asked before any route of ours, with the path; whether it has answered the request."""


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
        self.intercepts = Intercepts()
        """Those that have not ended, by their rollouts."""
        runtime.on_sealed.append(self.intercepts.unregister_rollout)
        self.bodies = Bodies(config.max_inflight_bytes)
        self._control = control
        self._kit = ExchangeKit(
            runtime,
            EdgeView(model_name, runtime.prompts.token_bytes),
            config.max_body_bytes,
            config.keepalive_s,
            self.intercepts,
            Turnstile(),
        )
        self._server = HttpServer(self._handle, drain_s, bodies=self.bodies)

    @property
    def num_open(self) -> int:
        """Exchanges that have not ended."""
        return len(self.intercepts)

    @property
    def num_connections(self) -> int:
        """Of agents, that are open."""
        return self._server.num_connections

    async def start(self, listening: socket.socket, tls: ssl.SSLContext | None = None) -> str:
        """Serve on the socket; returns its base address, `http://host:port`, https with `tls`."""
        return await self._server.start(listening, tls)

    async def serve_also(self, listening: socket.socket) -> Callable[[], None]:
        """Serve on one more socket; returns what closes it."""
        return await self._server.serve_also(listening)

    async def stop(self) -> None:
        """Close the socket and all connections; running exchanges get their time."""
        await self._server.stop()

    async def _handle(self, request: Request) -> None:
        path = request.path.partition("?")[0].rstrip("/")
        if self._control is not None and await self._control(request, path):
            return
        if request.method == "POST":
            for suffix, dialect in DIALECTS.items():
                if path.endswith(suffix):
                    await self._exchange(request, suffix, dialect)
                    return
            if path.endswith(COUNT_SUFFIX):
                await self._exchange(request, COUNT_SUFFIX, DIALECTS["/messages"])
                return
        try:
            if request.method != "GET":
                raise _unknown()
            request.answer(200, request.dated(JSON), self._look_up(request, path))
        except SessionError as error:
            refuse(request, DIALECTS["/chat/completions"].error(error), error)

    async def _exchange(self, request: Request, route: str, dialect: Dialect) -> None:
        exchange = Exchange(request, dialect, self._kit)
        try:
            await (exchange.run_count() if route == COUNT_SUFFIX else exchange.run())
        finally:
            self.num_exchanges[route, exchange.state] += 1

    def _look_up(self, request: Request, path: str) -> bytes:
        if path.endswith("/healthz"):
            waiting = self._kit.runtime.deps.sampler.waiting()
            return msgspec.json.encode({"status": "ok"} | ({"waiting": waiting} if waiting else {}))
        if path.endswith("/openapi.json"):
            return openapi_document()
        _, mark, model = path.rpartition("/models")
        if not mark or model[:1] not in ("", "/"):
            raise _unknown()
        self._kit.runtime.find(find_secret(path, request.headers))
        return one_model(_unquoted(model[1:])) if model else model_list(self._kit.view.model_name)


_KNOWN = ", ".join(f"POST /v1{suffix}" for suffix in [*DIALECTS, COUNT_SUFFIX])


def _unknown() -> SessionError:
    why = f"no such route here; there are {_KNOWN}, GET /v1/models and GET /healthz"
    return SessionError(404, "unknown_route", why)


def _unquoted(name: str) -> str:
    """A name from a path, as text that every encoder takes."""
    return unquote(name).encode("utf-8", "replace").decode()
