"""Ownership of GPUs while something fails: promises that are broken, and those that must not be.

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
from tests.unit.scheduler.service.stage import SETTINGS, TRAIN, Stage

GRANTED, QUEUED = TicketState.GRANTED, TicketState.QUEUED
QUARANTINED, ADMITTED = PipelinePhase.QUARANTINED, PipelinePhase.ADMITTED
AWAKE, ASLEEP, LOST = WorkerPhase.AWAKE, WorkerPhase.ASLEEP, WorkerPhase.LOST


def phases(stage: Stage, name: str) -> list[WorkerPhase]:
    return [worker.phase for worker in stage.of(name).workers]


def kinds(stage: Stage, name: str) -> list[tuple[IntentKind, int]]:
    intents = stage.scheduler.intents.of(name)
    return [(each.kind, each.rank) for each in intents]


def waiting_for_a() -> Stage:
    """Pipeline a is on GPU 0, and hangs when it must leave it for b's training on 0 and 1."""
    stage = Stage(3)
    stage.pipeline("a", train=(), generation=(0,))
    stage.pipeline("b", train=(0, 1), generation=(2,))
    stage.generate("a", "g")
    stage.act()
    stage.coordinators["a"].is_hung = True
    assert stage.train("b", "t") is QUEUED
    return stage


def stray(stage: Stage, gpu: int) -> None:
    """An engine of pipeline c is awake on that GPU without an order to wake."""
    coordinator = stage.pipeline("c", train=(), generation=(gpu,))
    coordinator.is_hung = True
    coordinator.move(0, AWAKE)
    stage.send(coordinator.hello(), coordinator.route)


# strays


def test_a_stray_on_a_promised_gpu_must_go_first() -> None:
    stage = waiting_for_a()
    stray(stage, 1)
    assert stage.of("c").phase is QUARANTINED
    stage.coordinators["a"].is_hung = False
    stage.run(2)
    assert stage.state("t") is QUEUED, "c is still on GPU 1"
    stage.coordinators["c"].is_hung = False
    stage.wait_for("t", GRANTED)
    assert stage.awake("c") == []


def test_a_stray_that_is_promised_its_gpu_is_not_mistaken_for_a_woken_engine() -> None:
    stage = Stage(1)
    stage.pipeline("a", train=(), generation=(0,))
    coordinator = stage.pipeline("c", train=(), generation=(0,))
    stage.generate("a", "g")
    stage.act()
    stage.coordinators["a"].is_hung = True
    stage.generate("c", "g-c")
    for _ in range(40):
        if kinds(stage, "c"):
            break
        stage.run(0.25)
    assert kinds(stage, "c") == [(IntentKind.WAKE, 0)]
    coordinator.is_hung = True
    coordinator.move(0, AWAKE)
    stage.send(coordinator.hello(), coordinator.route)
    assert stage.of("c").phase is QUARANTINED
    assert stage.state("g-c") is QUEUED


def test_a_pipeline_that_was_never_admitted_is_not_by_being_well_again() -> None:
    stage = Stage(1)
    coordinator = stage.pipeline("a", train=(), generation=(0,))
    stage.of("a").phase = PipelinePhase.REGISTERED
    coordinator.move(0, LOST)
    stage.beat()
    assert stage.scheduler.state.pipeline_records["a"].why
    coordinator.move(0, ASLEEP)
    stage.run(5)
    assert not stage.scheduler.state.pipeline_records["a"].why
    assert stage.of("a").phase is PipelinePhase.REGISTERED


# promises


def test_a_cluster_that_is_promised_is_not_taken_for_a_worker_to_wake() -> None:
    stage = waiting_for_a()
    coordinator = stage.coordinators["b"]
    stage.generate("b", "g-b")
    assert [[c.rank for c in each.changes] for each in coordinator.pending_resizes] == [[0]]
    assert kinds(stage, "b") == [(IntentKind.GRANT, FIXED), (IntentKind.WAKE, 0)]


def test_of_two_promises_the_one_that_cannot_be_kept_is_broken() -> None:
    stage = waiting_for_a()
    stage.coordinators["b"].is_hung = True
    stage.generate("b", "g-b")
    kept = next(each for each in stage.scheduler.intents.of("b") if each.rank == 0)
    stage.coordinators["a"].move(0, LOST)
    stage.beat()
    assert stage.scheduler.intents.of("b") == [kept], "it received a wake, and wakes"
    assert stage.scheduler.state.fleet.owners[0] == Owner("a", GENERATION_CLUSTER, 0)
    assert list(stage.scheduler.state.fleet.requests) == ["t"]


def test_an_engine_with_only_a_promised_gpu_loses_none_when_its_pipeline_fails() -> None:
    stage = Stage(2)
    stage.pipeline("a", train=(), generation=(0, 1))
    coordinator = stage.pipeline("b", train=(), generation=(0, 1))
    stage.generate("a", "g")
    stage.run(2)
    stage.coordinators["a"].is_hung = True
    stage.generate("b", "g-b")
    for _ in range(40):
        if kinds(stage, "b"):
            break
        stage.run(0.25)
    (promised,) = [rank for _, rank in kinds(stage, "b")]
    coordinator.move(1 - promised, LOST)
    stage.beat()
    assert stage.of("b").phase is QUARANTINED
    assert kinds(stage, "b") == []
    assert phases(stage, "b")[promised] is ASLEEP
    assert promised not in stage.scheduler.state.fleet.owners


def test_what_waits_behind_a_resize_that_fails_is_called_off_with_it() -> None:
    stage = Stage(2)
    coordinator = stage.pipeline("a", train=(), generation=(0, 1))
    for number, gpu in enumerate((0, 1)):
        stage.pipeline(f"t{number}", train=(gpu,), generation=())
    stage.generate("a", "g")
    stage.act()
    coordinator.is_hung = True
    stage.train("t0", "t0")
    stage.release("a", "r", GENERATION_CLUSTER)
    assert kinds(stage, "a") == [(IntentKind.SLEEP, 0), (IntentKind.SLEEP, 1)]
    coordinator.move(0, LOST)
    stage.beat()
    assert [each for each in kinds(stage, "a") if each == (IntentKind.SLEEP, 0)] == []
    assert set(stage.scheduler.state.occupants) == {0, 1}
    coordinator.move(0, ASLEEP)
    coordinator.is_hung = False
    stage.wait_for("t0", GRANTED)
    assert stage.train("t1", "t1") is GRANTED


def test_a_request_from_before_its_pipeline_left_is_refused_when_resent() -> None:
    stage = Stage(1)
    stage.pipeline("a", generation=())
    stage.pipeline("b", generation=())
    stage.train("a", "ta")
    stage.train("b", "tb")
    text = stage.open.pop("tb")
    stage.run(stage.settings.patience_s + 2)  # it is not resent any more
    stage.send(UnregisterPipeline("u", "b"))
    assert stage.ask(text) is TicketState.REFUSED


def test_a_withdrawal_gives_back_what_was_granted_long_ago() -> None:
    stage = Stage(1, settings=msgspec.structs.replace(SETTINGS, memory_s=20.0))
    stage.pipeline("a", generation=())
    stage.pipeline("b", generation=())
    stage.train("a", "ta")
    stage.run(30)
    stage.train("b", "tb")
    stage.send(WithdrawRequest("ta"), b"hooks-a")
    assert stage.state("ta") is TicketState.RELEASED
    assert stage.state("tb") is GRANTED


# quarantine


def test_no_engine_is_let_in_before_its_last_resize_is_done() -> None:
    stage = Stage(1)
    coordinator = stage.pipeline("a", train=(), generation=(0,))
    stage.pipeline("b", generation=())
    stage.generate("a", "g")
    stage.act()
    coordinator.is_hung = True
    stage.train("b", "t")
    stage.run(stage.settings.resize_deadline_s)
    coordinator.is_silent = True  # so that its hello arrives when it may be let in again
    stage.run(stage.settings.slack_s + stage.settings.retry_s + 2)
    assert stage.of("a").phase is QUARANTINED
    stage.beat()
    coordinator.is_silent = False
    stage.beat()
    assert stage.of("a").phase is QUARANTINED
    assert phases(stage, "a") == [LOST]
    coordinator.is_hung = False
    stage.wait_for("t", GRANTED)


def test_an_engine_that_is_known_to_sleep_frees_its_gpu_while_another_is_lost() -> None:
    stage = Stage(2)
    coordinator = stage.pipeline("a", train=(), generation=(0, 1))
    stage.pipeline("b", train=(0, 1), generation=())
    stage.generate("a", "g")
    stage.act()
    stage.train("b", "t")
    (resize,) = coordinator.take()
    coordinator.move(0, LOST)
    coordinator.move(1, ASLEEP)
    result = WorkersResized("a", resize.resize_id, tuple(coordinator.truths), "one does not answer")
    stage.send(result, coordinator.route)
    assert phases(stage, "a") == [LOST, LOST]
    num_resizes = stage.scheduler.state.counts["resizes"]
    stage.beat()
    assert phases(stage, "a") == [LOST, ASLEEP]
    assert set(stage.scheduler.state.occupants) == {0}
    assert stage.scheduler.state.counts["resizes"] == num_resizes


def test_two_moments_of_doubt_are_not_one_long_one() -> None:
    stage = Stage(1)
    coordinator = stage.pipeline("a", train=(), generation=(0,))
    stage.generate("a", "g")
    stage.act()
    old = msgspec.structs.replace(coordinator.hello(), workers=(WorkerTruth(0, AWAKE, 0),))
    for _ in range(3):
        stage.send(old, coordinator.route)
        stage.run(stage.settings.slack_s + 1)
    assert stage.scheduler.state.counts["pipeline.quarantined"] == 0


def test_what_a_sleep_would_lose_is_what_the_coordinator_says() -> None:
    stage = Stage(2)
    coordinator = stage.pipeline("a", train=(), generation=(0, 1))
    coordinator.truths[1] = msgspec.structs.replace(coordinator.truths[1], kv_tokens=7)
    stage.beat()
    assert [worker.kv_tokens for worker in stage.of("a").workers] == [0, 7]


# ends


def test_a_pipeline_killed_before_its_wake_leaves_no_promise() -> None:
    stage = Stage(1)
    stage.pipeline("a", generation=())
    stage.train("a", "t")
    stage.pipeline("b", train=(0,), generation=(0,))
    stage.generate("b", "g")
    stage.coordinators["b"].is_hung = True
    stage.release("a", "r")
    assert kinds(stage, "b") == [(IntentKind.WAKE, 0)]
    stage.send(KillPipeline("kill", "b"))
    assert kinds(stage, "b") == []
    assert stage.train("a", "t2") is GRANTED
    stage.run(30)
    assert stage.scheduler.state.problems == []
    assert stage.scheduler.state.occupants == {0: Owner("a", TRAIN, FIXED)}


def test_a_node_that_dies_takes_nothing_with_it_that_is_elsewhere() -> None:
    stage = Stage(2)
    stage.send(JoinNode("n", "n1", 2))
    stage.pipeline("a", train=(), generation=(0, 2))
    stage.pipeline("b", train=(1,), generation=(3,))
    stage.pipeline("c", train=(), generation=(1,))
    stage.generate("a", "g")
    stage.generate("c", "g-c")
    stage.act()
    stage.coordinators["c"].is_hung = True
    assert stage.train("b", "t") is QUEUED
    stage.coordinators["b"].is_hung = True
    stage.coordinators["a"].is_silent = True  # its report would repair all of it in a second
    while not any(note.event == "node.lost" for note in stage.notes):
        stage.run(0.25)
    assert phases(stage, "a")[0] is AWAKE
    assert kinds(stage, "b") == [(IntentKind.GRANT, FIXED)]
    assert kinds(stage, "c") == [(IntentKind.SLEEP, 0)]
    stage.coordinators["c"].is_hung = False
    stage.wait_for("t", GRANTED)
