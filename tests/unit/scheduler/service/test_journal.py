"""Journal: the SQLite file, the rows of a step, and the state that a restart restores."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.core.errors import ConfigError, JournalDamaged, JournalError
from rollmesh.scheduler.planning.state import Owner, PipelinePhase
from rollmesh.scheduler.service.journal import FILE_NAME, SqliteJournal
from rollmesh.scheduler.service.scheduler import FleetScheduler
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
    JournalTables,
    LogLine,
    PutRow,
    SchedulerSettings,
    SchedulerState,
    TicketRecord,
    WriteRows,
    describe_recent,
    record_ended,
)
from rollmesh.wire.machine import Send
from rollmesh.wire.scheduling import (
    GENERATION_CLUSTER,
    ReportProgress,
    SchedulerHello,
    TicketState,
    WorkerPhase,
)
from tests.disks import full_disk
from tests.unit.scheduler.service.harness import Program, SchedulerHarness, run_all


def history(folder: Path) -> list[tuple[object, ...]]:
    database = sqlite3.connect(f"file:{folder / FILE_NAME}?mode=ro", uri=True)
    rows = database.execute("SELECT at_s, gpu, pipeline_id, cluster, rank, phase FROM history")
    found = rows.fetchall()
    database.close()
    return found


def test_a_reopened_journal_has_the_kept_rows_and_not_the_dropped(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "new" / "folder")
    assert journal.load() is None
    journal.keep([PutRow("tickets", "k1", b"one"), PutRow("tickets", "k2", b"two")])
    journal.keep(
        [PutRow("tickets", "k1", b"again"), DropRow("tickets", "k2"), PutRow("nodes", "n", b"n")]
    )
    journal.close()
    again = SqliteJournal(tmp_path / "new" / "folder")
    revived = again.load()
    assert revived
    assert revived.tables["tickets"] == {"k1": b"again"}
    assert revived.tables["nodes"] == {"n": b"n"}
    again.close()


def test_a_transaction_that_fails_leaves_nothing(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path)
    wrong = PutRow("tickets", "k2", None)  # type: ignore[arg-type]  # which SQLite refuses
    with pytest.raises(JournalError, match="cannot be written"):
        journal.keep([PutRow("tickets", "k1", b"one"), wrong])
    journal.keep([PutRow("nodes", "n", b"n")])
    revived = journal.load()
    assert revived
    assert revived.tables["tickets"] == {}
    journal.close()


def test_a_journal_has_one_owner_and_any_number_of_readers(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path)
    with pytest.raises(ConfigError, match="another scheduler uses it"):
        SqliteJournal(tmp_path)
    journal.keep([HistoryRow(1.0, 3, "a", "actor_train", -1, "held")])
    assert history(tmp_path) == [(1.0, 3, "a", "actor_train", -1, "held")]
    journal.close()
    SqliteJournal(tmp_path).close()


def test_the_history_is_bounded_and_its_newest_rows_are_kept(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path, max_history=10)
    for number in range(100):
        journal.keep([HistoryRow(float(number), 0, "", "", -1, "free")])
    journal.close()
    kept = [row[0] for row in history(tmp_path)]
    assert len(kept) <= 20
    assert kept[-1] == 99.0


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"not a database" * 100)
    with pytest.raises(JournalDamaged, match="is not a scheduler's journal"):
        SqliteJournal(tmp_path)
    (tmp_path / FILE_NAME).unlink()
    SqliteJournal(tmp_path).close()
    database = sqlite3.connect(tmp_path / FILE_NAME)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(JournalDamaged, match="its schema is 99"):
        SqliteJournal(tmp_path)


def test_a_folder_that_cannot_be_created_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="name another folder"):
        SqliteJournal(tmp_path / "file")


def test_a_damaged_page_is_found_when_the_journal_is_opened(tmp_path: Path) -> None:
    """If it were opened, later writes would fail, and no request would ever complete."""
    rows = [HistoryRow(float(at), 0, "a", "c", 0, "awake") for at in range(2000)]
    with closing(SqliteJournal(tmp_path)) as journal:
        journal.keep(rows)
    raw = bytearray((tmp_path / FILE_NAME).read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 4096] = bytes(range(256)) * 16
    (tmp_path / FILE_NAME).write_bytes(raw)
    with pytest.raises(JournalDamaged, match="is not a scheduler's journal"):
        SqliteJournal(tmp_path)


def test_a_folder_in_place_of_the_journals_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(JournalDamaged, match="is not a scheduler's journal"):
        SqliteJournal(tmp_path)
    (tmp_path / FILE_NAME).rmdir()
    SqliteJournal(tmp_path).close()  # the lock is free


def test_a_full_disk_and_a_damaged_journal_are_different_errors(tmp_path: Path) -> None:
    with full_disk(1024), pytest.raises(JournalError, match="cannot be written") as caught:
        SqliteJournal(tmp_path)
    assert not isinstance(caught.value, JournalDamaged)


def test_closing_a_journal_twice_closes_no_other_file(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal")
    journal.close()
    with (tmp_path / "other").open("wb") as other:
        journal.close()
        assert os.fstat(other.fileno())


def test_a_journal_is_private_even_if_it_was_open_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    for _ in range(2):
        before = os.umask(0o022)
        try:
            with closing(SqliteJournal(folder)) as journal:
                journal.keep([PutRow("tickets", "k", b"raw")])
                modes = {each.name: each.stat().st_mode & 0o777 for each in folder.iterdir()}
        finally:
            os.umask(before)
        names = [FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm", "scheduler.lock"]
        assert modes == dict.fromkeys(names, 0o600)
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.chmod(0o755)
        (folder / FILE_NAME).chmod(0o644)


def test_journal_tables_keep_rows_like_a_journal() -> None:
    kept = JournalTables()
    kept.keep([PutRow("tickets", "a", b"1"), HistoryRow(1.0, 0, "", "", -1, "free")])
    kept.keep([PutRow("tickets", "a", b"2"), PutRow("nodes", "n", b"3"), DropRow("tickets", "b")])
    assert kept.tables == {"tickets": {"a": b"2"}, "nodes": {"n": b"3"}}
    kept.keep([DropRow("tickets", "a")])
    assert kept.tables["tickets"] == {}


def test_an_unreadable_record_is_refused_with_its_table() -> None:
    with pytest.raises(JournalDamaged, match="table tickets cannot be read"):
        JournalTables({"tickets": {"a": b"\xc1"}}).read("tickets", TicketRecord)
    assert JournalTables().read("numbers", CounterRecord) == []


def test_a_ticket_is_open_until_its_last_state() -> None:
    ticket = TicketRecord(key="k", pipeline_id="a", cluster="actor_train", asked_s=0.0)
    opened = set()
    for state in TicketState:
        ticket.state = state
        if ticket.is_open:
            opened.add(state)
    assert opened == {TicketState.QUEUED, TicketState.OFFERED, TicketState.GRANTED}


def test_an_intent_that_is_not_sent_is_never_late() -> None:
    intent = Intent(
        intent_id=1, kind=IntentKind.WAKE, pipeline_id="a", cluster="actor_infer", planned_s=0.0
    )
    assert intent.until_s == float("inf")


A, B = Owner("a", "actor_train", -1), Owner("b", "actor_train", -1)


@pytest.fixture
def state() -> SchedulerState:
    return SchedulerState(SchedulerSettings(), "s1")


def test_a_step_without_changes_has_no_actions(state: SchedulerState) -> None:
    assert state.take_actions() == []


def test_rows_come_first_and_each_once_with_its_final_value(state: SchedulerState) -> None:
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


def test_the_row_of_a_removed_record_is_dropped(state: SchedulerState) -> None:
    state.mark("tickets", "k")
    (write,) = state.take_actions()
    assert isinstance(write, WriteRows)
    assert write.rows[0] == DropRow("tickets", "k")


def test_later_changes_of_a_record_do_not_change_its_row(state: SchedulerState) -> None:
    state.now_s = 5.0
    state.mark("numbers", "1")
    (write,) = state.take_actions()
    state.numbers.seq = 99
    assert isinstance(write, WriteRows)
    row = write.rows[-1]
    assert isinstance(row, PutRow)
    assert msgspec.msgpack.decode(row.raw, type=CounterRecord) == CounterRecord(now_s=5.0)


def test_two_owners_never_occupy_one_gpu(state: SchedulerState) -> None:
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


def test_problems_are_bounded_and_the_newest_is_last(state: SchedulerState) -> None:
    for number in range(MAX_PROBLEMS + 5):
        state.report_problem(f"no {number}")
    assert len(state.problems) == MAX_PROBLEMS
    assert state.problems[-1] == f"no {MAX_PROBLEMS + 4}"


WAKE = Intent(
    intent_id=1, kind=IntentKind.WAKE, pipeline_id="a", cluster=GENERATION_CLUSTER, planned_s=1.0
)


def test_the_result_of_a_resize_is_known_after_a_restart() -> None:
    harness = SchedulerHarness(2)
    coordinator = harness.pipeline("a", generation=(0, 1))
    coordinator.error = "it is out of memory"
    harness.generate("a", "g")
    harness.run(1)
    for _ in range(2):
        lines = describe_recent(harness.scheduler.state.ended.values(), harness.now_s)["a"]
        assert any("wake of worker 0 failed" in each for each in lines), lines
        assert any("it is out of memory" in each for each in lines), lines
        assert len(lines) <= MAX_RECENT_LINES
        harness.begin()


def test_only_the_newest_ended_intents_are_kept() -> None:
    harness = SchedulerHarness(1)
    for number in range(1, 2 * MAX_ENDED):
        done = msgspec.structs.replace(WAKE, intent_id=number, phase=IntentPhase.COMMITTED)
        record_ended(harness.scheduler.state, done)
        harness.run(0.25)
    assert list(harness.scheduler.state.ended) == list(range(MAX_ENDED, 2 * MAX_ENDED))
    assert len(harness.kept.tables["ended"]) == MAX_ENDED
    harness.begin()
    assert list(harness.scheduler.state.ended) == list(range(MAX_ENDED, 2 * MAX_ENDED))


def two_pipelines(kind: type[FleetScheduler] = FleetScheduler) -> SchedulerHarness:
    """Pipelines a and b generate on all of four GPUs, and train on two each."""
    harness = SchedulerHarness(4, kind=kind)
    harness.pipeline("a", train=(0, 1))
    harness.pipeline("b", train=(2, 3))
    return harness


def run_two_rollouts(harness: SchedulerHarness) -> dict[str, TicketState]:
    """Run two rollouts of each pipeline; return the final state of each request."""
    run_all(harness, [Program("a", 2), Program("b", 2, generates_s=3.0)])
    harness.run(5)
    state = harness.scheduler.state
    assert state.fleet.owners == state.occupants == {}
    assert state.intents == {}
    assert not state.problems
    return harness.ended


def test_the_rows_contain_the_whole_state_after_each_step() -> None:
    harness = two_pipelines()
    harness.checks_rows_each = 1
    run_two_rollouts(harness)
    harness.generate("a", "g", target=0, step=9)
    harness.send(ReportProgress("a", "train", 1, 100, 10))
    harness.send(ReportProgress("a", "eval/x", 1, 100, 10))
    harness.coordinators["a"].error = "an engine does not answer"
    harness.train("b", "t")
    harness.run(10)
    harness.coordinators["a"].error = ""
    harness.release("a", "r", GENERATION_CLUSTER)
    harness.run(10)
    assert harness.state("r") is TicketState.RELEASED


@pytest.mark.parametrize("when", ["before its rows are kept", "before it sends"])
def test_a_scheduler_killed_at_any_step_ends_every_request_alike(when: str) -> None:
    harness = two_pipelines()
    first = harness.num_steps
    ends = run_two_rollouts(harness)
    last = harness.num_steps
    for step in range(first, last):
        killed = two_pipelines()
        kill_steps = frozenset({step, step + 3, step + 50} if step % 3 == 0 else {step})
        if when == "before it sends":
            killed.cut_steps = kill_steps
        else:
            killed.lost_steps = kill_steps
        assert run_two_rollouts(killed) == ends, f"killed at step {step} of {last}"


fault_periods = st.tuples(
    st.sampled_from(["hang", "error", "silent", "none"]),
    st.sampled_from("abc"),
    st.integers(1, 40),
    st.integers(1, 30),
)


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=3, max_size=3),
    faults=st.lists(fault_periods, max_size=3),
    lost=st.frozensets(st.integers(20, 600), max_size=5),
    cut=st.frozensets(st.integers(20, 600), max_size=5),
)
def test_random_faults_and_kills_leave_no_request_open(
    shapes: list[tuple[int, int]],
    faults: list[tuple[str, str, int, int]],
    lost: frozenset[int],
    cut: frozenset[int],
) -> None:
    harness = SchedulerHarness(4)
    for name, train in (("a", (0, 1)), ("b", (1, 2, 3)), ("c", (3,))):
        harness.pipeline(name, train=train)
    harness.lost_steps, harness.cut_steps, harness.checks_rows_each = lost, cut, 7
    programs = [
        Program(name, 2, float(generates_s), float(trains_s))
        for name, (generates_s, trains_s) in zip("abc", shapes, strict=True)
    ]
    for each in programs:
        each.poll(harness)
    for fault, name, after_s, for_s in faults:
        _advance(harness, programs, after_s)
        _set_fault(harness, fault, name, is_on=True)
        _advance(harness, programs, for_s)
        _set_fault(harness, fault, name, is_on=False)
    run_all(harness, programs)
    harness.run(5)
    state = harness.scheduler.state
    assert state.fleet.owners == state.occupants == {}
    assert state.intents == {}
    assert not state.fleet.requests
    assert not state.problems
    assert {each.phase for each in state.fleet.pipelines.values()} == {PipelinePhase.ADMITTED}
    assert set(harness.ended.values()) == {TicketState.GRANTED, TicketState.RELEASED}


def _advance(harness: SchedulerHarness, programs: list[Program], seconds: int) -> None:
    for _ in range(seconds * 4):
        for each in programs:
            each.poll(harness)
        harness.run(0.25)


def _set_fault(harness: SchedulerHarness, fault: str, name: str, is_on: bool) -> None:
    coordinator = harness.coordinators[name]
    if fault == "hang":
        coordinator.is_hung = is_on
    elif fault == "silent":
        coordinator.is_silent = is_on
    elif fault == "error":
        coordinator.error = "an engine does not answer" if is_on else ""


class ForgetsItsJournal(FleetScheduler):
    """The fault: a restart begins without the kept rows."""

    def __init__(self, *arguments: object, **named: object) -> None:
        kept = [each for each in arguments if not isinstance(each, JournalTables)]
        if len(kept) < len(arguments):
            kept.insert(2, None)
        super().__init__(*kept, **named)  # type: ignore[arg-type]  # passed on unchanged


def test_a_restart_without_its_journal_forgets_all_pipelines() -> None:
    harness = two_pipelines(ForgetsItsJournal)
    harness.train("a", "t")
    harness.begin()
    harness.run(5)
    assert harness.train("a", "t2") is TicketState.REFUSED
    kept = two_pipelines()
    kept.train("a", "t")
    kept.begin()
    kept.run(5)
    assert kept.train("a", "t2") is TicketState.GRANTED


def test_nothing_is_planned_before_all_coordinators_report_or_settle_s_is_over() -> None:
    harness = two_pipelines()
    harness.coordinators["b"].is_silent = True
    harness.train("a", "t")
    harness.begin()
    harness.beat()
    harness.generate("a", "g")
    assert harness.of("a").workers[2].phase is WorkerPhase.ASLEEP
    harness.run(harness.settings.settle_s + 0.5)
    assert harness.of("a").workers[2].phase is WorkerPhase.AWAKE


def test_a_wake_that_completed_while_the_scheduler_was_down_counts() -> None:
    harness = two_pipelines()
    harness.coordinators["b"].is_silent = True
    coordinator = harness.coordinators["a"]
    harness.generate("a", "g")
    coordinator.pending_resizes.clear()
    for rank in range(4):
        coordinator.move(rank, WorkerPhase.AWAKE)
    harness.begin()
    num_received = coordinator.num_received
    harness.beat()
    assert harness.state("g") is TicketState.GRANTED
    assert coordinator.num_received == num_received


def test_an_unconfirmed_wake_is_resent_with_its_epoch() -> None:
    harness = two_pipelines()
    coordinator = harness.coordinators["a"]
    harness.cut_steps = frozenset({harness.num_steps + 1})
    harness.generate("a", "g")
    assert not coordinator.num_received
    harness.run(3)
    assert harness.state("g") is TicketState.GRANTED
    assert {truth.epoch for truth in coordinator.truths} == {1}


def test_workers_that_must_sleep_grant_nothing_before_the_first_plan() -> None:
    harness = two_pipelines()
    harness.coordinators["b"].is_silent = True
    coordinator = harness.coordinators["a"]
    harness.generate("a", "g1")
    harness.release("a", "r", GENERATION_CLUSTER)
    harness.generate("a", "g2", step=1)
    coordinator.pending_resizes.clear()
    for rank in range(4):
        coordinator.move(rank, WorkerPhase.AWAKE)
    harness.begin()
    harness.beat()
    assert harness.of("a").workers[0].phase is WorkerPhase.AWAKE
    assert harness.state("r") is harness.state("g2") is TicketState.QUEUED
    harness.run(harness.settings.settle_s + 3)
    assert harness.state("r") is TicketState.RELEASED
    assert harness.state("g2") is TicketState.GRANTED
