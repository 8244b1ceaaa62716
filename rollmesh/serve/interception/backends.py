"""What stands behind the gateway's face: the runtime and its engines, or the relay.

    capture   opens and closes sessions          serve(control)   the face that agents talk to
    engines   what health and figures show       run()            probes, until cancelled

Invariant: both kinds are driven alike, so that the process knows only which one it was asked for.
Driven by gateway.py.
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
from rollmesh.core.inventory import Inventory
from rollmesh.engine.http import HttpClient
from rollmesh.engine.keeper import FleetKeeper
from rollmesh.engine.view import FleetView
from rollmesh.runtime.registry import new_runtime
from rollmesh.serve.interception.agent_server import (
    AgentServer,
    ControlHandler,
    add_agent_server,
    but_blobs,
)
from rollmesh.serve.interception.body_limits import BodyBudget, add_bodies
from rollmesh.serve.interception.capture import DurableCapture
from rollmesh.serve.interception.journal.gateway_journal import GatewayJournal
from rollmesh.serve.interception.relay.capture import RelayCapture
from rollmesh.serve.interception.relay.edge import RelayDeps, RelayEdge
from rollmesh.serve.interception.relay.upstreams import COOL_DOWN_S, UpstreamPool
from rollmesh.serve.interception.request import HttpRequest
from rollmesh.serve.interception.server import HttpServer
from rollmesh.serve.interception.sessions import SessionRegistry
from rollmesh.serve.interception.token_capture import TokenCapture

DRAIN_S = 30.0
"""How long running calls may still take when the gateway is told to stop."""


class AgentFrontend(Protocol):
    """An edge or a relay, as the process starts and stops it."""

    async def start(self, listening: socket.socket, tls: ssl.SSLContext | None = None) -> str: ...
    async def stop(self) -> None: ...


class GatewayBackend(Protocol):
    """See the module."""

    @property
    def capture(self) -> DurableCapture: ...
    def serve(self, control: ControlHandler) -> AgentFrontend:
        """What to start; `control` is asked before any agent's route. Called once."""

    def engines(self) -> list[dict[str, Any]]:
        """`url`, `phase` (`ready` or why not) and more of each."""

    def waiting(self) -> dict[str, Any] | None:
        """How many calls wait for an engine, for how long and why; None where none does."""

    def exchanges(self) -> Mapping[tuple[str, str], int]:
        """Ended ones by (route, last state)."""

    def num_open(self) -> int:
        """Exchanges that run."""

    def num_live(self) -> int:
        """Calls or legs that engines work on."""

    def totals(self) -> tuple[int, int]:
        """(calls, sampled tokens) since the start."""

    def join(self, inventory: Inventory, book: SessionRegistry) -> None:
        """Count there what is held here; after `serve`."""

    async def run(self) -> None:
        """Whatever goes on beside the calls, until cancelled."""

    async def close(self) -> None:
        """Hang up on the engines; after the face has stopped."""


class TokenBackend:
    """Prompts are rendered here and sampled as exact tokens."""

    def __init__(
        self, config: Config, urls: tuple[str, ...], archive: GatewayJournal | None = None
    ) -> None:
        """ModelError or ConfigError where the model's folder is none."""
        self._config = config
        self._view = FleetView()
        self._keeper = FleetKeeper(urls, self._view)
        self._runtime, self._sampler = new_runtime(config, self._view, self._keeper.report)
        self.capture = TokenCapture(self._runtime, config.sampling.policy(), archive)
        self._edge: AgentServer | None = None

    def serve(self, control: ControlHandler) -> AgentFrontend:
        model_name = Path(self._config.model.path).resolve().name
        self._edge = AgentServer(
            self._runtime, self._config.interception, model_name, control, drain_s=DRAIN_S
        )
        return self._edge

    def engines(self) -> list[dict[str, Any]]:
        shown = ("url", "phase", "policy_version", "num_running", "num_waiting", "detail")
        rows = [msgspec.structs.asdict(row) for row in self._keeper.rows()]
        return [{name: row[name] for name in shown} for row in rows]

    def waiting(self) -> dict[str, Any] | None:
        return self._sampler.waiting()

    def exchanges(self) -> Mapping[tuple[str, str], int]:
        ended = self._edge.num_exchanges if self._edge else {}
        return {(route, state.value): number for (route, state), number in ended.items()}

    def num_open(self) -> int:
        return self._edge.num_open if self._edge else 0

    def num_live(self) -> int:
        return sum(self._view.num_legs(row.url) for row in self._keeper.rows())

    def totals(self) -> tuple[int, int]:
        return self._runtime.num_calls, self._runtime.num_tokens

    def join(self, inventory: Inventory, book: SessionRegistry) -> None:
        assert self._edge is not None
        add_agent_server(inventory, self._runtime, self._sampler, self._edge)
        add_sessions(inventory, book, counts_open=False)

    async def run(self) -> None:
        await self._keeper.run()

    async def close(self) -> None:
        await self._sampler.close()


class RelayBackend:
    """Calls are forwarded as they are."""

    def __init__(
        self,
        config: Config,
        urls: tuple[str, ...],
        key: str,
        archive: GatewayJournal | None = None,
    ) -> None:
        """`key` is the provider's, '' where it wants none."""
        self._config = config
        self._clock = SystemClock()
        self._client = HttpClient(shortage_wait_s=config.interception.engine_wait_s)
        self._upstreams = UpstreamPool(urls, key, self._client, self._clock)
        self.capture = RelayCapture(self._upstreams, self._clock, config.interception, archive)
        self._edge = RelayEdge(RelayDeps(self.capture, self._upstreams, config.interception))
        self._bodies = BodyBudget(config.interception.max_inflight_bytes)
        self._server: HttpServer | None = None

    def serve(self, control: ControlHandler) -> AgentFrontend:
        edge = self._edge

        async def handle(request: HttpRequest) -> None:
            path = request.path.partition("?")[0].rstrip("/")
            if not await control(request, path):
                await edge.handle(request, path)

        self._server = HttpServer(handle, DRAIN_S, bodies=self._bodies)
        return self._server

    def engines(self) -> list[dict[str, Any]]:
        """A relay probes nobody: an endpoint is ready until a call fails."""
        last_s = self._clock.now_s() - COOL_DOWN_S
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
        """A relayed call never waits here: it is forwarded at once."""
        return None

    def exchanges(self) -> Mapping[tuple[str, str], int]:
        return self._edge.num_exchanges

    def num_open(self) -> int:
        return self._edge.num_open

    def num_live(self) -> int:
        return sum(each.num_running for each in self._upstreams.all)

    def totals(self) -> tuple[int, int]:
        return self.capture.counters.num_calls, 0

    def join(self, inventory: Inventory, book: SessionRegistry) -> None:
        server = self._server
        assert server is not None
        add_relay(inventory, self.capture, self._client)
        add_sessions(inventory, book, counts_open=True)
        add_bodies(
            inventory, self._bodies, lambda: self._edge.num_open, lambda: server.num_connections
        )

    async def run(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        await self._client.close()


def add_relay(inventory: Inventory, capture: RelayCapture, client: HttpClient) -> None:
    """A relay's doors, and its connections to providers."""
    inventory.add(
        None,
        lambda: {"doors": capture.num_doors},
        lambda: {"engine_connections": client.num_connections},
    )


def add_sessions(inventory: Inventory, book: SessionRegistry, *, counts_open: bool) -> None:
    """A gateway's book: its accounts, and its open sessions, unless a runtime counts them."""

    def held() -> Mapping[str, int]:
        finished = [each.finished for each in book.entries() if each.finished]
        counts = Counter(accounts=sum([each.account.num_bytes for each in finished]))
        if counts_open:
            none = {"answers": 0, "history": 0}
            open_ones = [each.captured.held() for each in book.entries() if not each.finished]
            counts.update(but_blobs([none, *open_ones]))
        return counts

    inventory.add(held, lambda: {"sessions": len(book)})
