"""A late resize delays no other pipeline, and its own for at most a turn."""

import msgspec
import pytest

from rollmesh.scheduler.planning.state import PipelinePhase
from rollmesh.scheduler.service.state import IntentPhase
from rollmesh.wire.scheduling import GENERATION_CLUSTER, TicketState, WorkerPhase
from tests.unit.scheduler.service.stage import SETTINGS, Stage

SWITCH_S = 2.0
"""The turn of an engine that does not hang, including its messages."""
UNTURNED = msgspec.structs.replace(SETTINGS, turn_s=SETTINGS.resize_deadline_s)
"""The fault: the next resize waits until the one before has ended."""


def phases(stage: Stage, pipeline_id: str) -> list[IntentPhase]:
    intents = stage.scheduler.state.intents.values()
    return [each.phase for each in intents if each.pipeline_id == pipeline_id]


def shared() -> Stage:
    """`well` is awake on two of three GPUs, and `ill` will hang."""
    stage = Stage(3)
    stage.pipeline("ill", train=(), generation=(0, 1, 2))
    stage.pipeline("well", train=(), generation=(1, 2))
    stage.generate("well", "first")
    stage.act()
    stage.coordinators["ill"].is_hung = True
    return stage


def hanging(stage: Stage) -> Stage:
    """Engine 0 of `ill` hangs while it should go to sleep for one that trains; 1 and 2 serve."""
    stage.pipeline("ill", train=(), generation=(0, 1, 2))
    stage.pipeline("first", train=(0,), generation=())
    stage.pipeline("second", train=(1,), generation=())
    stage.generate("ill", "g")
    stage.run(2)
    assert stage.awake("ill") == [0, 1, 2]
    stage.coordinators["ill"].hung = {0}
    stage.train("first", "t1")
    stage.run(1)
    assert phases(stage, "ill") == [IntentPhase.SENT]
    return stage


def test_a_busy_engine_is_promised_nothing_more() -> None:
    stage = shared()
    stage.generate("ill", "g")
    stage.release("well", "r", GENERATION_CLUSTER)
    stage.beat()
    assert phases(stage, "ill") == [IntentPhase.SENT]
    stage.coordinators["ill"].is_hung = False
    stage.wait_for("g", TicketState.GRANTED)
    stage.run(5)
    assert stage.awake("ill") == [0, 1, 2], "it is busy no more"


def test_a_hung_engine_delays_requests_for_others_for_its_turn_only() -> None:
    stage = hanging(Stage(3))
    stage.train("second", "t2")
    stage.wait_for("t2", TicketState.GRANTED, SETTINGS.turn_s + SWITCH_S)
    assert stage.state("t1") is TicketState.QUEUED
    assert stage.of("ill").phase is PipelinePhase.ADMITTED
    assert stage.awake("ill") == [0, 2]


def test_without_turns_it_is_held_up_to_the_deadline() -> None:
    stage = hanging(Stage(3, settings=UNTURNED))
    stage.train("second", "t2")
    stage.run(SETTINGS.turn_s + SWITCH_S)
    assert stage.state("t2") is TicketState.QUEUED


def test_one_that_hangs_is_lost_in_the_end_and_its_gpus_alone_are_fenced() -> None:
    stage = hanging(Stage(3))
    stage.train("second", "t2")
    stage.run(SETTINGS.resize_deadline_s + SETTINGS.slack_s)
    assert stage.of("ill").phase is PipelinePhase.QUARANTINED
    assert stage.of("ill").workers[0].phase is WorkerPhase.LOST
    assert stage.state("t1") is TicketState.QUEUED
    stage.run(5)
    assert stage.awake("ill") == [0]
    stage.coordinators["ill"].hung = set()
    stage.wait_for("t1", TicketState.GRANTED)


def test_an_engine_that_is_slow_comes_up_after_its_turn_as_if_in_it() -> None:
    stage = shared()
    ill = stage.coordinators["ill"]
    ill.is_hung, ill.hung = False, {0}
    stage.generate("ill", "g")
    stage.release("well", "r", GENERATION_CLUSTER)
    stage.run(SETTINGS.turn_s + SWITCH_S)
    assert stage.awake("ill") == [1, 2], "its GPUs are not kept from it meanwhile"
    assert phases(stage, "ill") == [IntentPhase.SENT]
    ill.hung = set()
    stage.run(2)
    assert stage.awake("ill") == [0, 1, 2]
    assert stage.scheduler.state.counts["pipeline.quarantined"] == 0


@pytest.mark.parametrize(("wakes", "deadline_s"), [(False, 12.0), (True, 20.0)])
def test_the_deadline_is_that_of_the_deed(wakes: bool, deadline_s: float) -> None:
    stage = Stage(1, settings=msgspec.structs.replace(SETTINGS, sleep_deadline_s=12.0))
    coordinator = stage.pipeline("a", train=(), generation=(0,))
    if not wakes:
        stage.generate("a", "g")
        stage.run(2)
    coordinator.hung = {0}
    if wakes:
        stage.generate("a", "g")
    else:
        stage.release("a", "r", GENERATION_CLUSTER)
    [resize] = coordinator.pending_resizes
    assert resize.deadline_s == deadline_s
    stage.run(deadline_s + SETTINGS.slack_s - 1.0)
    assert stage.scheduler.state.counts["pipeline.quarantined"] == 0
    stage.run(2.0)
    assert stage.scheduler.state.counts["pipeline.quarantined"] == 1


def test_resizes_under_way_are_resent_to_coordinators_that_missed_them() -> None:
    stage = hanging(Stage(3))
    stage.train("second", "t2")
    ill = stage.coordinators["ill"]
    ill.hung = {0, 1}
    stage.run(SETTINGS.turn_s + 1.0)
    result = {each.resize_id: each.changes for each in ill.pending_resizes}
    assert len(result) == 2
    ill.pending_resizes.clear()
    for rank in (0, 1):  # it forgets: both were lost on the way
        ill.truths[rank] = msgspec.structs.replace(ill.truths[rank], epoch=0)
    stage.run(1.5)
    assert {each.resize_id: each.changes for each in ill.pending_resizes} == result
    ill.hung = set()
    stage.wait_for("t1", TicketState.GRANTED)
    stage.wait_for("t2", TicketState.GRANTED)
    assert stage.scheduler.state.counts["pipeline.quarantined"] == 0


def test_of_two_resizes_under_way_what_was_not_answered_stays_in_doubt() -> None:
    stage = hanging(Stage(3))
    stage.train("second", "t2")
    ill = stage.coordinators["ill"]
    ill.hung = {0, 1}
    stage.run(SETTINGS.turn_s + 1.0)
    assert phases(stage, "ill") == [IntentPhase.SENT, IntentPhase.SENT]
    ill.hung, ill.error = {0}, "http://e:1 does not answer"
    stage.act()
    assert stage.of("ill").phase is PipelinePhase.QUARANTINED
    assert stage.scheduler.state.pipeline_records["ill"].unsure == [0]


def test_in_quarantine_too_one_that_hangs_keeps_only_its_own_gpus() -> None:
    stage = hanging(Stage(3))
    ill = stage.coordinators["ill"]
    ill.move(2, WorkerPhase.LOST)
    stage.beat()
    ill.hung = {0, 1}  # of what is told from now on, too: 0 and 1 are to sleep
    stage.run(2)
    ill.move(2, WorkerPhase.ASLEEP)
    stage.pipeline("third", train=(2,), generation=())
    stage.train("third", "t3")
    stage.wait_for("t3", TicketState.GRANTED, 5)
    assert stage.of("ill").phase is PipelinePhase.QUARANTINED
