"""Engines that have not come up yet: no fault for a long time, and no pipeline waits for them."""

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
from tests.unit.scheduler.service.stage import Coordinator, Stage

QUARANTINED, ADMITTED = PipelinePhase.QUARANTINED, PipelinePhase.ADMITTED


def coming_up() -> Stage:
    """Engine 1 of pipeline a has never been seen; it wants all, and 0 serves."""
    stage = Stage(2)
    coordinator = stage.pipeline("a", train=(), generation=(0, 1))
    coordinator.move(1, WorkerPhase.ABSENT)
    stage.beat()
    stage.generate("a", "g")
    stage.wait_for("g", TicketState.GRANTED, 5)
    return stage


def test_an_engine_that_has_not_come_up_yet_is_no_fault_and_is_not_woken() -> None:
    stage = coming_up()
    stage.run(60)
    assert stage.awake("a") == [0]
    assert stage.scheduler.state.counts["pipeline.quarantined"] == 0
    assert set(stage.scheduler.state.occupants) == {0}
    [result] = explain_fleet(
        stage.scheduler.state.fleet, stage.scheduler.explain_context()
    ).pipelines
    assert "engine 1 has not come up yet (60 s)" in result.lines
    assert [each.phase for each in result.workers] == [WorkerPhase.AWAKE, WorkerPhase.ABSENT]
    stage.coordinators["a"].move(1, WorkerPhase.ASLEEP)
    stage.run(5)
    assert stage.awake("a") == [0, 1]


def test_an_engine_that_was_to_wake_before_its_coordinator_was_heard_is_no_fault_either() -> None:
    stage = Stage(2)
    spec = PipelineSpec(pipeline_id="a", clusters={}, generation=(0, 1))
    stage.send(RegisterPipeline("r", spec))
    stage.send(AdmitPipeline("ad", "a"))
    stage.send(HooksWired("a"))
    stage.generate("a", "g")  # so both are promised to wake
    stage.coordinators["a"] = coordinator = Coordinator("a", 2)
    coordinator.move(1, WorkerPhase.ABSENT)
    stage.run(5)
    assert stage.scheduler.state.counts["pipeline.quarantined"] == 0
    assert stage.awake("a") == [0]
    assert set(stage.scheduler.state.fleet.owners) == {0}
    coordinator.move(1, WorkerPhase.ASLEEP)
    stage.run(5)
    assert stage.awake("a") == [0, 1]


def test_gpus_of_an_engine_that_has_not_come_up_are_for_others() -> None:
    stage = coming_up()
    stage.pipeline("b", train=(1,), generation=())
    assert stage.train("b", "t") is TicketState.GRANTED


def test_an_engine_that_does_not_come_up_for_very_long_is_a_fault_until_it_does() -> None:
    stage = coming_up()
    stage.run(stage.settings.join_s + 2)
    assert stage.of("a").phase is QUARANTINED
    assert "engine 1 has not come up within 60" in stage.scheduler.state.pipeline_records["a"].why
    stage.run(60)
    assert stage.awake("a") == []
    assert stage.scheduler.state.counts["pipeline.quarantined"] == 1
    stage.coordinators["a"].move(1, WorkerPhase.ASLEEP)
    stage.run(10)
    assert stage.awake("a") == [0, 1]


def test_a_pipeline_that_was_quarantined_is_let_in_while_an_engine_comes_up() -> None:
    stage = coming_up()
    stage.coordinators["a"].move(0, WorkerPhase.LOST)
    stage.run(2)
    assert stage.of("a").phase is QUARANTINED
    stage.coordinators["a"].move(0, WorkerPhase.ASLEEP)
    stage.run(5)
    assert stage.of("a").phase is ADMITTED
    assert stage.awake("a") == [0]


def test_one_that_was_awake_and_is_not_there_any_more_is_lost() -> None:
    stage = Stage(2)
    stage.pipeline("a", train=(), generation=(0, 1))
    stage.generate("a", "g")
    stage.run(2)
    assert stage.awake("a") == [0, 1]
    again = Coordinator("a", 2, started_s=2.0)
    again.move(0, WorkerPhase.ABSENT)
    again.move(1, WorkerPhase.AWAKE)
    stage.coordinators["a"] = again
    stage.beat()
    assert stage.of("a").phase is QUARANTINED
    assert stage.of("a").workers[0].phase is WorkerPhase.LOST
    stage.run(5)
    assert set(stage.scheduler.state.occupants) == {0}


def test_a_new_run_has_all_the_time_again_until_its_engines_are_up() -> None:
    stage = coming_up()
    stage.run(stage.settings.join_s - 10)
    again = Coordinator("a", 2, started_s=2.0)
    again.move(0, WorkerPhase.AWAKE)
    again.move(1, WorkerPhase.ABSENT)
    stage.coordinators["a"] = again
    stage.run(stage.settings.join_s - 10)
    assert stage.scheduler.state.counts["pipeline.quarantined"] == 0


def test_that_an_engine_has_not_come_up_outlives_the_scheduler() -> None:
    stage = coming_up()
    stage.begin()
    assert stage.of("a").workers[1].phase is WorkerPhase.ABSENT
    assert set(stage.scheduler.state.occupants) == {0}
    stage.run(10)
    assert stage.scheduler.state.counts["pipeline.quarantined"] == 0
