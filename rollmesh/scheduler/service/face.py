"""The service's HTTP face: serve/status_app.py's, and why a pipeline waits.

    GET /explain/PIPELINE     why it waits, and until what, as JSON; as text with ?text

Invariant: it says what the verb says of the newest snapshot, in the same words. Driven by
process.py.
"""

import socket

import msgspec
from aiohttp import web

from rollmesh.core.clock import Clock
from rollmesh.core.metrics import Exposition
from rollmesh.scheduler.service.explain import only
from rollmesh.scheduler.service.status import Status, figures_of
from rollmesh.serve.status_app import SnapshotCell, StatusApp


def board_of(clock: Clock) -> SnapshotCell[Status]:
    """Where the service's loop leaves what is shown."""
    return SnapshotCell("scheduler", clock, figures_of)


def face_of(listening: socket.socket, board: SnapshotCell[Status]) -> StatusApp:
    """What shows it; AddressError if others can reach it and there is no token."""

    async def explain(request: web.Request) -> web.Response:
        status = board.newest()
        if status is None:
            return web.Response(status=503, text="the scheduler has not turned yet\n")
        told = only(status.fleet, request.match_info["pipeline"])
        if told.error:
            return web.Response(status=404, text=f"{told.error}\n")
        if "text" in request.query:
            lines = [line for each in told.pipelines for line in each.lines]
            return web.Response(text="\n".join([*lines, ""]))
        return web.Response(body=msgspec.json.encode(told), content_type="application/json")

    routes = [web.get("/explain/{pipeline}", explain)]
    exposition = Exposition("scheduler")
    return StatusApp(listening, board, exposition, setting="http_bind", routes=routes)
