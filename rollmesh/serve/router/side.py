"""The router's side thread: its HTTP face and the probes of engines, apart from the hot loop.

    GET /status    the state as JSON          GET /metrics   for Prometheus
    GET /healthz   200 while the hot loop turns, else 503

Invariants: nothing here waits for the hot loop or makes it wait: the loop hangs a finished snapshot
on the board, probes answer into a mailbox and ring its bell; every probe asked for is answered. An
address that other machines can reach needs a token, as a Bearer: that of ROLLMESH_ADMIN_TOKEN, or
of the file that ROLLMESH_ADMIN_TOKEN_FILE names. Driven by process.py.
"""

import asyncio
import collections
import hmac
import socket
import threading
from collections.abc import Iterable

import msgspec
import uvloop
from aiohttp import web
from aiohttp.typedefs import Handler

from rollmesh.core.clock import Clock
from rollmesh.core.errors import AddressError
from rollmesh.core.logs import get_logger
from rollmesh.core.metrics import CONTENT_TYPE, Exposition, Figure, Source
from rollmesh.core.secret_file import ADMIN_TOKEN_VARIABLE, admin_token
from rollmesh.engine.fleet import ContinueEngine, EngineProbed, ProbeEngine
from rollmesh.engine.http import HttpClient
from rollmesh.engine.probe import probe_engine
from rollmesh.serve.router.status import Status, figures_of
from rollmesh.wire.sockets import Doorbell

log = get_logger()

STALE_S = 5.0
"""A snapshot older than this says that the hot loop hangs."""


class Board:
    """Where the hot loop leaves what the side thread shows."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._hung: tuple[Status, float] | None = None

    def hang(self, status: Status) -> None:
        """Show `status` from now on."""
        self._hung = (status, self._clock.now_s())

    def status(self) -> Status | None:
        """The newest snapshot."""
        return self._hung[0] if self._hung else None

    def is_fresh(self) -> bool:
        """Whether the hot loop still turns."""
        return self._hung is not None and self._clock.now_s() - self._hung[1] < STALE_S

    def figures(self) -> Iterable[Figure]:
        """A source for the exposition."""
        return figures_of(self._hung[0]) if self._hung else ()


class SideThread:
    """See the module."""

    def __init__(
        self, listening: socket.socket, board: Board, bell: Doorbell, figures: Source | None = None
    ) -> None:
        """Serves on `listening` from `start` on, and `figures` with the board's; AddressError if
        that needs a token."""
        self._token = _token_for(listening)
        self._listening = listening
        self._board = board
        self._bell = bell
        self._exposition = Exposition("router")
        self._exposition.add(board.figures)
        if figures:
            self._exposition.add(figures)
        self._answers: collections.deque[EngineProbed] = collections.deque()
        self._loop = uvloop.new_event_loop()
        self._asks: asyncio.Queue[ProbeEngine | ContinueEngine | None] = asyncio.Queue()
        self._serves = threading.Event()
        self._thread = threading.Thread(target=self._run, name="side", daemon=True)

    def start(self) -> None:
        """Returns when the HTTP face serves."""
        self._thread.start()
        self._serves.wait()

    def probe(self, ask: ProbeEngine | ContinueEngine) -> None:
        """Do it; the answer will be in `take_answers`, and the bell is rung."""
        self._loop.call_soon_threadsafe(self._asks.put_nowait, ask)

    def take_answers(self) -> list[EngineProbed]:
        """The answers since the last call."""
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def close(self) -> None:
        """Returns when the thread has ended."""
        self._loop.call_soon_threadsafe(self._asks.put_nowait, None)
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
        app.router.add_get("/healthz", self._get_healthz)
        app.router.add_get("/metrics", self._get_metrics)
        face = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await face.setup()
        await web.SockSite(face, self._listening).start()
        self._serves.set()
        try:
            async with HttpClient() as http, asyncio.TaskGroup() as probes:
                while ask := await self._asks.get():
                    probes.create_task(self._answer(ask, http))
        finally:
            await face.cleanup()

    async def _answer(self, ask: ProbeEngine | ContinueEngine, http: HttpClient) -> None:
        try:
            answer = await probe_engine(ask, http)
        except Exception as error:  # door: an engine's answer must not end the thread
            log.exception("probe.failed", engine=ask.url)
            answer = EngineProbed(url=ask.url, serial=ask.serial, ok=False, detail=repr(error))
        self._answers.append(answer)
        self._bell.ring()

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
        body = msgspec.json.encode(self._board.status())
        return web.Response(body=body, content_type="application/json")

    async def _get_healthz(self, _: web.Request) -> web.Response:
        if self._board.is_fresh():
            return web.Response(text="ok\n")
        return web.Response(status=503, text=f"the router has not turned for {STALE_S:g} s\n")

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
            f"router.http_bind = {host}: others can reach it; set {ADMIN_TOKEN_VARIABLE} or "
            "127.0.0.1"
        )
    return token
