"""The dashboard's process and HTTP server: one page over one run folder.

    GET /                             the page; its files under /static/
    GET /events                       server-sent events: `state`, then what adds to it
    GET /api/state                    all that the page shows
    GET /api/trajectories?limit=50    the latest, newest first
    GET /api/trajectories/ROLLOUT_ID  one with its messages, samples and a text piece per token

- Everything is read-only. It serves loopback only, since the page has no login, and refuses
  requests that name another host (DNS rebinding).
- Rollout text reaches the browser as JSON only, under a policy that runs no inline script.
- A slow browser costs bounded memory: when its queue is full, it is emptied and gets a fresh state.
"""

import argparse
import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from rollmesh.core.addresses import names_loopback
from rollmesh.core.clock import Clock, SystemClock
from rollmesh.core.config import DashboardConfig
from rollmesh.core.errors import AddressError
from rollmesh.core.process import Ready, announce, http_address, listen, stop_event
from rollmesh.dashboard.reader import LISTED_TRAJECTORIES, PageEvent, RunReader
from rollmesh.dashboard.rows import StoredTrajectory

MAX_WAITING = 64

Frames = asyncio.Queue[bytes | None]
"""Queue of server-sent events, ready to write; None ends the stream."""


class EventFeed:
    """The event streams of one page."""

    def __init__(self, state: Callable[[], PageEvent]) -> None:
        """`state` returns the event with which a new or outrun stream starts."""
        self._state = state
        self._listeners: set[Frames] = set()
        self._is_closed = False

    @contextmanager
    def subscribe(self) -> Iterator[Frames]:
        """Yield a queue that starts with the state and then receives what is published."""
        frames: Frames = asyncio.Queue(MAX_WAITING)
        frames.put_nowait(None if self._is_closed else encode_event(self._state()))
        self._listeners.add(frames)
        try:
            yield frames
        finally:
            self._listeners.discard(frames)

    def publish(self, events: list[PageEvent]) -> None:
        """Queue `events`, which happened since the last call, for every stream."""
        data = [encode_event(event) for event in events] if self._listeners else []
        for frames in self._listeners:
            if frames.qsize() + len(data) > MAX_WAITING:
                clear(frames)
                frames.put_nowait(encode_event(self._state()))
            else:
                for each in data:
                    frames.put_nowait(each)

    def close(self) -> None:
        """End every stream."""
        self._is_closed = True
        for frames in self._listeners:
            clear(frames)
            frames.put_nowait(None)


def clear(frames: Frames) -> None:
    """Empty the queue."""
    while not frames.empty():
        frames.get_nowait()


def encode_event(event: PageEvent) -> bytes:
    """Encode a server-sent event (WHATWG HTML, 9.2.5: event stream format); JSON has no raw
    newlines.
    """
    return b"event: %s\ndata: %s\n\n" % (event.name.encode(), msgspec.json.encode(event.data))


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
"""More digits than any limit needs; int() refuses 5,000 of them."""


class ReadableTrajectory(msgspec.Struct):
    """A trajectory as the viewer receives it."""

    trajectory: StoredTrajectory
    pieces: list[list[str]]
    """Per sample, one piece of text per token."""


class DashboardApp:
    """Request handlers over one run."""

    def __init__(self, reader: RunReader, clock: Clock) -> None:
        self.feed = EventFeed(self._state_event)
        self._reader = reader
        self._clock = clock

    def app(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(middlewares=[with_headers, only_loopback_names])
        app.router.add_get("/", self.index)
        app.router.add_static("/static", STATIC)
        app.router.add_get("/events", self.events)
        app.router.add_get("/api/state", self.state)
        app.router.add_get("/api/trajectories", self.trajectories)
        app.router.add_get("/api/trajectories/{rollout_id:.+}", self.trajectory)
        return app

    async def follow(self, poll_s: float) -> None:
        """Read the run folder every `poll_s` and publish the events, until cancelled."""
        while True:
            self.feed.publish(self._reader.poll(self._clock.unix_s()))
            await asyncio.sleep(poll_s)

    async def index(self, request: web.Request) -> web.StreamResponse:
        """Serve the page."""
        return web.FileResponse(STATIC / "index.html")

    async def state(self, request: web.Request) -> web.Response:
        """Serve all that the page shows."""
        return json_reply(self._state_event().data)

    async def trajectories(self, request: web.Request) -> web.Response:
        """Serve summaries of the latest rollouts."""
        text = request.query.get("limit", str(LISTED_TRAJECTORIES))
        if not text.isdecimal() or len(text) > MAX_DIGITS:
            shown = _printable(text[:MAX_DIGITS])
            return json_reply({"error": f"limit={shown} is not a whole number"}, status=400)
        return json_reply(self._reader.trajectories(min(int(text), MAX_LISTED)))

    async def trajectory(self, request: web.Request) -> web.Response:
        """Serve one rollout with its text; disk and tokenizer work runs in a thread."""
        rollout_id = _printable(request.match_info["rollout_id"])
        readable = await asyncio.to_thread(self._read, rollout_id)
        if readable is None:
            return json_reply({"error": f"no trajectory {rollout_id} in this run"}, status=404)
        return json_reply(readable)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Serve the event stream of one browser."""
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
    """Return a response with `value` as JSON."""
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json")


@web.middleware
async def only_loopback_names(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse a request whose Host is not this machine's loopback."""
    hosts = request.headers.getall("Host", [])
    if not names_loopback(hosts):
        shown = _printable(", ".join(hosts))
        why = f"this dashboard serves localhost, not {shown or 'a request without Host'}"
        return json_reply({"error": why}, status=403)
    return await handler(request)


def _printable(text: str) -> str:
    """Replace bytes of a request's text that are not UTF-8."""
    return text.encode("utf-8", "replace").decode()


@web.middleware
async def with_headers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Add headers that restrict scripts, frames and caching."""
    try:
        response = await handler(request)
    except web.HTTPException as refusal:
        refusal.headers.update(HEADERS)
        raise
    if not response.prepared:
        response.headers.update(HEADERS)
    return response


LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class DashboardOptions(argparse.Namespace):
    """The command line."""

    run_folder: Path | None
    """None lists the runs; `run` needs one."""
    host: str
    port: int
    poll_s: float
    listen_fd: int | None
    ready_fd: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments to `parser`."""
    parser.add_argument(
        "run_folder",
        type=Path,
        nargs="?",
        help="folder of a run or evaluation (default: list the runs in runs/)",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="loopback address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8265,
        help="port to listen on; 0 picks a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--poll-s",
        type=float,
        default=DashboardConfig().poll_s,
        metavar="SECONDS",
        help="interval of reading the run's files, in seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--listen-fd", type=int, help="serve on this inherited socket (used by launch)"
    )
    parser.add_argument(
        "--ready-fd", type=int, help="write a report to this descriptor when ready (used by launch)"
    )


def run(options: DashboardOptions, folder: Path, report: Callable[[str], None]) -> None:
    """Serve the page of `folder` until a signal, and `report` its address; AddressError if it
    cannot.
    """
    if options.listen_fd is None and options.host not in LOOPBACK:
        raise AddressError(
            f"{options.host}: the dashboard has no login and serves loopback only; "
            f"keep --host 127.0.0.1 and connect to it through `ssh -L {options.port}:127.0.0.1:"
            f"{options.port}`"
        )
    asyncio.run(serve(options, folder, report))


async def serve(options: DashboardOptions, folder: Path, report: Callable[[str], None]) -> None:
    """Listen, report and follow the folder; return after the first SIGTERM or SIGINT."""
    stop = stop_event(asyncio.get_running_loop())
    clock = SystemClock()
    app = DashboardApp(RunReader(folder), clock)
    runner = web.AppRunner(app.app(), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    listening = listen(f"{options.host}:{options.port}", options.listen_fd)
    await web.SockSite(runner, listening).start()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(app.follow(options.poll_s), name="follow")
        address = http_address(listening)
        announce(options.ready_fd, Ready("dashboard", os.getpid(), address))
        report(f"{address} shows {folder}; press Ctrl-C to stop")
        await stop.wait()
        following.cancel()
    app.feed.close()
    await runner.cleanup()
