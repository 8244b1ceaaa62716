"""HTTP status endpoint of a process with one hot loop, served from a separate thread.

    GET /status    the state as JSON          GET /metrics   for Prometheus
    GET /healthz   200 while the hot loop runs, else 503

- The endpoint never waits for the hot loop nor delays it: the loop stores finished snapshots in a
  SnapshotCell.
- An address that other machines can reach needs a Bearer token, from ROLLMESH_ADMIN_TOKEN or the
  file that ROLLMESH_ADMIN_TOKEN_FILE names.
- Without a token (on loopback), requests must name a loopback host, which prevents DNS rebinding.
"""

import asyncio
import contextlib
import hmac
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import uvloop
from aiohttp import web
from aiohttp.typedefs import Handler

from rollmesh.core.addresses import is_loopback, names_loopback
from rollmesh.core.clock import Clock
from rollmesh.core.errors import AddressError
from rollmesh.core.metrics import CONTENT_TYPE, Exposition, Figure
from rollmesh.core.secret_files import ADMIN_TOKEN_VARIABLE, admin_token

STALE_S = 5.0
"""A snapshot older than this means that the hot loop hangs."""
Snapshot = TypeVar("Snapshot", bound=msgspec.Struct)


class SnapshotCell(Generic[Snapshot]):
    """Holds the newest snapshot of the hot loop."""

    def __init__(
        self, role: str, clock: Clock, figures_of: Callable[[Snapshot], Iterable[Figure]]
    ) -> None:
        self.role = role
        self._clock = clock
        self._figures_of = figures_of
        self._published: tuple[Snapshot, float] | None = None
        self._blocked = ""

    def publish(self, snapshot: Snapshot) -> None:
        """Publish a new snapshot."""
        self._published = (snapshot, self._clock.now_s())

    def set_blocked(self, reason: str) -> None:
        """Report that the loop runs but makes no progress, and why; '' ends that."""
        self._blocked = reason

    def newest(self) -> Snapshot | None:
        """Return the newest snapshot, None before the first."""
        return self._published[0] if self._published else None

    def figures(self) -> Iterable[Figure]:
        """Yield the snapshot's metrics, for an Exposition."""
        return self._figures_of(self._published[0]) if self._published else ()

    def problem(self) -> str:
        """Return why the process is unhealthy, '' if it is healthy."""
        if self._blocked:
            return f"no progress: {self._blocked}"
        if self._published and self._clock.now_s() - self._published[1] < STALE_S:
            return ""
        return f"the {self.role} has not published a snapshot for {STALE_S:g} s"


class StatusApp:
    """The HTTP server in its thread, between `start` and `close`."""

    def __init__(
        self,
        listening: socket.socket,
        cell: SnapshotCell[Any],
        exposition: Exposition,
        *,
        setting: str,
        routes: Sequence[web.RouteDef] = (),
        until: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """Create the server; AddressError if `listening`, configured by `setting`, needs a token.

        `routes` are additional routes. `until` runs beside the server, which stops when it returns;
        by default the server runs until `close`.
        """
        self._token = _token_for(listening, setting)
        self._listening = listening
        self._cell = cell
        self._exposition = exposition
        self._exposition.add(cell.figures)
        self._routes = routes
        self._stop = asyncio.Event()
        self._until = until or self._stop.wait
        self._loop = uvloop.new_event_loop()
        self._serves = threading.Event()
        self._thread = threading.Thread(target=self._run, name="face", daemon=True)

    def start(self) -> None:
        """Start the thread; return when the server accepts connections."""
        self._thread.start()
        self._serves.wait()

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function on the server's event loop."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Stop the server and wait for its thread."""
        with contextlib.suppress(RuntimeError):  # the loop is already closed
            self.call(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        finally:
            self._serves.set()

    async def _serve(self) -> None:
        app = web.Application(middlewares=[self._check])
        app.router.add_get("/status", self._get_status)
        app.router.add_get("/healthz", self._get_healthz)
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_routes(self._routes)
        face = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await face.setup()
        await web.SockSite(face, self._listening).start()
        self._serves.set()
        try:
            await self._until()
        finally:
            await face.cleanup()

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._token:
            if not names_loopback(request.headers.getall("Host", [])):
                reason = "send one Host header that names localhost, 127.0.0.1 or [::1]\n"
                return web.Response(status=403, text=reason)
        elif request.path != "/healthz" and not self._has_token(request):
            return web.Response(
                status=401, text=f"send the token of {ADMIN_TOKEN_VARIABLE} as Bearer\n"
            )
        return await handler(request)

    def _has_token(self, request: web.Request) -> bool:
        """Whether the request carries the token."""
        shown = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        scheme, _, token = shown.partition(b" ")
        is_right = hmac.compare_digest(token.strip(), self._token.encode())
        return is_right and scheme.lower() == b"bearer"

    async def _get_status(self, _: web.Request) -> web.Response:
        body = msgspec.json.encode(self._cell.newest())
        return web.Response(body=body, content_type="application/json")

    async def _get_healthz(self, _: web.Request) -> web.Response:
        problem = self._cell.problem()
        return web.Response(status=503 if problem else 200, text=f"{problem or 'ok'}\n")

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._exposition.render(), headers={"Content-Type": CONTENT_TYPE})


def _token_for(listening: socket.socket, setting: str) -> str:
    """Return the required token, '' on loopback."""
    host = listening.getsockname()[0]
    if is_loopback(host):
        return ""
    token = admin_token()
    if not token:
        raise AddressError(
            f"{setting} = {host}: others can reach it; set {ADMIN_TOKEN_VARIABLE} or 127.0.0.1"
        )
    return token
