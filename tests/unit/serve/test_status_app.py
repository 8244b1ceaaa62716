"""The status endpoint: content, access, and detection of a blocked loop."""

import asyncio
import socket
from collections.abc import Iterable, Iterator

import httpx
import msgspec
import pytest

from rollmesh.core.errors import AddressError
from rollmesh.core.metrics import Exposition, Figure
from rollmesh.core.process import http_address, listen
from rollmesh.core.secret_files import ADMIN_TOKEN_VARIABLE
from rollmesh.serve.status_app import STALE_S, SnapshotCell, StatusApp
from rollmesh.testing.clock import FakeClock


class Seen(msgspec.Struct):
    """A snapshot of a loop."""

    num_turns: int


def figures_of(seen: Seen) -> Iterable[Figure]:
    return [Figure("turns_total", seen.num_turns, "turns of the loop")]


def new_app(listening: socket.socket, snapshots: SnapshotCell[Seen]) -> StatusApp:
    return StatusApp(listening, snapshots, Exposition("loop"), setting="loop.http_bind")


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    bound = listen("127.0.0.1:0")
    yield bound
    bound.close()


def test_it_serves_the_newest_snapshot_and_reports_a_missing_one(
    listening: socket.socket,
) -> None:
    clock = FakeClock()
    snapshots = SnapshotCell("loop", clock, figures_of)
    app = new_app(listening, snapshots)
    app.start()
    with httpx.Client(base_url=http_address(listening), timeout=30.0) as client:
        assert client.get("/healthz").status_code == 503
        assert client.get("/status").json() is None
        snapshots.publish(Seen(3))
        assert client.get("/healthz").text == "ok\n"
        assert client.get("/status").json() == {"num_turns": 3}
        assert "rollmesh_turns_total 3.0" in client.get("/metrics").text
        snapshots.set_blocked("the disk is full")
        assert client.get("/healthz").text == "no progress: the disk is full\n"
        snapshots.set_blocked("")
        assert client.get("/healthz").text == "ok\n"
        clock.advance(STALE_S + 1)
        late = client.get("/healthz")
        assert late.status_code == 503
        assert late.text == "the loop has not published a snapshot for 5 s\n"
    app.close()


def test_other_clients_need_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADMIN_TOKEN_VARIABLE, raising=False)
    snapshots = SnapshotCell("loop", FakeClock(), figures_of)
    with socket.create_server(("0.0.0.0", 0)) as bound:
        with pytest.raises(AddressError, match=r"loop\.http_bind = 0\.0\.0\.0: others"):
            new_app(bound, snapshots)
        monkeypatch.setenv(ADMIN_TOKEN_VARIABLE, "t0ken")
        app = new_app(bound, snapshots)
        app.start()
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with httpx.Client(base_url=address, timeout=30.0) as client:
            assert client.get("/status").status_code == 401
            assert client.get("/healthz").status_code == 503
            answer = client.get("/status", headers={"Authorization": "Bearer t0ken"})
            assert answer.status_code == 200
        app.close()


def test_it_ends_with_the_coroutine_that_runs_beside_it(listening: socket.socket) -> None:
    asks: asyncio.Queue[str] = asyncio.Queue()
    snapshots, done = SnapshotCell("loop", FakeClock(), figures_of), []

    async def until() -> None:
        done.append(await asks.get())

    app = StatusApp(listening, snapshots, Exposition("loop"), setting="http_bind", until=until)
    app.start()
    app.call(asks.put_nowait, "the last")
    app.close()
    assert done == ["the last"]
