"""What has come of resizes is known afterwards, also to a next life; the journal stays small."""

import msgspec

from rollmesh.scheduler.service.lately import KEPT, TOLD, remember, told
from rollmesh.scheduler.service.records import Intent, IntentKind, IntentPhase
from rollmesh.wire.scheduling import GENERATION_CLUSTER
from tests.unit.scheduler.service.stage import Stage

WAKE = Intent(
    intent_id=1, kind=IntentKind.WAKE, pipeline_id="a", cluster=GENERATION_CLUSTER, planned_s=1.0
)


def test_what_has_come_of_a_resize_is_told_to_who_asks_also_after_a_death() -> None:
    stage = Stage(2)
    coordinator = stage.pipeline("a", generation=(0, 1))
    coordinator.error = "it is out of memory"
    stage.generate("a", "g")
    stage.run(1)
    for _ in range(2):
        lines = told(stage.scheduler.book.ended.values(), stage.now_s)["a"]
        assert any("wake of worker 0 failed" in each for each in lines), lines
        assert any("it is out of memory" in each for each in lines), lines
        assert len(lines) <= TOLD
        stage.begin()


def test_no_more_than_the_newest_are_kept() -> None:
    stage = Stage(1)
    for number in range(1, 2 * KEPT):
        done = msgspec.structs.replace(WAKE, intent_id=number, phase=IntentPhase.COMMITTED)
        remember(stage.scheduler.book, done)
        stage.run(0.25)
    assert list(stage.scheduler.book.ended) == list(range(KEPT, 2 * KEPT))
    assert len(stage.kept.tables["ended"]) == KEPT
    stage.begin()
    assert list(stage.scheduler.book.ended) == list(range(KEPT, 2 * KEPT))
