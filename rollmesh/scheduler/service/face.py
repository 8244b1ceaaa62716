"""The service's HTTP face, in a thread of its own, apart from the loop that schedules.

    GET /status               the state as JSON
    GET /explain/PIPELINE     why it waits, and until what, as JSON; as text with ?text
    GET /metrics              for Prometheus
    GET /healthz              200 while the loop turns, else 503

Invariants: nothing here waits for the loop or makes it wait: it hangs a finished snapshot on the
board. An address that other machines can reach needs the admin token, as a Bearer, as the router's
does. Driven by process.py.
"""

import asyncio
import hmac
import socket
import threading

import msgspec
import uvloop
from aiohttp import web
from aiohttp.typedefs import Handler

from rollmesh.core.clock import Clock
from rollmesh.core.errors import AddressError
from rollmesh.core.metrics import CONTENT_TYPE, Exposition
from rollmesh.core.secret_file import ADMIN_TOKEN_VARIABLE, admin_token
from rollmesh.scheduler.service.explain import only
from rollmesh.scheduler.service.status import Status, figures_of

STALE_S = 5.0
"""A snapshot older than this says that the loop hangs."""


class Face:
    """See the module."""

    def __init__(self, listening: socket.socket, clock: Clock) -> None:
        """Serves on `listening` from `start` on; AddressError if that needs a token."""
        self._token = _token_for(listening)
        self._listening = listening
        self._clock = clock
        self._hung: tuple[Status, float] | None = None
        self._stuck = ""
        self._exposition = Exposition("scheduler")
        self._exposition.add(lambda: figures_of(self._hung[0]) if self._hung else ())
        self._loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        self._serves = threading.Event()
        self._thread = threading.Thread(target=self._run, name="face", daemon=True)

    def start(self) -> None:
        """Returns when it serves."""
        self._thread.start()
        self._serves.wait()

    def hang(self, status: Status) -> None:
        """Show `status` from now on."""
        self._hung = (status, self._clock.now_s())

    def stick(self, why: str) -> None:
        """Say by /healthz that nothing is done, and why; '' once it is."""
        self._stuck = why

    def close(self) -> None:
        """Returns when the thread has ended."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        finally:
            self._serves.set()

    async def _serve(self) -> None:
        app = web.Application(middlewares=[self._check_token])
        app.router.add_get("/status", self._get_status)
        app.router.add_get("/explain/{pipeline}", self._get_explain)
        app.router.add_get("/healthz", self._get_healthz)
        app.router.add_get("/metrics", self._get_metrics)
        face = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await face.setup()
        await web.SockSite(face, self._listening).start()
        self._serves.set()
        try:
            await self._stop.wait()
        finally:
            await face.cleanup()

    @web.middleware
    async def _check_token(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        said = request.headers.get("Authorization", "").removeprefix("Bearer ")
        is_open = not self._token or request.path == "/healthz"
        if not is_open and not hmac.compare_digest(said.encode(), self._token.encode()):
            return web.Response(
                status=401, text=f"send the token of {ADMIN_TOKEN_VARIABLE} as Bearer\n"
            )
        return await handler(request)

    async def _get_status(self, _: web.Request) -> web.Response:
        body = msgspec.json.encode(self._hung[0] if self._hung else None)
        return web.Response(body=body, content_type="application/json")

    async def _get_explain(self, request: web.Request) -> web.Response:
        if not self._hung:
            return web.Response(status=503, text="the scheduler has not turned yet\n")
        told = only(self._hung[0].fleet, request.match_info["pipeline"])
        if told.error:
            return web.Response(status=404, text=f"{told.error}\n")
        if "text" in request.query:
            lines = [line for each in told.pipelines for line in each.lines]
            return web.Response(text="\n".join([*lines, ""]))
        return web.Response(body=msgspec.json.encode(told), content_type="application/json")

    async def _get_healthz(self, _: web.Request) -> web.Response:
        if self._stuck:
            return web.Response(status=503, text=f"nothing is done: {self._stuck}\n")
        if self._hung and self._clock.now_s() - self._hung[1] < STALE_S:
            return web.Response(text="ok\n")
        return web.Response(status=503, text=f"the scheduler has not turned for {STALE_S:g} s\n")

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._exposition.render(), headers={"Content-Type": CONTENT_TYPE})


def _token_for(listening: socket.socket) -> str:
    """The token that this face asks for; '' on loopback."""
    host = listening.getsockname()[0]
    if host.startswith("127.") or host == "::1":
        return ""
    token = admin_token()
    if not token:
        raise AddressError(
            f"http_bind = {host}: others can reach it; set {ADMIN_TOKEN_VARIABLE} or 127.0.0.1"
        )
    return token
