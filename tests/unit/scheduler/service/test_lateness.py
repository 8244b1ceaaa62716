"""Who is late with a resize holds up nobody else."""

from rollmesh.scheduler.service.records import IntentPhase
from rollmesh.wire.scheduling import GENERATION_CLUSTER, TicketState
from tests.unit.scheduler.service.stage import Stage


def phases(stage: Stage, pipeline_id: str) -> list[IntentPhase]:
    intents = stage.scheduler.book.intents.values()
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


def test_who_is_busy_is_promised_nothing_more() -> None:
    stage = shared()
    stage.generate("ill", "g")
    stage.release("well", "r", GENERATION_CLUSTER)
    stage.beat()
    assert phases(stage, "ill") == [IntentPhase.SENT]
    stage.coordinators["ill"].is_hung = False
    stage.wait_for("g", TicketState.GRANTED)
    stage.run(5)
    assert stage.awake("ill") == [0, 1, 2], "it is busy no more"


def test_what_a_late_pipeline_was_promised_goes_to_who_can_use_it() -> None:
    stage = shared()
    stage.release("well", "r", GENERATION_CLUSTER)
    stage.generate("ill", "g")
    stage.beat()
    assert phases(stage, "ill") == [IntentPhase.SENT, IntentPhase.PLANNED, IntentPhase.PLANNED]
    stage.generate("well", "again")
    promise_s = stage.scheduler.book.settings.promise_s
    stage.wait_for("again", TicketState.GRANTED, 2 * promise_s)
    assert phases(stage, "ill") == [IntentPhase.SENT]
