"""Time while all engines sleep is not counted, and a worker's metrics need a token."""

import socket

import pytest

from rollmesh.core.metrics import Exposition
from rollmesh.core.secret_files import ADMIN_TOKEN_VARIABLE
from rollmesh.engine.view import FleetView
from rollmesh.serve.interception.request import HttpRequest
from rollmesh.serve.server.process import ROUTE, FleetPauses, MetricsEndpoint
from rollmesh.testing.clock import FakeClock
from rollmesh.wire.fleet import EnginePhase, EngineRow, FleetChanged
from tests.unit.serve.interception.http_client import serving, status_of


def test_time_is_a_pause_only_while_all_engines_sleep_or_are_updated() -> None:
    view, clock = FleetView(), FakeClock()
    pauses = FleetPauses(view, clock)
    epoch = 0

    def table(*phases: EnginePhase) -> None:
        nonlocal epoch
        epoch += 1
        rows = tuple(EngineRow(f"http://{at}", "i", each, 0) for at, each in enumerate(phases))
        view.update(FleetChanged(epoch, rows), "r")

    clock.advance(10.0)
    assert pauses.paused_s() == 0.0
    table(EnginePhase.READY, EnginePhase.ASLEEP)
    clock.advance(10.0)
    assert pauses.paused_s() == 0.0
    table(EnginePhase.ASLEEP, EnginePhase.ASLEEP)
    clock.advance(10.0)
    assert pauses.paused_s() == 10.0
    table(EnginePhase.UPDATING, EnginePhase.ASLEEP)
    clock.advance(5.0)
    table(EnginePhase.READY, EnginePhase.ASLEEP)
    clock.advance(100.0)
    assert pauses.paused_s() == 15.0
    table(EnginePhase.FENCED, EnginePhase.GONE)
    clock.advance(100.0)
    assert pauses.paused_s() == 15.0


OPEN, ELSEWHERE = "127.0.0.1", "0.0.0.0"
NOT_OURS = 299


async def asked(endpoint: MetricsEndpoint, line: bytes, *headers: bytes) -> bytes:
    async def handle(request: HttpRequest) -> None:
        if not await endpoint.handle(request, request.path):
            request.answer(NOT_OURS, b"", b"")

    head = [b"%b HTTP/1.1" % line, b"Host: localhost", b"Connection: close", *headers, b"", b""]
    async with serving(handle) as place:
        return await place.ask(b"\r\n".join(head))


def metrics_endpoint(host: str) -> MetricsEndpoint:
    """Return the metrics endpoint of a server at `host`, without a listener."""
    with socket.socket() as bound:
        bound.bind((host, 0))
        return MetricsEndpoint(Exposition("worker"), bound)


@pytest.mark.parametrize(
    ("host", "token", "given", "status"),
    [
        (OPEN, "", b"", 200),
        (OPEN, "sesame", b"", 401),
        (OPEN, "sesame", b"Bearer sesame", 200),
        (OPEN, "sesame", b"Bearer open", 401),
        (OPEN, "sesame", b"Basic sesame", 401),
        (ELSEWHERE, "", b"", 401),
        (ELSEWHERE, "", b"Bearer ", 401),
        (ELSEWHERE, "sesame", b"bearer sesame", 200),
    ],
)
async def test_metrics_need_the_token_or_without_one_a_loopback_address(
    monkeypatch: pytest.MonkeyPatch, host: str, token: str, given: bytes, status: int
) -> None:
    monkeypatch.setenv(ADMIN_TOKEN_VARIABLE, token)
    answer = await asked(
        metrics_endpoint(host), b"GET %b" % ROUTE.encode(), b"Authorization: %b" % given
    )
    assert status_of(answer) == status
    assert (b"rollmesh_" in answer) == (status == 200)


@pytest.mark.parametrize("line", [b"POST /metrics", b"GET /", b"GET /v1/metrics"])
async def test_other_paths_and_methods_are_not_handled(
    monkeypatch: pytest.MonkeyPatch, line: bytes
) -> None:
    monkeypatch.setenv(ADMIN_TOKEN_VARIABLE, "")
    assert status_of(await asked(metrics_endpoint(OPEN), line)) == NOT_OURS
