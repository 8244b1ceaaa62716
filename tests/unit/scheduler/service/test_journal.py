"""The journal stores all rows of a step or none, and names what is wrong with a file that it cannot
use."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from rollmesh.core.errors import ConfigError, JournalDamaged, JournalError
from rollmesh.scheduler.service.journal import FILE_NAME, SqliteJournal
from rollmesh.scheduler.service.state import (
    CounterRecord,
    DropRow,
    HistoryRow,
    Intent,
    IntentKind,
    JournalTables,
    PutRow,
    TicketRecord,
)
from rollmesh.wire.scheduling import TicketState
from tests.disks import full_disk


def history(folder: Path) -> list[tuple[object, ...]]:
    database = sqlite3.connect(f"file:{folder / FILE_NAME}?mode=ro", uri=True)
    rows = database.execute("SELECT at_s, gpu, pipeline_id, cluster, rank, phase FROM history")
    found = rows.fetchall()
    database.close()
    return found


def test_what_was_kept_is_found_and_what_was_dropped_is_not(tmp_path: Path) -> None:
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


def test_the_past_is_bounded_and_the_newest_is_kept(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path, max_history=10)
    for number in range(100):
        journal.keep([HistoryRow(float(number), 0, "", "", -1, "free")])
    journal.close()
    kept = [row[0] for row in history(tmp_path)]
    assert len(kept) <= 20
    assert kept[-1] == 99.0


def test_what_is_no_journal_is_named(tmp_path: Path) -> None:
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


def test_a_page_that_was_scribbled_over_is_found_when_it_is_opened(tmp_path: Path) -> None:
    """Otherwise nothing could be written later, and no request would ever complete."""
    rows = [HistoryRow(float(at), 0, "a", "c", 0, "awake") for at in range(2000)]
    with closing(SqliteJournal(tmp_path)) as journal:
        journal.keep(rows)
    raw = bytearray((tmp_path / FILE_NAME).read_bytes())
    raw[len(raw) // 2 : len(raw) // 2 + 4096] = bytes(range(256)) * 16
    (tmp_path / FILE_NAME).write_bytes(raw)
    with pytest.raises(JournalDamaged, match="is not a scheduler's journal"):
        SqliteJournal(tmp_path)


def test_a_folder_where_its_file_should_be_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(JournalDamaged, match="is not a scheduler's journal"):
        SqliteJournal(tmp_path)
    (tmp_path / FILE_NAME).rmdir()
    SqliteJournal(tmp_path).close()  # nobody has its lock


def test_a_full_disk_and_a_damaged_journal_are_different_errors(tmp_path: Path) -> None:
    with full_disk(1024), pytest.raises(JournalError, match="cannot be written") as caught:
        SqliteJournal(tmp_path)
    assert not isinstance(caught.value, JournalDamaged)


def test_journal_that_is_closed_twice_leaves_a_file_opened_since_alone(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "journal")
    journal.close()
    with (tmp_path / "other").open("wb") as other:
        journal.close()
        assert os.fstat(other.fileno())


def test_a_journal_is_its_users_alone_also_one_that_was_open_to_others(tmp_path: Path) -> None:
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


def test_rows_are_kept_as_a_journal_keeps_them() -> None:
    kept = JournalTables()
    kept.keep([PutRow("tickets", "a", b"1"), HistoryRow(1.0, 0, "", "", -1, "free")])
    kept.keep([PutRow("tickets", "a", b"2"), PutRow("nodes", "n", b"3"), DropRow("tickets", "b")])
    assert kept.tables == {"tickets": {"a": b"2"}, "nodes": {"n": b"3"}}
    kept.keep([DropRow("tickets", "a")])
    assert kept.tables["tickets"] == {}


def test_a_record_that_is_none_is_named() -> None:
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
