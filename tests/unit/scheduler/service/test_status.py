"""The snapshot that people and Prometheus read."""

from rollmesh.scheduler.service.status import figures_of, status_of
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


def test_a_scheduler_that_nobody_has_asked_tells_no_waits() -> None:
    status = status_of(Stage(2).scheduler, {})
    assert status.wait_s == {}
    assert status.fleet.num_free == 2
