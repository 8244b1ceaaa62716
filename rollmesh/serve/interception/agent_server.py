"""HTTP server for agents: chooses the dialect of a request and runs its exchange.

Routes are suffixes, so clients may put any prefix before /v1 or omit /v1:

    POST .../chat/completions  .../completions  .../responses  .../messages
                                 an exchange in that dialect
    POST .../messages/count_tokens
    GET  .../models  .../models/{id}     one shape for OpenAI's and Anthropic's clients
    GET  /healthz  /openapi.json         no key needed

A session has one model, the policy, under any name that the agent uses.
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
from rollmesh.core.metrics import Inventory
from rollmesh.runtime import blobs
from rollmesh.runtime.generation.sampler import Sampler
from rollmesh.runtime.images import images
from rollmesh.runtime.registry import Runtime
from rollmesh.serve.interception.body_limits import BodyBudget, DecodeGate, count_bodies
from rollmesh.serve.interception.dialects.dialect import Dialect, ViewContext
from rollmesh.serve.interception.dialects.registry import COUNT_DIALECTS, DEFAULT_DIALECT, DIALECTS
from rollmesh.serve.interception.exchange import (
    Exchange,
    ExchangeDeps,
    ExchangeState,
    InflightRequests,
    refuse,
)
from rollmesh.serve.interception.openapi import openapi_document
from rollmesh.serve.interception.request import JSON, HttpRequest, find_secret
from rollmesh.serve.interception.server import HttpServer

SHUTDOWN_S = 1.0

ControlHandler = Callable[[HttpRequest, str], Awaitable[bool]]
"""Called with the path of a request that is no exchange; returns whether it answered it."""


class AgentServer:
    """The server between `start` and `stop`."""

    def __init__(
        self,
        runtime: Runtime,
        config: InterceptionConfig,
        model_name: str,
        control: ControlHandler | None = None,
        drain_s: float = SHUTDOWN_S,
    ) -> None:
        """Create the server; `drain_s` is the time that running exchanges get in `stop`."""
        self.num_exchanges: Counter[tuple[str, ExchangeState]] = Counter()
        """Ended exchanges by route and last state."""
        self.inflight = InflightRequests()
        """Running exchanges."""
        runtime.on_sealed.append(self.inflight.unregister_rollout)
        self.bodies = BodyBudget(config.max_inflight_bytes)
        self._control = control
        self._deps = ExchangeDeps(
            runtime,
            ViewContext(model_name, runtime.prompts.token_bytes),
            config.max_body_bytes,
            config.keepalive_s,
            self.inflight,
            DecodeGate(),
        )
        self._server = HttpServer(self._handle, drain_s, bodies=self.bodies)

    @property
    def num_open(self) -> int:
        """Number of running exchanges."""
        return len(self.inflight)

    @property
    def num_connections(self) -> int:
        """Number of open connections of agents."""
        return self._server.num_connections

    async def start(self, listening: socket.socket, tls: ssl.SSLContext | None = None) -> str:
        """Serve on the socket; return the base address, `http://host:port` or https with `tls`."""
        return await self._server.start(listening, tls)

    async def serve_also(self, listening: socket.socket) -> Callable[[], None]:
        """Serve on one more socket; return a function that closes it."""
        return await self._server.serve_also(listening)

    async def stop(self) -> None:
        """Close the socket and all connections; running exchanges get `drain_s`."""
        await self._server.stop()

    async def _handle(self, request: HttpRequest) -> None:
        path = request.path.partition("?")[0].rstrip("/")
        if request.method == "POST":
            for suffix, dialect in (*DIALECTS.items(), *COUNT_DIALECTS.items()):
                if path.endswith(suffix):
                    await self._exchange(request, suffix, dialect)
                    return
        if self._control is not None and await self._control(request, path):
            return
        try:
            if request.method != "GET":
                raise _unknown()
            request.answer(200, request.header_lines(JSON), self._look_up(request, path))
        except SessionError as error:
            refuse(request, DEFAULT_DIALECT.error(error), error)

    async def _exchange(self, request: HttpRequest, route: str, dialect: Dialect) -> None:
        exchange = Exchange(request, dialect, self._deps)
        try:
            await (exchange.run_count() if route in COUNT_DIALECTS else exchange.run())
        finally:
            self.num_exchanges[route, exchange.state] += 1

    def _look_up(self, request: HttpRequest, path: str) -> bytes:
        if path.endswith("/healthz"):
            waiting = self._deps.runtime.deps.sampler.waiting()
            return msgspec.json.encode({"status": "ok"} | ({"waiting": waiting} if waiting else {}))
        if path.endswith("/openapi.json"):
            return openapi_document()
        _, mark, model = path.rpartition("/models")
        if not mark or model[:1] not in ("", "/"):
            raise _unknown()
        self._deps.runtime.sessions.find(find_secret(path, request.headers))
        return one_model(_unquoted(model[1:])) if model else model_list(self._deps.view.model_name)


def _unknown() -> SessionError:
    known = ", ".join(f"POST /v1{suffix}" for suffix in [*DIALECTS, *COUNT_DIALECTS])
    why = f"unknown route; routes: {known}, GET /v1/models and GET /healthz"
    return SessionError(404, "unknown_route", why)


def _unquoted(name: str) -> str:
    """Unquote a name from a path; invalid UTF-8 is replaced."""
    return unquote(name).encode("utf-8", "replace").decode()


def count_blobs(inventory: Inventory) -> None:
    """Add the process's blobs and images to an inventory."""
    inventory.add(
        lambda: {"blobs": blobs.held_bytes()},
        lambda: {"blobs": blobs.num_blobs(), "images": len(images)},
    )


def count_agent_server(
    inventory: Inventory, runtime: Runtime, sampler: Sampler, server: AgentServer
) -> None:
    """Add an agent server, its sessions and its engine requests to an inventory."""
    none = {"graph": 0, "history": 0}
    inventory.add(
        lambda: without_blobs([none, runtime.held()]), runtime.entries, runtime.cache_entries
    )
    inventory.add(None, sampler.entries, sampler.cache_entries)
    count_bodies(inventory, server.bodies, lambda: server.num_open, lambda: server.num_connections)


def without_blobs(held: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Sum counts, without blobs, which are counted once per process."""
    counts: Counter[str] = Counter()
    for each in held:
        counts.update(each)
    del counts["blobs"]
    return counts


def model_list(name: str) -> bytes:
    """Return the list of the one model."""
    page = {"has_more": False, "first_id": name, "last_id": name}
    return orjson.dumps({"object": "list", "data": [_model(name)], **page})


def one_model(name: str) -> bytes:
    """Return the model under the requested name."""
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
