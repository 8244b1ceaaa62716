"""Attacks on the HTTP endpoints of loopback: other names, other sites' pages, garbled tokens."""

import asyncio
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from rollmesh.core.clock import SystemClock
from rollmesh.core.metrics import Exposition, Figure
from rollmesh.core.process import listen
from rollmesh.core.secret_files import ADMIN_TOKEN_VARIABLE
from rollmesh.dashboard.reader import RunReader
from rollmesh.dashboard.server import DashboardApp
from rollmesh.serve.interception.request import JSON, HttpRequest
from rollmesh.serve.status_app import SnapshotCell, StatusApp
from rollmesh.testing.clock import FakeClock
from rollmesh.testing.run_folder import FakeRun
from tests.unit.serve.interception.http_client import serving, status_of


class Seen(msgspec.Struct):
    """A snapshot of a loop."""

    num_turns: int


def figures_of(seen: Seen) -> Iterable[Figure]:
    return [Figure("turns_total", seen.num_turns, "turns of the loop")]


def served(bound: socket.socket) -> StatusApp:
    """The status endpoint of a router or scheduler."""
    board = SnapshotCell("loop", FakeClock(), figures_of)
    board.publish(Seen(3))
    face = StatusApp(bound, board, Exposition("loop"), setting="http_bind")
    face.start()
    return face


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a status endpoint on loopback, which has no token."""
    with listen("127.0.0.1:0") as bound:
        face = served(bound)
        yield bound.getsockname()[1]
        face.close()


def ask(port: int, *lines: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as wire:
        wire.sendall(b"\r\n".join([*lines, b"Connection: close", b"", b""]))
        return b"".join(iter(lambda: wire.recv(65536), b""))


OTHER_NAMES = [
    [b"Host: evil.example"],
    [b"Host: 127.0.0.1.evil.example:80"],
    [b"Host: localhost.evil.example"],
    [b"Host: 10.0.0.1"],
    [b"Host: \xff"],
    [b"Host: 127.0.0.1", b"Host: evil.example"],
    [],
]


@pytest.mark.parametrize("hosts", OTHER_NAMES)
@pytest.mark.parametrize("path", [b"/status", b"/metrics", b"/healthz"])
def test_a_status_endpoint_without_a_token_answers_to_loopback_names_only(
    port: int, path: bytes, hosts: list[bytes]
) -> None:
    answer = ask(port, b"GET %b HTTP/1.1" % path, *hosts)
    assert status_of(answer) in (400, 403)
    assert b"num_turns" not in answer


@pytest.mark.parametrize("host", [b"localhost:9", b"127.0.0.1", b"[::1]:9", b"LOCALHOST"])
def test_a_status_endpoint_answers_to_loopback_names(port: int, host: bytes) -> None:
    answer = ask(port, b"GET /status HTTP/1.1", b"Host: " + host)
    assert status_of(answer) == 200
    assert b"num_turns" in answer


@pytest.mark.parametrize("shown", [b"Bearer \xff\xfe", b"\xc3", b"t0ken", b"Basic t0ken", b""])
def test_a_token_that_is_wrong_in_any_way_is_401(
    monkeypatch: pytest.MonkeyPatch, shown: bytes
) -> None:
    monkeypatch.setenv(ADMIN_TOKEN_VARIABLE, "t0ken")
    with socket.create_server(("0.0.0.0", 0)) as bound:
        face = served(bound)
        port = bound.getsockname()[1]
        lines = b"GET /status HTTP/1.1", b"Host: mesh.example"
        assert status_of(ask(port, *lines, b"Authorization: " + shown)) == 401
        assert status_of(ask(port, *lines, b"Authorization: Bearer t0ken")) == 200
        face.close()


async def answered(request: HttpRequest) -> None:
    request.answer(200, request.header_lines(JSON), b"{}")


@pytest.mark.parametrize(
    ("protocol", "hosts", "status"),
    [
        (b"1.1", [], 400),
        (b"1.1", [b"Host: a", b"Host: b"], 400),
        (b"1.1", [b"Host: a", b"hOST: a"], 400),
        (b"1.1", [b"Host: a"], 200),
        (b"1.0", [], 200),
        (b"1.0", [b"Host: a", b"Host: b"], 400),
    ],
)
def test_a_request_to_the_gateway_has_exactly_one_host(
    protocol: bytes, hosts: list[bytes], status: int
) -> None:
    async def main() -> None:
        async with serving(answered) as place:
            head = [b"GET / HTTP/" + protocol, *hosts, b"Connection: close", b"", b""]
            assert status_of(await place.ask(b"\r\n".join(head))) == status

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/trajectories?limit=" + "9" * 5000, 400),
        ("/api/trajectories?limit=-1", 400),
        ("/api/trajectories/-1", 404),
        ("/api/trajectories/%ff", 404),
        ("/nowhere", 404),
    ],
)
async def test_the_page_refuses_requests_that_it_cannot_parse(
    tmp_path: Path, path: str, status: int
) -> None:
    run = FakeRun(tmp_path / "demo")
    run.add_steps(1)
    reader = RunReader(run.folder)
    reader.poll(run.now_s)
    server = TestServer(DashboardApp(reader, SystemClock()).app())
    await server.start_server()
    async with ClientSession(base_url=server.make_url("/")) as session:
        async with session.get(path) as response:
            assert response.status == status
            assert "default-src 'self'" in response.headers["Content-Security-Policy"]
        async with session.get("/api/state", headers={"Host": "evil.example"}) as response:
            assert response.status == 403
    await server.close()
