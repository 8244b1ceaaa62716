"""The HTTP face: what is served, to whom, and that it tells when the loop hangs."""

import socket
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from rollmesh.core.errors import AddressError
from rollmesh.core.process import http_address, listen
from rollmesh.core.secret_file import ADMIN_TOKEN_VARIABLE
from rollmesh.scheduler.service.explain import FleetView, view
from rollmesh.scheduler.service.face import STALE_S, Face
from rollmesh.scheduler.service.status import status_of
from rollmesh.testing.clock import FakeClock
from tests.unit.scheduler.service.stage import Stage


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    bound = listen("127.0.0.1:0")
    yield bound
    bound.close()


def test_it_serves_the_newest_snapshot_and_says_when_there_is_none(
    listening: socket.socket,
) -> None:
    clock = FakeClock()
    face = Face(listening, clock)
    face.start()
    with httpx.Client(base_url=http_address(listening), timeout=30.0) as client:
        assert client.get("/healthz").status_code == 503
        face.hang(status_of(Stage(2).scheduler, {}))
        assert client.get("/healthz").text == "ok\n"
        assert client.get("/status").json()["fleet"]["num_free"] == 2
        assert "rollmesh_scheduler_gpus_free 2.0" in client.get("/metrics").text
        face.stick("the disk is full")
        assert client.get("/healthz").text == "nothing is done: the disk is full\n"
        face.stick("")
        assert client.get("/healthz").text == "ok\n"
        clock.advance(STALE_S + 1)
        assert client.get("/healthz").status_code == 503
    face.close()


def test_it_explains_a_pipeline_as_the_verb_does(listening: socket.socket) -> None:
    stage = Stage(2)
    stage.pipeline("a", generation=(0, 1))
    stage.pipeline("b", generation=(0, 1))
    stage.train("a", "t")
    stage.act()
    stage.train("b", "t2")
    face = Face(listening, FakeClock())
    face.start()
    with httpx.Client(base_url=http_address(listening), timeout=30.0) as client:
        assert client.get("/explain/b").status_code == 503
        face.hang(status_of(stage.scheduler, {}))
        verbs = view(stage.scheduler.book.state, stage.scheduler.known(), "b")
        told = msgspec.json.decode(client.get("/explain/b").content, type=FleetView)
        assert told == verbs
        (b,) = told.pipelines
        assert b.waits[0].missing == {0: "a actor_train, for 0.0 s"}
        text = client.get("/explain/b?text")
        assert text.headers["Content-Type"].startswith("text/plain")
        assert text.text.splitlines() == list(b.lines)
        unknown = client.get("/explain/c")
        assert (unknown.status_code, unknown.text) == (404, "no pipeline 'c'; a, b known\n")
        assert client.get("/explain/%0A%2F..").status_code == 404
    face.close()


def test_others_need_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADMIN_TOKEN_VARIABLE, raising=False)
    with socket.create_server(("0.0.0.0", 0)) as bound:
        with pytest.raises(AddressError, match="http_bind"):
            Face(bound, FakeClock())
        monkeypatch.setenv(ADMIN_TOKEN_VARIABLE, "t0ken")
        face = Face(bound, FakeClock())
        face.start()
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with httpx.Client(base_url=address, timeout=30.0) as client:
            assert client.get("/status").status_code == 401
            assert client.get("/explain/a").status_code == 401
            assert client.get("/healthz").status_code == 503
            told = client.get("/status", headers={"Authorization": "Bearer t0ken"})
            assert told.status_code == 200
        face.close()
