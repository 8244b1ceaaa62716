"""TODO.

The model list, in one shape that OpenAI's and Anthropic's clients both read.

A session has one model, the policy, under whatever name its agent asks for it. Shapes: OpenAI's
`GET /models` and Anthropic's, whose keys do not clash. Driven by edge.py.

The HTTP server that agents talk to: finds the dialect of a request and runs its exchange.

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
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

import msgspec
import orjson

from rollmesh.core.config import InterceptionConfig
from rollmesh.core.errors import SessionError
from rollmesh.core.inventory import Inventory
from rollmesh.runtime import blobs
from rollmesh.runtime.images import images
from rollmesh.runtime.registry import Runtime
from rollmesh.runtime.sampler import Sampler
from rollmesh.serve.interception.body_limits import BodyBudget, DecodeGate, add_bodies
from rollmesh.serve.interception.dialects.dialect import Dialect
from rollmesh.serve.interception.dialects.registry import COUNT_DIALECTS, DEFAULT_DIALECT, DIALECTS
from rollmesh.serve.interception.exchange import (
    Exchange,
    ExchangeDeps,
    ExchangeState,
    InflightRequests,
    refuse,
)
from rollmesh.serve.interception.openapi import openapi_document
from rollmesh.serve.interception.reply_view import ViewContext
from rollmesh.serve.interception.request import JSON, HttpRequest, find_secret
from rollmesh.serve.interception.server import HttpServer

SHUTDOWN_S = 1.0

ControlHandler = Callable[[HttpRequest, str], Awaitable[bool]]
"""Asked before any route of ours, with the path; whether it has answered the request."""


class AgentServer:
    """`start` serves until `stop`."""

    def __init__(
        self,
        runtime: Runtime,
        config: InterceptionConfig,
        model_name: str,
        control: ControlHandler | None = None,
        drain_s: float = SHUTDOWN_S,
    ) -> None:
        """`drain_s` is how long running exchanges may still take when it stops."""
        self.num_exchanges: Counter[tuple[str, ExchangeState]] = Counter()
        """Ended exchanges by their dialect's route and their last state."""
        self.intercepts = InflightRequests()
        """Those that have not ended, by their rollouts."""
        runtime.on_sealed.append(self.intercepts.unregister_rollout)
        self.bodies = BodyBudget(config.max_inflight_bytes)
        self._control = control
        self._kit = ExchangeDeps(
            runtime,
            ViewContext(model_name, runtime.prompts.token_bytes),
            config.max_body_bytes,
            config.keepalive_s,
            self.intercepts,
            DecodeGate(),
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

    async def _handle(self, request: HttpRequest) -> None:
        path = request.path.partition("?")[0].rstrip("/")
        if self._control is not None and await self._control(request, path):
            return
        if request.method == "POST":
            for suffix, dialect in DIALECTS.items():
                if path.endswith(suffix):
                    await self._exchange(request, suffix, dialect)
                    return
            for suffix, dialect in COUNT_DIALECTS.items():
                if path.endswith(suffix):
                    await self._exchange(request, suffix, dialect)
                    return
        try:
            if request.method != "GET":
                raise _unknown()
            request.answer(200, request.dated(JSON), self._look_up(request, path))
        except SessionError as error:
            refuse(request, DEFAULT_DIALECT.error(error), error)

    async def _exchange(self, request: HttpRequest, route: str, dialect: Dialect) -> None:
        exchange = Exchange(request, dialect, self._kit)
        try:
            await (exchange.run_count() if route in COUNT_DIALECTS else exchange.run())
        finally:
            self.num_exchanges[route, exchange.state] += 1

    def _look_up(self, request: HttpRequest, path: str) -> bytes:
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


def _unknown() -> SessionError:
    known = ", ".join(f"POST /v1{suffix}" for suffix in [*DIALECTS, *COUNT_DIALECTS])
    why = f"no such route here; there are {known}, GET /v1/models and GET /healthz"
    return SessionError(404, "unknown_route", why)


def _unquoted(name: str) -> str:
    """A name from a path, as text that every encoder takes."""
    return unquote(name).encode("utf-8", "replace").decode()


def add_blobs(inventory: Inventory) -> None:
    """The process's blobs, and the images that are some of them."""
    inventory.add(
        lambda: {"blobs": blobs.held_bytes()},
        lambda: {"blobs": blobs.num_blobs(), "images": len(images)},
    )


def add_agent_server(
    inventory: Inventory, runtime: Runtime, sampler: Sampler, edge: AgentServer
) -> None:
    """An edge that samples, its sessions and what goes on at engines."""
    none = {"graph": 0, "history": 0}
    inventory.add(lambda: but_blobs([none, runtime.held()]), runtime.entries, runtime.cache_entries)
    inventory.add(None, sampler.entries, sampler.cache_entries)
    add_bodies(inventory, edge.bodies, lambda: edge.num_open, lambda: edge.num_connections)


def but_blobs(held: Iterable[Mapping[str, int]]) -> Counter[str]:
    """The sum, without what is counted once for all."""
    counts: Counter[str] = Counter()
    for each in held:
        counts.update(each)
    del counts["blobs"]
    return counts


def model_list(name: str) -> bytes:
    """The one model as a list."""
    page = {"has_more": False, "first_id": name, "last_id": name}
    return orjson.dumps({"object": "list", "data": [_model(name)], **page})


def one_model(name: str) -> bytes:
    """The model under the name that was asked for."""
    return orjson.dumps(_model(name))


def _model(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "rollmesh",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }
