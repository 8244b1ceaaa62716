"""A real run's chart, from occupancy rows."""

from pathlib import Path

import pytest

from rollmesh.core.errors import UserError
from rollmesh.scheduler.service.journal import FILE_NAME, SqliteJournal
from rollmesh.scheduler.service.records import HistoryRow
from rollmesh.scheduler.simulator.history import Occupancy, chart, spans
from rollmesh.scheduler.simulator.spans import Span, Use

ROWS = [
    Occupancy(10.0, 0, "a", "actor_infer", 1, "waking"),
    Occupancy(10.0, 1, "b", "actor_train", -1, "held"),
    Occupancy(12.0, 0, "a", "actor_infer", 1, "awake"),
    Occupancy(15.0, 1, "", "", -1, "free"),
    Occupancy(18.0, 0, "a", "actor_infer", 1, "lost"),
    Occupancy(20.0, 1, "b", "actor_infer", 0, "sleeping"),
]


def test_a_row_holds_until_the_next_of_its_gpu() -> None:
    assert spans(ROWS) == [
        Span(0, "a", "engine 1", Use.WAKE, 10.0, 12.0),
        Span(0, "a", "engine 1", Use.SERVE, 12.0, 18.0),
        Span(0, "a", "engine 1", Use.LOST, 18.0, 20.0),
        Span(1, "b", "actor_train", Use.FIXED, 10.0, 15.0),
    ]


def _journal(folder: Path, rows: list[Occupancy]) -> Path:
    """As the service writes it."""
    journal = SqliteJournal(folder)
    journal.keep([HistoryRow(*row) for row in rows])
    journal.close()
    return folder / FILE_NAME


def test_a_live_scheduler_does_not_mind(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path)
    journal.keep([HistoryRow(*row) for row in ROWS])
    assert chart(tmp_path).spans == spans(ROWS)
    journal.keep([HistoryRow(*ROWS[-1]._replace(at_s=30.0))])
    assert chart(tmp_path).end_s == 30.0
    journal.close()


def test_a_journal_is_given_by_its_file_or_its_folder(tmp_path: Path) -> None:
    path = _journal(tmp_path, ROWS)
    drawn = chart(path)
    assert (drawn.start_s, drawn.end_s, drawn.gpus) == (10.0, 20.0, (0, 1))
    assert drawn.spans == spans(ROWS) == chart(tmp_path).spans


def test_what_is_no_journal_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not there"):
        chart(tmp_path / "none")
    (tmp_path / "text").write_text("no database at all, but a text that is long enough" * 9)
    with pytest.raises(UserError, match="is not a scheduler's journal"):
        chart(tmp_path / "text")
    with pytest.raises(UserError, match="remembers nobody"):
        chart(_journal(tmp_path / "empty", []))
