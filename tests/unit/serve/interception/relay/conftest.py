"""A relay on a free port in front of scripted providers, with one session and a client."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
import pytest

from rollmesh.core.clock import Clock, SystemClock
from rollmesh.core.config import InterceptionConfig
from rollmesh.core.process import listen
from rollmesh.engine.http import HttpClient
from rollmesh.serve.interception.capture import CaptureOptions
from rollmesh.serve.interception.journal import session_writer
from rollmesh.serve.interception.journal.gateway_journal import GatewayJournal
from rollmesh.serve.interception.pieces import joined
from rollmesh.serve.interception.relay.capture import RelayCapture
from rollmesh.serve.interception.relay.routes import RelayDeps, RelayRoutes
from rollmesh.serve.interception.relay.session import CALL_BYTES
from rollmesh.serve.interception.relay.upstreams import UpstreamPool
from rollmesh.serve.interception.report import SessionRewards
from rollmesh.serve.interception.request import HttpRequest
from rollmesh.serve.interception.server import HttpServer
from rollmesh.testing.upstreams import ScriptedProvider

PROVIDER_KEY = "pk-of-the-provider"


class Relay:
    """A running relay with its session and client."""

    def __init__(self, routes: RelayRoutes, capture: RelayCapture, upstreams: UpstreamPool) -> None:
        self.routes = routes
        self.capture = capture
        self.upstreams = upstreams
        self.opened = capture.open(CaptureOptions())
        self.session: Any = self.opened.captured
        self.client = aiohttp.ClientSession(auto_decompress=False)
        self.base = ""

    def post(
        self, body: object, path: str = "/v1/chat/completions", **headers: str
    ) -> "aiohttp.client._RequestContextManager":
        """A request context; `body` is bytes, or a value that is encoded as JSON."""
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        auth = {"Authorization": f"Bearer {self.opened.api_key}"}
        return self.client.post(self.base + path, data=raw, headers={**auth, **named})

    async def read(self, body: object, path: str = "/v1/chat/completions", **headers: str) -> Any:
        """Return status and bytes of one request."""
        async with self.post(body, path, **headers) as response:
            return response.status, await response.read()

    async def until_received(self, num_bytes: int) -> None:
        """Wait until the running call has `num_bytes` of its answer; there is no event to wait
        for."""
        while self._num_received() < num_bytes:  # noqa: ASYNC110 - see above
            await asyncio.sleep(0)

    def _num_received(self) -> int:
        session = self.session
        return int(session.held()["answers"] - CALL_BYTES * session.num_calls)

    def account(self, **rewards: Any) -> dict[str, Any]:
        """Return the report of the sealed session, decoded from its JSON."""
        self.session.seal("the test is over")
        report = self.session.report().render(SessionRewards(**rewards))
        account: dict[str, Any] = msgspec.json.decode(joined(report))
        return account


MakeRelay = Callable[..., Any]


@pytest.fixture
async def make_relay() -> AsyncIterator[MakeRelay]:
    """Start a relay: `await make_relay(provider, ...)`; a provider may also be a URL."""
    async with AsyncExitStack() as stack:

        async def make(
            *providers: ScriptedProvider | str,
            key: str = PROVIDER_KEY,
            config: InterceptionConfig | None = None,
            archive: GatewayJournal | None = None,
            clock: Clock | None = None,
        ) -> Relay:
            settings = config or InterceptionConfig()
            http = await stack.enter_async_context(HttpClient())
            urls = [each if isinstance(each, str) else each.url for each in providers]
            clock = clock or SystemClock()
            upstreams = UpstreamPool(urls, key, http, clock, cool_down_s=2.0)
            capture = RelayCapture(upstreams, clock, settings, archive)
            routes = RelayRoutes(RelayDeps(capture, upstreams, settings))

            async def handle(request: HttpRequest) -> None:
                await routes.handle(request, request.path.partition("?")[0])

            server = HttpServer(handle, drain_s=0.1)
            relay = Relay(routes, capture, upstreams)
            if archive is not None:
                archive.open(session_writer.opened_entry(relay.opened, b"{}", 0.0))
            relay.base = await server.start(listen("127.0.0.1:0"))
            stack.push_async_callback(server.stop)
            stack.push_async_callback(relay.client.close)
            return relay

        yield make
