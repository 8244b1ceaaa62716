"""The HTTP status endpoint of a process with one hot loop, served from a thread of its own.

    GET /status    the state as JSON          GET /metrics   for Prometheus
    GET /healthz   200 while the hot loop turns, else 503

- Nothing here waits for the hot loop or makes it wait: the loop leaves a finished snapshot on the
  board.
- An address that other machines can reach needs a token, as a Bearer: that of ROLLMESH_ADMIN_TOKEN,
  or of the file that ROLLMESH_ADMIN_TOKEN_FILE names.
- Without a token (on loopback), requests must name a loopback host, so that no web page can read
  the status by a name that it has resolve to 127.0.0.1.
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

from rollmesh.core.clock import Clock
from rollmesh.core.errors import AddressError
from rollmesh.core.loopback import is_loopback, names_loopback
from rollmesh.core.metrics import CONTENT_TYPE, Exposition, Figure
from rollmesh.core.secret_file import ADMIN_TOKEN_VARIABLE, admin_token

STALE_S = 5.0
"""A snapshot older than this says that the hot loop hangs."""
Snapshot = TypeVar("Snapshot", bound=msgspec.Struct)


class SnapshotCell(Generic[Snapshot]):
    """Where the hot loop leaves what is shown of it."""

    def __init__(
        self, role: str, clock: Clock, figures_of: Callable[[Snapshot], Iterable[Figure]]
    ) -> None:
        self.role = role
        self._clock = clock
        self._figures_of = figures_of
        self._hung: tuple[Snapshot, float] | None = None
        self._stuck = ""

    def hang(self, snapshot: Snapshot) -> None:
        """Show it from now on."""
        self._hung = (snapshot, self._clock.now_s())

    def stick(self, why: str) -> None:
        """The loop turns and does nothing, and why; '' once it does again."""
        self._stuck = why

    def newest(self) -> Snapshot | None:
        """What hangs there."""
        return self._hung[0] if self._hung else None

    def figures(self) -> Iterable[Figure]:
        """A source for the exposition."""
        return self._figures_of(self._hung[0]) if self._hung else ()

    def trouble(self) -> str:
        """Why the loop does nothing; '' where it turns."""
        if self._stuck:
            return f"nothing is done: {self._stuck}"
        if self._hung and self._clock.now_s() - self._hung[1] < STALE_S:
            return ""
        return f"the {self.role} has not turned for {STALE_S:g} s"


class StatusApp:
    """See the module."""

    def __init__(
        self,
        listening: socket.socket,
        board: SnapshotCell[Any],
        exposition: Exposition,
        *,
        setting: str,
        routes: Sequence[web.RouteDef] = (),
        until: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """Serves on `listening` from `start` on, which `setting` names; AddressError if that needs
        a token. `routes` are served as well; `until` runs beside them, and its return is the end
        (default: that `close` is called)."""
        self._token = _token_for(listening, setting)
        self._listening = listening
        self._board = board
        self._exposition = exposition
        self._exposition.add(board.figures)
        self._routes = routes
        self._stop = asyncio.Event()
        self._until = until or self._stop.wait
        self._loop = uvloop.new_event_loop()
        self._serves = threading.Event()
        self._thread = threading.Thread(target=self._run, name="face", daemon=True)

    def start(self) -> None:
        """Returns when it serves."""
        self._thread.start()
        self._serves.wait()

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the thread do this."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Returns when the thread has ended."""
        with contextlib.suppress(RuntimeError):  # it has ended, and its loop
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
                why = "send one Host header that names localhost, 127.0.0.1 or [::1]\n"
                return web.Response(status=403, text=why)
        elif request.path != "/healthz" and not self._is_shown_by(request):
            return web.Response(
                status=401, text=f"send the token of {ADMIN_TOKEN_VARIABLE} as Bearer\n"
            )
        return await handler(request)

    def _is_shown_by(self, request: web.Request) -> bool:
        """Whether the request carries the token."""
        shown = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        scheme, _, token = shown.partition(b" ")
        is_right = hmac.compare_digest(token.strip(), self._token.encode())
        return is_right and scheme.lower() == b"bearer"

    async def _get_status(self, _: web.Request) -> web.Response:
        body = msgspec.json.encode(self._board.newest())
        return web.Response(body=body, content_type="application/json")

    async def _get_healthz(self, _: web.Request) -> web.Response:
        trouble = self._board.trouble()
        return web.Response(status=503 if trouble else 200, text=f"{trouble or 'ok'}\n")

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._exposition.render(), headers={"Content-Type": CONTENT_TYPE})


def _token_for(listening: socket.socket, setting: str) -> str:
    """The token that is asked for; '' on loopback."""
    host = listening.getsockname()[0]
    if is_loopback(host):
        return ""
    token = admin_token()
    if not token:
        raise AddressError(
            f"{setting} = {host}: others can reach it; set {ADMIN_TOKEN_VARIABLE} or 127.0.0.1"
        )
    return token
