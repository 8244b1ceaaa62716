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
from tests.unit.scheduler.service.harness import Coordinator, SchedulerHarness

QUARANTINED, ADMITTED = PipelinePhase.QUARANTINED, PipelinePhase.ADMITTED


def generating(num_gpus: int = 2) -> SchedulerHarness:
    """Pipeline a has all engines awake."""
    harness = SchedulerHarness(num_gpus)
    harness.pipeline("a", train=(0,), generation=range(num_gpus))
    harness.generate("a", "g")
    harness.act()
    assert harness.awake("a") == list(range(num_gpus))
    return harness


def test_a_lost_resize_is_resent_with_the_same_epoch() -> None:
    harness = SchedulerHarness(2)
    coordinator = harness.pipeline("a", generation=(0, 1))
    harness.generate("a", "g")
    first = coordinator.pending_resizes.pop()
    coordinator.truths = Coordinator("a", 2).truths
    harness.run(2)
    assert harness.awake("a") == [0, 1]
    assert {truth.epoch for truth in coordinator.truths} == {first.changes[0].epoch}
    assert harness.scheduler.state.numbers.resize_id == first.resize_id


def test_the_next_hello_replaces_a_lost_answer() -> None:
    harness = SchedulerHarness(2)
    coordinator = harness.pipeline("a", generation=(0, 1))
    harness.generate("a", "g")
    coordinator.pending_resizes.clear()
    for rank in (0, 1):
        coordinator.move(rank, WorkerPhase.AWAKE)
    harness.send(coordinator.hello(), coordinator.route)
    assert harness.state("g") is TicketState.GRANTED
    assert not harness.scheduler.state.intents


def test_resizes_of_a_pipeline_run_one_at_a_time_and_sleeps_first() -> None:
    harness = SchedulerHarness(3)
    coordinator = harness.pipeline("a", train=(0,), generation=(0, 1))
    harness.generate("a", "g")
    harness.act()
    coordinator.is_hung = True
    harness.train("a", "t")
    assert [change.rank for change in coordinator.pending_resizes[0].changes] == [0]
    harness.release("a", "r", GENERATION_CLUSTER)
    assert len(coordinator.pending_resizes) == 1
    coordinator.is_hung = False
    harness.act()
    assert [change.rank for change in coordinator.pending_resizes[0].changes] == [1]


def test_an_engine_wakes_only_when_its_gpus_are_actually_clear() -> None:
    harness = generating()
    harness.pipeline("b", generation=(0, 1))
    harness.coordinators["a"].is_hung = True
    harness.generate("b", "g2")
    harness.run(8)  # a has more than its share by now, and its sleep was ordered
    assert harness.scheduler.state.counts["resizes"] == 2
    assert not harness.coordinators["b"].num_received
    harness.coordinators["a"].is_hung = False
    harness.run(2)
    assert harness.state("g2") is TicketState.GRANTED


@pytest.mark.parametrize("fault", ["error", "late", "lost"])
def test_a_failed_resize_quarantines_its_pipeline_and_fences_its_gpus(fault: str) -> None:
    harness = generating()
    coordinator = harness.coordinators["a"]
    harness.train("a", "t")
    if fault == "error":
        coordinator.error = "no answer from http://e:1"
        harness.act()
    elif fault == "lost":
        coordinator.is_hung = True
        coordinator.move(0, WorkerPhase.LOST)
        harness.beat()
    else:
        coordinator.is_hung = True
        harness.run(harness.settings.resize_deadline_s + harness.settings.slack_s + 1)
    assert harness.of("a").phase is QUARANTINED
    assert harness.state("t") is TicketState.QUEUED
    assert {worker.phase for worker in harness.of("a").workers} == {WorkerPhase.LOST}
    assert set(harness.scheduler.state.fleet.owners) == {0, 1}
    assert "quarantined" in _resent(harness, "t")


def _resent(harness: SchedulerHarness, key: str) -> str:
    harness.send(harness.open[key], b"hooks-a")
    return harness.moved[key].reason


def test_a_pipeline_is_readmitted_a_while_after_its_fault_is_gone() -> None:
    harness = generating()
    coordinator = harness.coordinators["a"]
    coordinator.error = "an engine does not answer"
    harness.train("a", "t")
    harness.act()
    coordinator.error = ""
    harness.beat()
    assert harness.of("a").phase is QUARANTINED
    harness.run(3)
    assert harness.of("a").phase is ADMITTED
    harness.wait_for("t", TicketState.GRANTED)
    assert harness.awake("a") == [1]


def test_each_fault_doubles_the_time_until_a_pipeline_is_readmitted() -> None:
    harness = generating()
    coordinator = harness.coordinators["a"]
    coordinator.error = "an engine does not answer"
    harness.train("a", "t")
    harness.run(60)
    num_faults = harness.scheduler.state.counts["pipeline.quarantined"]
    assert 4 <= num_faults <= 7
    coordinator.error = ""
    harness.wait_for("t", TicketState.GRANTED, harness.settings.max_retry_s + 5)
    assert harness.scheduler.state.pipeline_records["a"].num_faults == 0


def test_a_lost_worker_keeps_its_gpus_and_a_request_for_them_returns_to_its_place() -> None:
    harness = generating()
    harness.pipeline("b", train=(0, 1), generation=())
    harness.pipeline("c", train=(0,), generation=())
    harness.coordinators["a"].is_hung = True
    harness.train("b", "b1")
    harness.train("c", "c1")
    assert harness.of("b").holds
    harness.coordinators["a"].move(0, WorkerPhase.LOST)
    harness.beat()
    assert not harness.of("b").holds
    assert list(harness.scheduler.state.fleet.requests) == ["b1", "c1"]
    coordinator = harness.coordinators["a"]
    coordinator.is_hung = False
    coordinator.move(0, WorkerPhase.ASLEEP)
    harness.run(3)
    assert harness.state("b1") is TicketState.GRANTED
    assert harness.state("c1") is TicketState.QUEUED


def test_one_lost_engine_fences_its_own_gpus_alone_once_the_others_are_known() -> None:
    harness = SchedulerHarness()
    harness.pipeline("a", train=())
    harness.pipeline("b", train=(1, 2, 3), generation=(0, 1, 2, 3))
    harness.generate("a", "g")
    harness.run(2)
    assert harness.awake("a") == [0, 1, 2, 3]
    harness.coordinators["a"].move(0, WorkerPhase.LOST)
    harness.run(3)
    assert harness.of("a").phase is PipelinePhase.QUARANTINED
    assert harness.awake("a") == []
    assert set(harness.scheduler.state.occupants) == {0}
    harness.train("b", "t")
    harness.wait_for("t", TicketState.GRANTED)
    assert harness.of("a").phase is PipelinePhase.QUARANTINED


def test_a_silent_coordinator_is_fenced_and_the_others_continue() -> None:
    harness = generating()
    harness.coordinators["a"].is_silent = True
    harness.run(harness.settings.coordinator_grace_s + 2)
    assert harness.of("a").phase is QUARANTINED
    harness.pipeline("b", train=(1,), generation=())
    assert harness.train("b", "b1") is TicketState.QUEUED
    harness.coordinators["a"].is_silent = False
    harness.wait_for("b1", TicketState.GRANTED)


def test_a_pipeline_whose_coordinator_never_reported_evicts_no_other() -> None:
    harness = generating()
    harness.pipeline("b", generation=(0, 1)).is_silent = True
    harness.scheduler.state.links["b"].is_known = False
    harness.run(harness.settings.coordinator_grace_s + 1)
    assert harness.generate("b", "b1") is TicketState.QUEUED
    harness.run(20)
    assert harness.awake("a") == [0, 1]
    assert harness.scheduler.state.counts["evictions"] == 0
    harness.coordinators["b"].is_silent = False
    harness.wait_for("b1", TicketState.GRANTED)


def test_outdated_reports_are_ignored() -> None:
    harness = generating()
    coordinator = harness.coordinators["a"]
    before = coordinator.hello()
    harness.release("a", "r", GENERATION_CLUSTER)
    harness.act()
    assert harness.state("r") is TicketState.RELEASED
    harness.send(before, coordinator.route)
    harness.send(WorkersResized("a", 1, before.workers), coordinator.route)
    assert {worker.phase for worker in harness.of("a").workers} == {WorkerPhase.ASLEEP}
    assert harness.of("a").phase is ADMITTED


def test_a_restarted_coordinator_is_trusted_and_earlier_reports_are_not() -> None:
    harness = generating()
    before = harness.coordinators["a"].hello()
    again = Coordinator("a", 2, started_s=2.0)
    again.move(1, WorkerPhase.AWAKE)  # the user put the other engine to sleep
    harness.coordinators["a"] = again
    harness.send(again.hello(), again.route)
    phases = [WorkerPhase.WAKING, WorkerPhase.AWAKE]
    assert [worker.phase for worker in harness.of("a").workers] == phases
    harness.send(before, b"coordinator-a")
    assert [worker.phase for worker in harness.of("a").workers] == phases
    harness.run(5)
    assert harness.awake("a") == [0, 1]


def test_a_coordinator_that_restarts_during_a_resize_receives_it_again() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", generation=(0, 1))
    harness.generate("a", "g")
    again = Coordinator("a", 2, started_s=2.0)
    harness.coordinators["a"] = again
    before = again.hello()
    harness.send(before, again.route)
    harness.act()
    assert harness.state("g") is TicketState.GRANTED
    harness.send(before, again.route)  # sent before it received the resize
    assert {worker.phase for worker in harness.of("a").workers} == {WorkerPhase.AWAKE}


def test_an_engine_that_lost_its_resize_sleeps_before_its_pipeline_is_readmitted() -> None:
    harness = generating()
    again = Coordinator("a", 2)  # with the same start time, so that the restart is not visible
    again.move(0, WorkerPhase.AWAKE)
    harness.coordinators["a"] = again
    harness.run(harness.settings.slack_s + 8)
    assert harness.of("a").phase is ADMITTED
    assert harness.scheduler.state.counts["pipeline.quarantined"] == 1
    assert {truth.epoch > 1 for truth in again.truths} == {True}


def test_gpus_of_an_engine_that_should_sleep_are_not_promised() -> None:
    harness = SchedulerHarness(2)
    coordinator = harness.pipeline("a", train=(), generation=(0,))
    harness.generate("a", "g")
    harness.run(2)
    harness.release("a", "r", GENERATION_CLUSTER)
    harness.run(2)
    coordinator.truths[0] = WorkerTruth(0, WorkerPhase.AWAKE, 0)  # it forgot its last resize
    coordinator.is_hung = True
    harness.run(harness.settings.slack_s + 3)
    harness.pipeline("b", train=(), generation=(0, 1), max_gpus=1)
    harness.generate("b", "b-g")
    harness.wait_for("b-g", TicketState.GRANTED, 5)
    assert harness.awake("b") == [1]
    coordinator.is_hung = False
    harness.run(80)
    assert harness.awake("a") == []


def test_a_coordinator_that_outlives_its_registration_receives_newer_epochs() -> None:
    harness = SchedulerHarness(1)
    coordinator = harness.pipeline("a", train=(), generation=(0,))
    for step in range(3):
        harness.generate("a", f"g{step}", step=step)
        harness.run(2)
        harness.release("a", f"r{step}", GENERATION_CLUSTER)
        harness.run(2)
    truths = coordinator.truths
    harness.send(UnregisterPipeline("leave", "a"))
    harness.run(2)
    assert harness.answers["leave"].ok
    for key in ("register-a", "admit-a"):
        del harness.scheduler.state.answers[key]
    harness.pipeline("a", train=(), generation=(0,)).truths = truths
    harness.beat()
    harness.generate("a", "again")
    harness.run(2)
    assert harness.state("again") is TicketState.GRANTED
    assert harness.scheduler.state.counts["pipeline.quarantined"] == 0


def test_an_engine_that_is_awake_from_the_start_stays_awake_on_its_own_gpus() -> None:
    harness = SchedulerHarness(2)
    coordinator = harness.pipeline("a", generation=(0, 1))
    coordinator.move(0, WorkerPhase.AWAKE)
    harness.beat()
    assert harness.of("a").workers[0].phase is WorkerPhase.AWAKE
    assert harness.generate("a", "g") is TicketState.GRANTED


def test_an_engine_that_is_awake_on_gpus_of_another_must_sleep() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", train=(0,), generation=())
    harness.train("a", "t")
    coordinator = harness.pipeline("b", generation=(0, 1))
    stray = msgspec.structs.replace(coordinator.truths[0], phase=WorkerPhase.AWAKE)
    harness.send(CoordinatorHello("b", (stray, coordinator.truths[1]), 1.0), coordinator.route)
    assert harness.of("b").phase is QUARANTINED
    assert [(c.rank, c.wakes) for c in coordinator.pending_resizes[0].changes] == [(0, False)]
    harness.run(5)
    assert harness.of("b").phase is ADMITTED


def test_workers_of_a_dead_node_are_lost_and_their_pipeline_continues_elsewhere() -> None:
    harness = SchedulerHarness(2)
    harness.send(JoinNode("n", "n1", 2))
    harness.pipeline("a", generation=(0, 1, 2, 3))
    harness.generate("a", "g", target=4)
    harness.act()
    assert harness.awake("a") == [0, 1, 2, 3]
    for rank in (2, 3):
        harness.coordinators["a"].move(rank, WorkerPhase.LOST)
    harness.run(harness.settings.node_grace_s + 2)
    phases = [worker.phase for worker in harness.of("a").workers]
    assert phases == [WorkerPhase.AWAKE] * 2 + [WorkerPhase.LOST] * 2
    assert harness.of("a").phase in (ADMITTED, QUARANTINED)
    for rank in (2, 3):
        harness.coordinators["a"].move(rank, WorkerPhase.ASLEEP)
    for _ in range(8):
        harness.send(NodeBeat("n1"))
        harness.run(0.5)
    assert harness.of("a").phase is ADMITTED
    assert harness.awake("a") == [0, 1, 2, 3]


def test_a_run_is_active_while_its_coordinator_reports() -> None:
    harness = generating()
    assert harness.scheduler.explain_context().live_coordinators == {"a"}
    harness.coordinators["a"].is_silent = True
    harness.run(LIVE_S)
    assert harness.scheduler.explain_context().live_coordinators == frozenset()
    harness.coordinators["a"].is_silent = False
    harness.run(1.0)
    assert harness.scheduler.explain_context().live_coordinators == {"a"}
    harness.send(KillPipeline("k", "a"))
    assert harness.scheduler.explain_context().live_coordinators == frozenset()


@pytest.mark.parametrize("started_s", [float("inf"), float("-inf"), float("nan"), 1e300, -1.0])
def test_a_coordinator_with_an_invalid_start_time_is_refused_and_blocks_no_later_one(
    started_s: float,
) -> None:
    harness = SchedulerHarness()
    harness.pipeline("a", generation=(0,))
    before = harness.scheduler.state.pipeline_records["a"].started_s
    harness.send(CoordinatorHello("a", (), started_s), b"stranger")
    assert harness.scheduler.state.pipeline_records["a"].started_s == before
