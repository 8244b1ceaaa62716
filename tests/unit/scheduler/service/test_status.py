"""Snapshots for people and Prometheus; the HTTP explanation equals that of the command line."""

import socket
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from rollmesh.core.process import http_address, listen
from rollmesh.scheduler.service.explain import FleetExplanation, explain_fleet
from rollmesh.scheduler.service.process import figures_of, snapshots_of, status_app_of, status_of
from rollmesh.testing.clock import FakeClock
from tests.unit.scheduler.service.stage import Stage


def test_a_snapshot_tells_phases_waits_and_faults() -> None:
    stage = Stage(2)
    stage.pipeline("a", generation=(0, 1))
    stage.pipeline("b", train=(0,), generation=())
    stage.generate("a", "g")
    stage.act()
    stage.coordinators["a"].error = "no"
    stage.train("b", "t")
    stage.act()
    stage.run(3)
    status = status_of(stage.scheduler, {"malformed": 7})
    assert status.num_waiting == 1
    assert status.wait_s["0.5"] == 0.0
    figures = {
        (each.name, *sorted(each.labels.values())): each.value for each in figures_of(status)
    }
    assert figures["scheduler_workers", "a", "lost"] + figures.get(
        ("scheduler_workers", "a", "awake"), 0
    ) in (1, 2)
    assert figures["scheduler_events_total", "malformed"] == 7
    assert figures["scheduler_events_total", "pipeline.quarantined"] >= 1
    assert figures["scheduler_nodes", "up"] == 1
    assert figures["scheduler_waiting_seconds", "b"] > 0


def test_a_scheduler_without_requests_shows_no_waits() -> None:
    status = status_of(Stage(2).scheduler, {})
    assert status.wait_s == {}
    assert status.fleet.num_free == 2


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
    snapshots = snapshots_of(FakeClock())
    status_app = status_app_of(listening, snapshots)
    status_app.start()
    with httpx.Client(base_url=http_address(listening), timeout=30.0) as client:
        assert client.get("/explain/b").status_code == 503
        snapshots.publish(status_of(stage.scheduler, {}))
        verbs = explain_fleet(stage.scheduler.state.fleet, stage.scheduler.explain_context(), "b")
        result = msgspec.json.decode(client.get("/explain/b").content, type=FleetExplanation)
        assert result == verbs
        (b,) = result.pipelines
        assert b.waits[0].missing == {0: "a actor_train, for 0.0 s"}
        text = client.get("/explain/b?text")
        assert text.headers["Content-Type"].startswith("text/plain")
        assert text.text.splitlines() == list(b.lines)
        unknown = client.get("/explain/c")
        assert (unknown.status_code, unknown.text) == (404, "no pipeline 'c'; a, b known\n")
        assert client.get("/explain/%0A%2F..").status_code == 404
        assert client.get("/status").json()["fleet"]["num_free"] == 1
        assert "rollmesh_scheduler_gpus_free 1.0" in client.get("/metrics").text
    status_app.close()
