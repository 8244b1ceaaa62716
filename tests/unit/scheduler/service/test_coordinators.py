"""Coordinator reports complete resizes, trigger repeats, quarantine pipelines and readmit them."""

import msgspec
import pytest

from rollmesh.scheduler.planning.state import PipelinePhase
from rollmesh.scheduler.service.coordinators import LIVE_S
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    CoordinatorHello,
    JoinNode,
    KillPipeline,
    NodeBeat,
    TicketState,
    UnregisterPipeline,
    WorkerPhase,
    WorkersResized,
    WorkerTruth,
)
from tests.unit.scheduler.service.stage import Coordinator, Stage

QUARANTINED, ADMITTED = PipelinePhase.QUARANTINED, PipelinePhase.ADMITTED


def generating(num_gpus: int = 2) -> Stage:
    """Pipeline a has all engines awake."""
    stage = Stage(num_gpus)
    stage.pipeline("a", train=(0,), generation=range(num_gpus))
    stage.generate("a", "g")
    stage.act()
    assert stage.awake("a") == list(range(num_gpus))
    return stage


def test_a_lost_resize_is_resent_with_the_same_epoch() -> None:
    stage = Stage(2)
    coordinator = stage.pipeline("a", generation=(0, 1))
    stage.generate("a", "g")
    first = coordinator.pending_resizes.pop()
    coordinator.truths = Coordinator("a", 2).truths
    stage.run(2)
    assert stage.awake("a") == [0, 1]
    assert {truth.epoch for truth in coordinator.truths} == {first.changes[0].epoch}
    assert stage.scheduler.state.numbers.resize_id == first.resize_id


def test_an_answer_that_was_lost_is_read_off_the_next_hello() -> None:
    stage = Stage(2)
    coordinator = stage.pipeline("a", generation=(0, 1))
    stage.generate("a", "g")
    coordinator.pending_resizes.clear()
    for rank in (0, 1):
        coordinator.move(rank, WorkerPhase.AWAKE)
    stage.send(coordinator.hello(), coordinator.route)
    assert stage.state("g") is TicketState.GRANTED
    assert not stage.scheduler.state.intents


def test_resizes_of_a_pipeline_are_one_at_a_time_and_what_sleeps_goes_first() -> None:
    stage = Stage(3)
    coordinator = stage.pipeline("a", train=(0,), generation=(0, 1))
    stage.generate("a", "g")
    stage.act()
    coordinator.is_hung = True
    stage.train("a", "t")
    assert [change.rank for change in coordinator.pending_resizes[0].changes] == [0]
    stage.release("a", "r", GENERATION_CLUSTER)
    assert len(coordinator.pending_resizes) == 1
    coordinator.is_hung = False
    stage.act()
    assert [change.rank for change in coordinator.pending_resizes[0].changes] == [1]


def test_an_engine_wakes_only_when_its_gpus_are_clear_in_truth() -> None:
    stage = generating()
    stage.pipeline("b", generation=(0, 1))
    stage.coordinators["a"].is_hung = True
    stage.generate("b", "g2")
    stage.run(8)  # a has more than its share by now, and was told
    assert stage.scheduler.state.counts["resizes"] == 2
    assert not stage.coordinators["b"].num_received
    stage.coordinators["a"].is_hung = False
    stage.run(2)
    assert stage.state("g2") is TicketState.GRANTED


@pytest.mark.parametrize("fault", ["error", "late", "lost"])
def test_what_fails_quarantines_its_pipeline_and_fences_its_gpus(fault: str) -> None:
    stage = generating()
    coordinator = stage.coordinators["a"]
    stage.train("a", "t")
    if fault == "error":
        coordinator.error = "no answer from http://e:1"
        stage.act()
    elif fault == "lost":
        coordinator.is_hung = True
        coordinator.move(0, WorkerPhase.LOST)
        stage.beat()
    else:
        coordinator.is_hung = True
        stage.run(stage.settings.resize_deadline_s + stage.settings.slack_s + 1)
    assert stage.of("a").phase is QUARANTINED
    assert stage.state("t") is TicketState.QUEUED
    assert {worker.phase for worker in stage.of("a").workers} == {WorkerPhase.LOST}
    assert set(stage.scheduler.state.fleet.owners) == {0, 1}
    assert "quarantined" in _resent(stage, "t")


def _resent(stage: Stage, key: str) -> str:
    stage.send(stage.open[key], b"hooks-a")
    return stage.moved[key].reason


def test_a_coordinator_that_tells_the_truth_again_is_let_in_after_a_while() -> None:
    stage = generating()
    coordinator = stage.coordinators["a"]
    coordinator.error = "an engine does not answer"
    stage.train("a", "t")
    stage.act()
    coordinator.error = ""
    stage.beat()
    assert stage.of("a").phase is QUARANTINED
    stage.run(3)
    assert stage.of("a").phase is ADMITTED
    stage.wait_for("t", TicketState.GRANTED)
    assert stage.awake("a") == [1]


def test_each_fault_doubles_the_time_until_it_is_let_in_again() -> None:
    stage = generating()
    coordinator = stage.coordinators["a"]
    coordinator.error = "an engine does not answer"
    stage.train("a", "t")
    stage.run(60)
    num_faults = stage.scheduler.state.counts["pipeline.quarantined"]
    assert 4 <= num_faults <= 7
    coordinator.error = ""
    stage.wait_for("t", TicketState.GRANTED, stage.settings.max_retry_s + 5)
    assert stage.scheduler.state.pipeline_records["a"].num_faults == 0


def test_a_lost_worker_keeps_its_gpus_and_a_request_for_them_returns_to_its_place() -> None:
    stage = generating()
    stage.pipeline("b", train=(0, 1), generation=())
    stage.pipeline("c", train=(0,), generation=())
    stage.coordinators["a"].is_hung = True
    stage.train("b", "b1")
    stage.train("c", "c1")
    assert stage.of("b").holds
    stage.coordinators["a"].move(0, WorkerPhase.LOST)
    stage.beat()
    assert not stage.of("b").holds
    assert list(stage.scheduler.state.fleet.requests) == ["b1", "c1"]
    coordinator = stage.coordinators["a"]
    coordinator.is_hung = False
    coordinator.move(0, WorkerPhase.ASLEEP)
    stage.run(3)
    assert stage.state("b1") is TicketState.GRANTED
    assert stage.state("c1") is TicketState.QUEUED


def test_one_lost_engine_fences_its_own_gpus_alone_once_the_others_are_known() -> None:
    stage = Stage()
    stage.pipeline("a", train=())
    stage.pipeline("b", train=(1, 2, 3), generation=(0, 1, 2, 3))
    stage.generate("a", "g")
    stage.run(2)
    assert stage.awake("a") == [0, 1, 2, 3]
    stage.coordinators["a"].move(0, WorkerPhase.LOST)
    stage.run(3)
    assert stage.of("a").phase is PipelinePhase.QUARANTINED
    assert stage.awake("a") == []
    assert set(stage.scheduler.state.occupants) == {0}
    stage.train("b", "t")
    stage.wait_for("t", TicketState.GRANTED)
    assert stage.of("a").phase is PipelinePhase.QUARANTINED


def test_a_silent_coordinator_is_fenced_and_the_others_go_on() -> None:
    stage = generating()
    stage.coordinators["a"].is_silent = True
    stage.run(stage.settings.coordinator_grace_s + 2)
    assert stage.of("a").phase is QUARANTINED
    stage.pipeline("b", train=(1,), generation=())
    assert stage.train("b", "b1") is TicketState.QUEUED
    stage.coordinators["a"].is_silent = False
    stage.wait_for("b1", TicketState.GRANTED)


def test_a_pipeline_whose_coordinator_never_reported_evicts_no_other() -> None:
    stage = generating()
    stage.pipeline("b", generation=(0, 1)).is_silent = True
    stage.scheduler.state.links["b"].is_known = False
    stage.run(stage.settings.coordinator_grace_s + 1)
    assert stage.generate("b", "b1") is TicketState.QUEUED
    stage.run(20)
    assert stage.awake("a") == [0, 1]
    assert stage.scheduler.state.counts["evictions"] == 0
    stage.coordinators["b"].is_silent = False
    stage.wait_for("b1", TicketState.GRANTED)


def test_old_news_is_not_believed() -> None:
    stage = generating()
    coordinator = stage.coordinators["a"]
    before = coordinator.hello()
    stage.release("a", "r", GENERATION_CLUSTER)
    stage.act()
    assert stage.state("r") is TicketState.RELEASED
    stage.send(before, coordinator.route)
    stage.send(WorkersResized("a", 1, before.workers), coordinator.route)
    assert {worker.phase for worker in stage.of("a").workers} == {WorkerPhase.ASLEEP}
    assert stage.of("a").phase is ADMITTED


def test_a_coordinator_that_was_started_again_is_believed_and_its_past_is_not() -> None:
    stage = generating()
    before = stage.coordinators["a"].hello()
    again = Coordinator("a", 2, started_s=2.0)
    again.move(1, WorkerPhase.AWAKE)  # the other engine was put to sleep by hand
    stage.coordinators["a"] = again
    stage.send(again.hello(), again.route)
    phases = [WorkerPhase.WAKING, WorkerPhase.AWAKE]
    assert [worker.phase for worker in stage.of("a").workers] == phases
    stage.send(before, b"coordinator-a")
    assert [worker.phase for worker in stage.of("a").workers] == phases
    stage.run(5)
    assert stage.awake("a") == [0, 1]


def test_a_coordinator_that_restarts_during_a_resize_receives_it_again() -> None:
    stage = Stage(2)
    stage.pipeline("a", generation=(0, 1))
    stage.generate("a", "g")
    again = Coordinator("a", 2, started_s=2.0)
    stage.coordinators["a"] = again
    before = again.hello()
    stage.send(before, again.route)
    stage.act()
    assert stage.state("g") is TicketState.GRANTED
    stage.send(before, again.route)  # said before it had heard anything
    assert {worker.phase for worker in stage.of("a").workers} == {WorkerPhase.AWAKE}


def test_an_engine_that_lost_its_resize_sleeps_before_it_is_let_in() -> None:
    stage = generating()
    again = Coordinator("a", 2)  # no clock of its own: nobody can tell it from its past
    again.move(0, WorkerPhase.AWAKE)
    stage.coordinators["a"] = again
    stage.run(stage.settings.slack_s + 8)
    assert stage.of("a").phase is ADMITTED
    assert stage.scheduler.state.counts["pipeline.quarantined"] == 1
    assert {truth.epoch > 1 for truth in again.truths} == {True}


def test_gpus_of_an_engine_that_should_sleep_are_not_promised() -> None:
    stage = Stage(2)
    coordinator = stage.pipeline("a", train=(), generation=(0,))
    stage.generate("a", "g")
    stage.run(2)
    stage.release("a", "r", GENERATION_CLUSTER)
    stage.run(2)
    coordinator.truths[0] = WorkerTruth(0, WorkerPhase.AWAKE, 0)  # it forgot what it was told
    coordinator.is_hung = True
    stage.run(stage.settings.slack_s + 3)
    stage.pipeline("b", train=(), generation=(0, 1), max_gpus=1)
    stage.generate("b", "b-g")
    stage.wait_for("b-g", TicketState.GRANTED, 5)
    assert stage.awake("b") == [1]
    coordinator.is_hung = False
    stage.run(80)
    assert stage.awake("a") == []


def test_a_coordinator_that_outlives_its_registration_receives_newer_epochs() -> None:
    stage = Stage(1)
    coordinator = stage.pipeline("a", train=(), generation=(0,))
    for step in range(3):
        stage.generate("a", f"g{step}", step=step)
        stage.run(2)
        stage.release("a", f"r{step}", GENERATION_CLUSTER)
        stage.run(2)
    known = coordinator.truths
    stage.send(UnregisterPipeline("leave", "a"))
    stage.run(2)
    assert stage.answers["leave"].ok
    for key in ("register-a", "admit-a"):
        del stage.scheduler.state.answers[key]
    stage.pipeline("a", train=(), generation=(0,)).truths = known
    stage.beat()
    stage.generate("a", "again")
    stage.run(2)
    assert stage.state("again") is TicketState.GRANTED
    assert stage.scheduler.state.counts["pipeline.quarantined"] == 0


def test_an_engine_that_is_awake_from_the_start_stays_awake_on_its_own_gpus() -> None:
    stage = Stage(2)
    coordinator = stage.pipeline("a", generation=(0, 1))
    coordinator.move(0, WorkerPhase.AWAKE)
    stage.beat()
    assert stage.of("a").workers[0].phase is WorkerPhase.AWAKE
    assert stage.generate("a", "g") is TicketState.GRANTED


def test_an_engine_that_is_awake_where_another_is_must_go_to_sleep() -> None:
    stage = Stage(2)
    stage.pipeline("a", train=(0,), generation=())
    stage.train("a", "t")
    coordinator = stage.pipeline("b", generation=(0, 1))
    stray = msgspec.structs.replace(coordinator.truths[0], phase=WorkerPhase.AWAKE)
    stage.send(CoordinatorHello("b", (stray, coordinator.truths[1]), 1.0), coordinator.route)
    assert stage.of("b").phase is QUARANTINED
    assert [(c.rank, c.wakes) for c in coordinator.pending_resizes[0].changes] == [(0, False)]
    stage.run(5)
    assert stage.of("b").phase is ADMITTED


def test_workers_of_a_dead_node_are_lost_and_their_pipeline_goes_on_elsewhere() -> None:
    stage = Stage(2)
    stage.send(JoinNode("n", "n1", 2))
    stage.pipeline("a", generation=(0, 1, 2, 3))
    stage.generate("a", "g", target=4)
    stage.act()
    assert stage.awake("a") == [0, 1, 2, 3]
    for rank in (2, 3):
        stage.coordinators["a"].move(rank, WorkerPhase.LOST)
    stage.run(stage.settings.node_grace_s + 2)
    phases = [worker.phase for worker in stage.of("a").workers]
    assert phases == [WorkerPhase.AWAKE] * 2 + [WorkerPhase.LOST] * 2
    assert stage.of("a").phase in (ADMITTED, QUARANTINED)
    for rank in (2, 3):
        stage.coordinators["a"].move(rank, WorkerPhase.ASLEEP)
    for _ in range(8):
        stage.send(NodeBeat("n1"))
        stage.run(0.5)
    assert stage.of("a").phase is ADMITTED
    assert stage.awake("a") == [0, 1, 2, 3]


def test_a_run_drives_its_pipeline_while_its_coordinator_is_heard() -> None:
    stage = generating()
    assert stage.scheduler.explain_context().live_coordinators == {"a"}
    stage.coordinators["a"].is_silent = True
    stage.run(LIVE_S)
    assert stage.scheduler.explain_context().live_coordinators == frozenset()
    stage.coordinators["a"].is_silent = False
    stage.run(1.0)
    assert stage.scheduler.explain_context().live_coordinators == {"a"}
    stage.send(KillPipeline("k", "a"))
    assert stage.scheduler.explain_context().live_coordinators == frozenset()


@pytest.mark.parametrize("started_s", [float("inf"), float("-inf"), float("nan"), 1e300, -1.0])
def test_a_coordinator_that_began_at_no_time_is_refused_and_blocks_no_later_one(
    started_s: float,
) -> None:
    stage = Stage()
    stage.pipeline("a", generation=(0,))
    before = stage.scheduler.state.pipeline_records["a"].started_s
    stage.send(CoordinatorHello("a", (), started_s), b"stranger")
    assert stage.scheduler.state.pipeline_records["a"].started_s == before
