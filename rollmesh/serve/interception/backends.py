"""Backends of the gateway: exact tokens through the runtime and its engines, or a relay.

    capture   opens and closes sessions          serve(control)   the HTTP server for agents
    engines   for /healthz and /metrics          run()            engine probes, until cancelled

The gateway process uses both kinds through GatewayBackend.
"""

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rollmesh.core.clock import SystemClock
from rollmesh.core.config import Config
from rollmesh.core.metrics import Inventory
from rollmesh.engine.fleet_loop import FleetLoop
from rollmesh.engine.http import HttpClient
from rollmesh.engine.view import FleetView
from rollmesh.runtime.registry import new_runtime
from rollmesh.serve.interception.agent_server import (
    AgentServer,
    ControlHandler,
    count_agent_server,
    without_blobs,
)
from rollmesh.serve.interception.body_limits import BodyBudget, count_bodies
from rollmesh.serve.interception.capture import DurableCapture
from rollmesh.serve.interception.journal.gateway_journal import GatewayJournal
from rollmesh.serve.interception.relay.capture import RelayCapture
from rollmesh.serve.interception.relay.routes import RelayDeps, RelayRoutes
from rollmesh.serve.interception.relay.upstreams import UpstreamPool
from rollmesh.serve.interception.request import HttpRequest
from rollmesh.serve.interception.server import HttpServer
from rollmesh.serve.interception.sessions import SessionRegistry
from rollmesh.serve.interception.token_capture import TokenCapture


class AgentFrontend(Protocol):
    """An HTTP server that the gateway starts and stops."""

    async def start(self, listening: socket.socket, tls: ssl.SSLContext | None = None) -> str: ...
    async def stop(self) -> None: ...


class GatewayBackend(Protocol):
    """Interface of both backends."""

    @property
    def capture(self) -> DurableCapture: ...
    def serve(self, control: ControlHandler) -> AgentFrontend:
        """Create the server, once; `control` is called before any other route."""

    def engines(self) -> list[dict[str, Any]]:
        """Return `url`, `phase` (`ready` or the reason why not) and more, per engine."""

    def waiting(self) -> dict[str, Any] | None:
        """Return the number of calls that wait for an engine, their wait and the cause; None if
        none waits."""

    def exchanges(self) -> Mapping[tuple[str, str], int]:
        """Return the ended exchanges by (route, last state)."""

    def num_open(self) -> int:
        """Return the number of running exchanges."""

    def num_live(self) -> int:
        """Return the number of requests that engines process."""

    def totals(self) -> tuple[int, int]:
        """Return (calls, sampled tokens) since the start."""

    def count_in(self, inventory: Inventory, registry: SessionRegistry) -> None:
        """Add the backend's objects to an inventory; call after `serve`."""

    async def run(self) -> None:
        """Run background work until cancelled."""

    async def close(self) -> None:
        """Close the connections to engines; call after the server has stopped."""


class TokenBackend:
    """Renders prompts and samples exact tokens."""

    def __init__(
        self, config: Config, urls: tuple[str, ...], journal: GatewayJournal | None = None
    ) -> None:
        """Create the backend; ModelError or ConfigError if the model folder is invalid."""
        self._config = config
        self._view = FleetView()
        self._fleet = FleetLoop(
            urls, self._view, config.engine.probe_timeout_s, backend=config.engine.backend
        )
        self._runtime, self._sampler = new_runtime(config, self._view, self._fleet.report)
        self.capture = TokenCapture(self._runtime, config.sampling.policy(), journal)
        self._server: AgentServer | None = None

    def serve(self, control: ControlHandler) -> AgentFrontend:
        model_name = Path(self._config.model.path).resolve().name
        self._server = AgentServer(
            self._runtime,
            self._config.interception,
            model_name,
            control,
            drain_s=self._config.interception.drain_timeout_s,
        )
        return self._server

    def engines(self) -> list[dict[str, Any]]:
        shown = ("url", "phase", "policy_version", "num_running", "num_waiting", "detail")
        rows = [msgspec.structs.asdict(row) for row in self._fleet.rows()]
        return [{name: row[name] for name in shown} for row in rows]

    def waiting(self) -> dict[str, Any] | None:
        return self._sampler.waiting()

    def exchanges(self) -> Mapping[tuple[str, str], int]:
        ended = self._server.num_exchanges if self._server else {}
        return {(route, state.value): number for (route, state), number in ended.items()}

    def num_open(self) -> int:
        return self._server.num_open if self._server else 0

    def num_live(self) -> int:
        return sum(self._view.num_requests(row.url) for row in self._fleet.rows())

    def totals(self) -> tuple[int, int]:
        return self._runtime.num_calls, self._runtime.num_tokens

    def count_in(self, inventory: Inventory, registry: SessionRegistry) -> None:
        assert self._server is not None
        count_agent_server(inventory, self._runtime, self._sampler, self._server)
        count_sessions(inventory, registry, counts_open=False)

    async def run(self) -> None:
        await self._fleet.run()

    async def close(self) -> None:
        await self._sampler.close()


class RelayBackend:
    """Forwards calls to a provider."""

    def __init__(
        self,
        config: Config,
        urls: tuple[str, ...],
        key: str,
        journal: GatewayJournal | None = None,
    ) -> None:
        """Create the backend; `key` is the provider's, '' if it needs none."""
        self._config = config
        self._clock = SystemClock()
        self._client = HttpClient(
            connect_timeout_s=config.engine.connect_timeout_s,
            shortage_wait_s=config.interception.engine_wait_s,
        )
        self._upstreams = UpstreamPool(
            urls, key, self._client, self._clock, config.interception.upstream_cool_down_s
        )
        self.capture = RelayCapture(self._upstreams, self._clock, config.interception, journal)
        self._relay = RelayRoutes(RelayDeps(self.capture, self._upstreams, config.interception))
        self._bodies = BodyBudget(config.interception.max_inflight_bytes)
        self._server: HttpServer | None = None

    def serve(self, control: ControlHandler) -> AgentFrontend:
        relay = self._relay

        async def handle(request: HttpRequest) -> None:
            path = request.path.partition("?")[0].rstrip("/")
            if not await control(request, path):
                await relay.handle(request, path)

        self._server = HttpServer(
            handle, self._config.interception.drain_timeout_s, bodies=self._bodies
        )
        return self._server

    def engines(self) -> list[dict[str, Any]]:
        """Return the endpoints; a relay does not probe, so an endpoint is ready until a call
        fails."""
        last_s = self._clock.now_s() - self._config.interception.upstream_cool_down_s
        return [
            {
                "url": each.url,
                "phase": "ready" if each.failed_s < last_s else "failing",
                "num_running": each.num_running,
                "detail": each.fault,
            }
            for each in self._upstreams.all
        ]

    def waiting(self) -> dict[str, Any] | None:
        """A relayed call is forwarded at once."""
        return None

    def exchanges(self) -> Mapping[tuple[str, str], int]:
        return self._relay.num_exchanges

    def num_open(self) -> int:
        return self._relay.num_open

    def num_live(self) -> int:
        return sum(each.num_running for each in self._upstreams.all)

    def totals(self) -> tuple[int, int]:
        return self.capture.counters.num_calls, 0

    def count_in(self, inventory: Inventory, registry: SessionRegistry) -> None:
        server = self._server
        assert server is not None
        count_relay(inventory, self.capture, self._client)
        count_sessions(inventory, registry, counts_open=True)
        count_bodies(
            inventory, self._bodies, lambda: self._relay.num_open, lambda: server.num_connections
        )

    async def run(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        await self._client.close()


def count_relay(inventory: Inventory, capture: RelayCapture, client: HttpClient) -> None:
    """Add a relay's session keys and provider connections to an inventory."""
    inventory.add(
        None,
        lambda: {"doors": capture.num_doors},
        lambda: {"engine_connections": client.num_connections},
    )


def count_sessions(inventory: Inventory, registry: SessionRegistry, *, counts_open: bool) -> None:
    """Add the registry's reports, and open sessions unless a runtime counts them, to an
    inventory."""

    def held() -> Mapping[str, int]:
        finished = [each.finished for each in registry.entries() if each.finished]
        counts = Counter(accounts=sum([each.report.num_bytes for each in finished]))
        if counts_open:
            none = {"answers": 0, "history": 0}
            open_ones = [each.captured.held() for each in registry.entries() if not each.finished]
            counts.update(without_blobs([none, *open_ones]))
        return counts

    inventory.add(held, lambda: {"sessions": len(registry)})
