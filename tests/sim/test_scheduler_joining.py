"""Engines that have not come up yet are no fault for a long time, and no pipeline waits for
them.
"""

from rollmesh.scheduler.planning.state import PipelinePhase
from rollmesh.scheduler.service.explain import explain_fleet
from rollmesh.wire.scheduling import (
    AdmitPipeline,
    HooksWired,
    PipelineSpec,
    RegisterPipeline,
    TicketState,
    WorkerPhase,
)
from tests.unit.scheduler.service.harness import Coordinator, SchedulerHarness

QUARANTINED, ADMITTED = PipelinePhase.QUARANTINED, PipelinePhase.ADMITTED


def coming_up() -> SchedulerHarness:
    """Return a fleet where pipeline a requested two engines: 0 serves, and 1 has never been
    seen.
    """
    harness = SchedulerHarness(2)
    coordinator = harness.pipeline("a", train=(), generation=(0, 1))
    coordinator.move(1, WorkerPhase.ABSENT)
    harness.beat()
    harness.generate("a", "g")
    harness.wait_for("g", TicketState.GRANTED, 5)
    return harness


def test_an_engine_that_has_not_come_up_yet_is_no_fault_and_is_not_woken() -> None:
    harness = coming_up()
    harness.run(60)
    assert harness.awake("a") == [0]
    assert harness.scheduler.state.counts["pipeline.quarantined"] == 0
    assert set(harness.scheduler.state.occupants) == {0}
    [result] = explain_fleet(
        harness.scheduler.state.fleet, harness.scheduler.explain_context()
    ).pipelines
    assert "engine 1 has not come up yet (60 s)" in result.lines
    assert [each.phase for each in result.workers] == [WorkerPhase.AWAKE, WorkerPhase.ABSENT]
    harness.coordinators["a"].move(1, WorkerPhase.ASLEEP)
    harness.run(5)
    assert harness.awake("a") == [0, 1]


def test_an_absent_engine_promised_before_the_first_hello_is_no_fault_either() -> None:
    harness = SchedulerHarness(2)
    spec = PipelineSpec(pipeline_id="a", clusters={}, generation=(0, 1))
    harness.send(RegisterPipeline("r", spec))
    harness.send(AdmitPipeline("ad", "a"))
    harness.send(HooksWired("a"))
    harness.generate("a", "g")  # both engines are promised a GPU
    harness.coordinators["a"] = coordinator = Coordinator("a", 2)
    coordinator.move(1, WorkerPhase.ABSENT)
    harness.run(5)
    assert harness.scheduler.state.counts["pipeline.quarantined"] == 0
    assert harness.awake("a") == [0]
    assert set(harness.scheduler.state.fleet.owners) == {0}
    coordinator.move(1, WorkerPhase.ASLEEP)
    harness.run(5)
    assert harness.awake("a") == [0, 1]


def test_the_gpus_of_an_engine_that_has_not_come_up_are_free_for_others() -> None:
    harness = coming_up()
    harness.pipeline("b", train=(1,), generation=())
    assert harness.train("b", "t") is TicketState.GRANTED


def test_an_engine_that_does_not_come_up_for_very_long_is_a_fault_until_it_does() -> None:
    harness = coming_up()
    harness.run(harness.settings.join_s + 2)
    assert harness.of("a").phase is QUARANTINED
    assert "engine 1 has not come up within 60" in harness.scheduler.state.pipeline_records["a"].why
    harness.run(60)
    assert harness.awake("a") == []
    assert harness.scheduler.state.counts["pipeline.quarantined"] == 1
    harness.coordinators["a"].move(1, WorkerPhase.ASLEEP)
    harness.run(10)
    assert harness.awake("a") == [0, 1]


def test_a_quarantined_pipeline_is_readmitted_while_an_engine_comes_up() -> None:
    harness = coming_up()
    harness.coordinators["a"].move(0, WorkerPhase.LOST)
    harness.run(2)
    assert harness.of("a").phase is QUARANTINED
    harness.coordinators["a"].move(0, WorkerPhase.ASLEEP)
    harness.run(5)
    assert harness.of("a").phase is ADMITTED
    assert harness.awake("a") == [0]


def test_an_engine_that_was_awake_and_is_absent_is_lost() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", train=(), generation=(0, 1))
    harness.generate("a", "g")
    harness.run(2)
    assert harness.awake("a") == [0, 1]
    again = Coordinator("a", 2, started_s=2.0)
    again.move(0, WorkerPhase.ABSENT)
    again.move(1, WorkerPhase.AWAKE)
    harness.coordinators["a"] = again
    harness.beat()
    assert harness.of("a").phase is QUARANTINED
    assert harness.of("a").workers[0].phase is WorkerPhase.LOST
    harness.run(5)
    assert set(harness.scheduler.state.occupants) == {0}


def test_a_new_run_has_the_whole_time_until_its_engines_are_up() -> None:
    harness = coming_up()
    harness.run(harness.settings.join_s - 10)
    again = Coordinator("a", 2, started_s=2.0)
    again.move(0, WorkerPhase.AWAKE)
    again.move(1, WorkerPhase.ABSENT)
    harness.coordinators["a"] = again
    harness.run(harness.settings.join_s - 10)
    assert harness.scheduler.state.counts["pipeline.quarantined"] == 0


def test_an_absent_engine_stays_absent_over_a_restart_of_the_scheduler() -> None:
    harness = coming_up()
    harness.begin()
    assert harness.of("a").workers[1].phase is WorkerPhase.ABSENT
    assert set(harness.scheduler.state.occupants) == {0}
    harness.run(10)
    assert harness.scheduler.state.counts["pipeline.quarantined"] == 0
