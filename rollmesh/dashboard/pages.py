"""The page's routes: its files, the state, the event stream, the trajectories.

Owns no state of its own. Invariants: everything is read-only; whatever a rollout said reaches the
browser as JSON only, under a policy that runs no inline script; requests that name another host
are refused, so that no web page elsewhere can read a run by DNS rebinding. Driven by aiohttp.

    GET /                             the page; its files under /static/
    GET /events                       server-sent events: `state`, then what adds to it
    GET /api/state                    all that the page shows
    GET /api/trajectories?limit=50    the latest, newest first
    GET /api/trajectories/ROLLOUT_ID  one with its messages, samples and a text piece per token
"""

import asyncio
import contextlib
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from rollmesh.core.clock import Clock
from rollmesh.core.loopback import names_loopback
from rollmesh.dashboard.feed import Feed
from rollmesh.dashboard.reader import LISTED_TRAJECTORIES, PageEvent, RunReader
from rollmesh.dashboard.rows import TrajectoryRow

STATIC = Path(__file__).parent / "static"
KEEPALIVE_S = 15.0
MAX_LISTED = 500
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
MAX_DIGITS = 9
"""More digits than any limit has; int() refuses 5,000 of them."""


class ReadableTrajectory(msgspec.Struct):
    """What the viewer is sent."""

    trajectory: TrajectoryRow
    pieces: list[list[str]]
    """Per sample, one piece of text per token."""


class Pages:
    """Request handlers over one run."""

    def __init__(self, reader: RunReader, clock: Clock) -> None:
        self.feed = Feed(self._state_event)
        self._reader = reader
        self._clock = clock

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[with_headers, only_loopback_names])
        app.router.add_get("/", self.index)
        app.router.add_static("/static", STATIC)
        app.router.add_get("/events", self.events)
        app.router.add_get("/api/state", self.state)
        app.router.add_get("/api/trajectories", self.trajectories)
        app.router.add_get("/api/trajectories/{rollout_id:.+}", self.trajectory)
        return app

    async def follow(self, poll_s: float) -> None:
        """Read the run folder every `poll_s` and tell the browsers, until cancelled."""
        while True:
            self.feed.publish(self._reader.poll(self._clock.unix_s()))
            await asyncio.sleep(poll_s)

    async def index(self, request: web.Request) -> web.StreamResponse:
        """The page itself."""
        return web.FileResponse(STATIC / "index.html")

    async def state(self, request: web.Request) -> web.Response:
        """All that the page shows."""
        return json_reply(self._state_event().data)

    async def trajectories(self, request: web.Request) -> web.Response:
        """Summaries of the latest rollouts."""
        text = request.query.get("limit", str(LISTED_TRAJECTORIES))
        if not text.isdecimal() or len(text) > MAX_DIGITS:
            shown = _printable(text[:MAX_DIGITS])
            return json_reply({"error": f"limit={shown} is not a whole number"}, status=400)
        return json_reply(self._reader.trajectories(min(int(text), MAX_LISTED)))

    async def trajectory(self, request: web.Request) -> web.Response:
        """One rollout, readable; disk and tokenizer work is done off the loop."""
        rollout_id = _printable(request.match_info["rollout_id"])
        readable = await asyncio.to_thread(self._read, rollout_id)
        if readable is None:
            return json_reply({"error": f"no trajectory {rollout_id} in this run"}, status=404)
        return json_reply(readable)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """The event stream of one browser."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **HEADERS})
        with self.feed.subscribe() as frames, contextlib.suppress(ConnectionResetError):
            await response.prepare(request)
            while True:
                try:
                    data = await asyncio.wait_for(frames.get(), KEEPALIVE_S)
                except TimeoutError:
                    data = b": still here\n\n"
                if data is None:
                    break
                await response.write(data)
        return response

    def _read(self, rollout_id: str) -> ReadableTrajectory | None:
        row = self._reader.trajectory(rollout_id)
        if row is None:
            return None
        text = self._reader.token_text()
        return ReadableTrajectory(row, [text.pieces(sample.token_ids) for sample in row.samples])

    def _state_event(self) -> PageEvent:
        return PageEvent("state", self._reader.state(self._clock.unix_s()))


def json_reply(value: object, status: int = 200) -> web.Response:
    """`value` as JSON."""
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json")


@web.middleware
async def only_loopback_names(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a request whose Host is not this machine's loopback."""
    hosts = request.headers.getall("Host", [])
    if not names_loopback(hosts):
        shown = _printable(", ".join(hosts))
        why = f"this page is served to localhost, not to {shown or 'a request without Host'}"
        return json_reply({"error": why}, status=403)
    return await handler(request)


def _printable(text: str) -> str:
    """`text` of a request without bytes that are not UTF-8."""
    return text.encode("utf-8", "replace").decode()


@web.middleware
async def with_headers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Add what keeps scripts, frames and caches in bounds."""
    try:
        response = await handler(request)
    except web.HTTPException as refusal:
        refusal.headers.update(HEADERS)
        raise
    if not response.prepared:
        response.headers.update(HEADERS)
    return response
