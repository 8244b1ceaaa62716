"""Ownership of GPUs during failures: promises that are withdrawn, and promises that must be
kept.

Each test was added for a mutation of the service that no other test noticed.
"""

import msgspec

from rollmesh.scheduler.planning.state import FIXED, Owner, PipelinePhase
from rollmesh.scheduler.service.state import IntentKind
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    JoinNode,
    KillPipeline,
    TicketState,
    UnregisterPipeline,
    WithdrawRequest,
    WorkerPhase,
    WorkersResized,
    WorkerTruth,
)
from tests.unit.scheduler.service.harness import SETTINGS, TRAIN, SchedulerHarness

GRANTED, QUEUED = TicketState.GRANTED, TicketState.QUEUED
QUARANTINED, ADMITTED = PipelinePhase.QUARANTINED, PipelinePhase.ADMITTED
AWAKE, ASLEEP, LOST = WorkerPhase.AWAKE, WorkerPhase.ASLEEP, WorkerPhase.LOST


def phases(harness: SchedulerHarness, name: str) -> list[WorkerPhase]:
    return [worker.phase for worker in harness.of(name).workers]


def kinds(harness: SchedulerHarness, name: str) -> list[tuple[IntentKind, int]]:
    intents = harness.scheduler.intents.of(name)
    return [(each.kind, each.rank) for each in intents]


def waiting_for_a() -> SchedulerHarness:
    """Return a fleet where pipeline a hangs on GPU 0 and must leave it for b's training on GPUs
    0 and 1.
    """
    harness = SchedulerHarness(3)
    harness.pipeline("a", train=(), generation=(0,))
    harness.pipeline("b", train=(0, 1), generation=(2,))
    harness.generate("a", "g")
    harness.act()
    harness.coordinators["a"].is_hung = True
    assert harness.train("b", "t") is QUEUED
    return harness


def stray(harness: SchedulerHarness, gpu: int) -> None:
    """Add a pipeline c with an engine that is awake on `gpu` without an order to wake."""
    coordinator = harness.pipeline("c", train=(), generation=(gpu,))
    coordinator.is_hung = True
    coordinator.move(0, AWAKE)
    harness.send(coordinator.hello(), coordinator.route)


# strays


def test_a_stray_engine_on_a_promised_gpu_must_sleep_first() -> None:
    harness = waiting_for_a()
    stray(harness, 1)
    assert harness.of("c").phase is QUARANTINED
    harness.coordinators["a"].is_hung = False
    harness.run(2)
    assert harness.state("t") is QUEUED, "c is still on GPU 1"
    harness.coordinators["c"].is_hung = False
    harness.wait_for("t", GRANTED)
    assert harness.awake("c") == []


def test_a_stray_engine_with_a_promise_of_its_gpu_does_not_count_as_woken() -> None:
    harness = SchedulerHarness(1)
    harness.pipeline("a", train=(), generation=(0,))
    coordinator = harness.pipeline("c", train=(), generation=(0,))
    harness.generate("a", "g")
    harness.act()
    harness.coordinators["a"].is_hung = True
    harness.generate("c", "g-c")
    for _ in range(40):
        if kinds(harness, "c"):
            break
        harness.run(0.25)
    assert kinds(harness, "c") == [(IntentKind.WAKE, 0)]
    coordinator.is_hung = True
    coordinator.move(0, AWAKE)
    harness.send(coordinator.hello(), coordinator.route)
    assert harness.of("c").phase is QUARANTINED
    assert harness.state("g-c") is QUEUED


def test_recovery_does_not_admit_a_pipeline_that_was_never_admitted() -> None:
    harness = SchedulerHarness(1)
    coordinator = harness.pipeline("a", train=(), generation=(0,))
    harness.of("a").phase = PipelinePhase.REGISTERED
    coordinator.move(0, LOST)
    harness.beat()
    assert harness.scheduler.state.pipeline_records["a"].why
    coordinator.move(0, ASLEEP)
    harness.run(5)
    assert not harness.scheduler.state.pipeline_records["a"].why
    assert harness.of("a").phase is PipelinePhase.REGISTERED


# promises


def test_a_promised_cluster_is_not_a_worker_to_wake() -> None:
    harness = waiting_for_a()
    coordinator = harness.coordinators["b"]
    harness.generate("b", "g-b")
    assert [[c.rank for c in each.changes] for each in coordinator.pending_resizes] == [[0]]
    assert kinds(harness, "b") == [(IntentKind.GRANT, FIXED), (IntentKind.WAKE, 0)]


def test_only_the_promise_that_cannot_be_kept_is_withdrawn() -> None:
    harness = waiting_for_a()
    harness.coordinators["b"].is_hung = True
    harness.generate("b", "g-b")
    kept = next(each for each in harness.scheduler.intents.of("b") if each.rank == 0)
    harness.coordinators["a"].move(0, LOST)
    harness.beat()
    assert harness.scheduler.intents.of("b") == [kept], "the engine has received its wake"
    assert harness.scheduler.state.fleet.owners[0] == Owner("a", GENERATION_CLUSTER, 0)
    assert list(harness.scheduler.state.fleet.requests) == ["t"]


def test_an_engine_with_only_a_promised_gpu_is_not_lost_when_its_pipeline_fails() -> None:
    harness = SchedulerHarness(2)
    harness.pipeline("a", train=(), generation=(0, 1))
    coordinator = harness.pipeline("b", train=(), generation=(0, 1))
    harness.generate("a", "g")
    harness.run(2)
    harness.coordinators["a"].is_hung = True
    harness.generate("b", "g-b")
    for _ in range(40):
        if kinds(harness, "b"):
            break
        harness.run(0.25)
    (promised,) = [rank for _, rank in kinds(harness, "b")]
    coordinator.move(1 - promised, LOST)
    harness.beat()
    assert harness.of("b").phase is QUARANTINED
    assert kinds(harness, "b") == []
    assert phases(harness, "b")[promised] is ASLEEP
    assert promised not in harness.scheduler.state.fleet.owners


def test_intents_behind_a_failed_resize_are_cancelled_with_it() -> None:
    harness = SchedulerHarness(2)
    coordinator = harness.pipeline("a", train=(), generation=(0, 1))
    for number, gpu in enumerate((0, 1)):
        harness.pipeline(f"t{number}", train=(gpu,), generation=())
    harness.generate("a", "g")
    harness.act()
    coordinator.is_hung = True
    harness.train("t0", "t0")
    harness.release("a", "r", GENERATION_CLUSTER)
    assert kinds(harness, "a") == [(IntentKind.SLEEP, 0), (IntentKind.SLEEP, 1)]
    coordinator.move(0, LOST)
    harness.beat()
    assert [each for each in kinds(harness, "a") if each == (IntentKind.SLEEP, 0)] == []
    assert set(harness.scheduler.state.occupants) == {0, 1}
    coordinator.move(0, ASLEEP)
    coordinator.is_hung = False
    harness.wait_for("t0", GRANTED)
    assert harness.train("t1", "t1") is GRANTED


def test_a_request_from_before_its_pipeline_left_is_refused_when_resent() -> None:
    harness = SchedulerHarness(1)
    harness.pipeline("a", generation=())
    harness.pipeline("b", generation=())
    harness.train("a", "ta")
    harness.train("b", "tb")
    text = harness.open.pop("tb")
    harness.run(harness.settings.patience_s + 2)  # the request is not resent any more
    harness.send(UnregisterPipeline("u", "b"))
    assert harness.ask(text) is TicketState.REFUSED


def test_a_withdrawal_releases_an_old_grant() -> None:
    harness = SchedulerHarness(1, settings=msgspec.structs.replace(SETTINGS, memory_s=20.0))
    harness.pipeline("a", generation=())
    harness.pipeline("b", generation=())
    harness.train("a", "ta")
    harness.run(30)
    harness.train("b", "tb")
    harness.send(WithdrawRequest("ta"), b"hooks-a")
    assert harness.state("ta") is TicketState.RELEASED
    assert harness.state("tb") is GRANTED


# quarantine


def test_no_pipeline_is_readmitted_before_its_last_resize_is_done() -> None:
    harness = SchedulerHarness(1)
    coordinator = harness.pipeline("a", train=(), generation=(0,))
    harness.pipeline("b", generation=())
    harness.generate("a", "g")
    harness.act()
    coordinator.is_hung = True
    harness.train("b", "t")
    harness.run(harness.settings.resize_deadline_s)
    coordinator.is_silent = True  # so its hello arrives when it may be readmitted
    harness.run(harness.settings.slack_s + harness.settings.retry_s + 2)
    assert harness.of("a").phase is QUARANTINED
    harness.beat()
    coordinator.is_silent = False
    harness.beat()
    assert harness.of("a").phase is QUARANTINED
    assert phases(harness, "a") == [LOST]
    coordinator.is_hung = False
    harness.wait_for("t", GRANTED)


def test_a_sleeping_engine_frees_its_gpu_while_another_is_lost() -> None:
    harness = SchedulerHarness(2)
    coordinator = harness.pipeline("a", train=(), generation=(0, 1))
    harness.pipeline("b", train=(0, 1), generation=())
    harness.generate("a", "g")
    harness.act()
    harness.train("b", "t")
    (resize,) = coordinator.take()
    coordinator.move(0, LOST)
    coordinator.move(1, ASLEEP)
    result = WorkersResized("a", resize.resize_id, tuple(coordinator.truths), "one does not answer")
    harness.send(result, coordinator.route)
    assert phases(harness, "a") == [LOST, LOST]
    num_resizes = harness.scheduler.state.counts["resizes"]
    harness.beat()
    assert phases(harness, "a") == [LOST, ASLEEP]
    assert set(harness.scheduler.state.occupants) == {0}
    assert harness.scheduler.state.counts["resizes"] == num_resizes


def test_two_short_contradictions_are_not_one_long_one() -> None:
    harness = SchedulerHarness(1)
    coordinator = harness.pipeline("a", train=(), generation=(0,))
    harness.generate("a", "g")
    harness.act()
    old = msgspec.structs.replace(coordinator.hello(), workers=(WorkerTruth(0, AWAKE, 0),))
    for _ in range(3):
        harness.send(old, coordinator.route)
        harness.run(harness.settings.slack_s + 1)
    assert harness.scheduler.state.counts["pipeline.quarantined"] == 0


def test_the_cost_of_a_sleep_is_what_the_coordinator_reports() -> None:
    harness = SchedulerHarness(2)
    coordinator = harness.pipeline("a", train=(), generation=(0, 1))
    coordinator.truths[1] = msgspec.structs.replace(coordinator.truths[1], kv_tokens=7)
    harness.beat()
    assert [worker.kv_tokens for worker in harness.of("a").workers] == [0, 7]


# ends of pipelines and nodes


def test_a_pipeline_killed_before_its_wake_leaves_no_promise() -> None:
    harness = SchedulerHarness(1)
    harness.pipeline("a", generation=())
    harness.train("a", "t")
    harness.pipeline("b", train=(0,), generation=(0,))
    harness.generate("b", "g")
    harness.coordinators["b"].is_hung = True
    harness.release("a", "r")
    assert kinds(harness, "b") == [(IntentKind.WAKE, 0)]
    harness.send(KillPipeline("kill", "b"))
    assert kinds(harness, "b") == []
    assert harness.train("a", "t2") is GRANTED
    harness.run(30)
    assert harness.scheduler.state.problems == []
    assert harness.scheduler.state.occupants == {0: Owner("a", TRAIN, FIXED)}


def test_a_dead_node_affects_nothing_on_other_nodes() -> None:
    harness = SchedulerHarness(2)
    harness.send(JoinNode("n", "n1", 2))
    harness.pipeline("a", train=(), generation=(0, 2))
    harness.pipeline("b", train=(1,), generation=(3,))
    harness.pipeline("c", train=(), generation=(1,))
    harness.generate("a", "g")
    harness.generate("c", "g-c")
    harness.act()
    harness.coordinators["c"].is_hung = True
    assert harness.train("b", "t") is QUEUED
    harness.coordinators["b"].is_hung = True
    harness.coordinators["a"].is_silent = True  # a report would restore all of it within a second
    while not any(note.event == "node.lost" for note in harness.notes):
        harness.run(0.25)
    assert phases(harness, "a")[0] is AWAKE
    assert kinds(harness, "b") == [(IntentKind.GRANT, FIXED)]
    assert kinds(harness, "c") == [(IntentKind.SLEEP, 0)]
    harness.coordinators["c"].is_hung = False
    harness.wait_for("t", GRANTED)
