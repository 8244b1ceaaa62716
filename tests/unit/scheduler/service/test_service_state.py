"""Results of a step: rows first, each once, with the final state. Ended operations stay known after
a restart."""

import msgspec
import pytest

from rollmesh.scheduler.planning.state import Owner
from rollmesh.scheduler.service.state import (
    FREE,
    HELD,
    MAX_ENDED,
    MAX_PROBLEMS,
    MAX_RECENT_LINES,
    AnswerRecord,
    CounterRecord,
    DropRow,
    HistoryRow,
    Intent,
    IntentKind,
    IntentPhase,
    LogLine,
    PutRow,
    SchedulerSettings,
    SchedulerState,
    WriteRows,
    describe_recent,
    record_ended,
)
from rollmesh.wire.machine import Send
from rollmesh.wire.scheduling import GENERATION_CLUSTER, SchedulerHello
from tests.unit.scheduler.service.stage import Stage

A, B = Owner("a", "actor_train", -1), Owner("b", "actor_train", -1)


@pytest.fixture
def state() -> SchedulerState:
    return SchedulerState(SchedulerSettings(), "s1")


def test_a_step_that_changes_nothing_leaves_nothing(state: SchedulerState) -> None:
    assert state.take_actions() == []


def test_rows_come_first_and_once_as_they_are_at_the_end(state: SchedulerState) -> None:
    state.send(b"r", SchedulerHello("s1"))
    state.mark("answers", "k")
    state.answers["k"] = AnswerRecord(key="k", ok=False, at_s=1.0)
    state.mark("answers", "k")
    state.answers["k"].ok = True
    state.log("a.b", "", "why")
    write, send, note = state.take_actions()
    assert isinstance(write, WriteRows)
    assert [type(row) for row in write.rows] == [PutRow, PutRow]
    first, last = write.rows
    assert isinstance(first, PutRow)
    assert msgspec.msgpack.decode(first.raw, type=AnswerRecord).ok
    assert isinstance(last, PutRow)
    assert last.table == "numbers"
    assert isinstance(send, Send)
    assert isinstance(note, LogLine)
    assert state.take_actions() == []


def test_what_is_gone_is_dropped(state: SchedulerState) -> None:
    state.mark("tickets", "k")
    (write,) = state.take_actions()
    assert isinstance(write, WriteRows)
    assert write.rows[0] == DropRow("tickets", "k")


def test_a_row_does_not_change_with_what_it_was_taken_from(state: SchedulerState) -> None:
    state.now_s = 5.0
    state.mark("numbers", "1")
    (write,) = state.take_actions()
    state.numbers.seq = 99
    assert isinstance(write, WriteRows)
    row = write.rows[-1]
    assert isinstance(row, PutRow)
    assert msgspec.msgpack.decode(row.raw, type=CounterRecord) == CounterRecord(now_s=5.0)


def test_two_never_stand_on_one_gpu(state: SchedulerState) -> None:
    state.occupy(A, (0, 1), HELD)
    with pytest.raises(AssertionError, match="GPU 1 is "):
        state.occupy(B, (1, 2), HELD)
    state.clear(B, (0, 1))
    assert not state.is_clear((0,))
    state.clear(A, (0, 1))
    assert state.is_clear((0, 1))
    (write,) = state.take_actions()
    assert isinstance(write, WriteRows)
    result = [row.phase for row in write.rows if isinstance(row, HistoryRow) and row.gpu == 0]
    assert result == [HELD, FREE]


def test_messages_without_a_route_are_dropped(state: SchedulerState) -> None:
    state.send(b"", SchedulerHello("s1"))
    assert state.take_actions() == []


def test_troubles_are_bounded_and_the_newest_is_last(state: SchedulerState) -> None:
    for number in range(MAX_PROBLEMS + 5):
        state.report_problem(f"no {number}")
    assert len(state.problems) == MAX_PROBLEMS
    assert state.problems[-1] == f"no {MAX_PROBLEMS + 4}"


WAKE = Intent(
    intent_id=1, kind=IntentKind.WAKE, pipeline_id="a", cluster=GENERATION_CLUSTER, planned_s=1.0
)


def test_the_result_of_a_resize_is_returned_also_after_a_death() -> None:
    stage = Stage(2)
    coordinator = stage.pipeline("a", generation=(0, 1))
    coordinator.error = "it is out of memory"
    stage.generate("a", "g")
    stage.run(1)
    for _ in range(2):
        lines = describe_recent(stage.scheduler.state.ended.values(), stage.now_s)["a"]
        assert any("wake of worker 0 failed" in each for each in lines), lines
        assert any("it is out of memory" in each for each in lines), lines
        assert len(lines) <= MAX_RECENT_LINES
        stage.begin()


def test_no_more_than_the_newest_are_kept() -> None:
    stage = Stage(1)
    for number in range(1, 2 * MAX_ENDED):
        done = msgspec.structs.replace(WAKE, intent_id=number, phase=IntentPhase.COMMITTED)
        record_ended(stage.scheduler.state, done)
        stage.run(0.25)
    assert list(stage.scheduler.state.ended) == list(range(MAX_ENDED, 2 * MAX_ENDED))
    assert len(stage.kept.tables["ended"]) == MAX_ENDED
    stage.begin()
    assert list(stage.scheduler.state.ended) == list(range(MAX_ENDED, 2 * MAX_ENDED))
