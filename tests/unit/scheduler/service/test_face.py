"""The service's HTTP face: a program is told why a pipeline waits as the verb's user is."""

import socket
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from rollmesh.core.process import http_address, listen
from rollmesh.scheduler.service.explain import FleetView, view
from rollmesh.scheduler.service.face import board_of, face_of
from rollmesh.scheduler.service.status import status_of
from rollmesh.testing.clock import FakeClock
from tests.unit.scheduler.service.stage import Stage


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    bound = listen("127.0.0.1:0")
    yield bound
    bound.close()


def test_it_explains_a_pipeline_as_the_verb_does(listening: socket.socket) -> None:
    stage = Stage(2)
    stage.pipeline("a", generation=(0, 1))
    stage.pipeline("b", generation=(0, 1))
    stage.train("a", "t")
    stage.act()
    stage.train("b", "t2")
    board = board_of(FakeClock())
    face = face_of(listening, board)
    face.start()
    with httpx.Client(base_url=http_address(listening), timeout=30.0) as client:
        assert client.get("/explain/b").status_code == 503
        board.hang(status_of(stage.scheduler, {}))
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
        assert client.get("/status").json()["fleet"]["num_free"] == 1
        assert "rollmesh_scheduler_gpus_free 1.0" in client.get("/metrics").text
    face.close()
