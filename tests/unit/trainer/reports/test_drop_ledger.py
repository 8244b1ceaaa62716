"""Every rollout counted as dropped has a row, and every row is counted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.core.ids import GroupId
from rollmesh.core.types import ErrorPlace, Outcome
from rollmesh.serve.client.journal_entries import SeenRollout
from rollmesh.testing.clock import FakeClock
from rollmesh.trainer.reports.records import DropLedger, RunRecords
from rollmesh.trainer.reports.selection_bias import DropLine
from rollmesh.trainer.reports.summary import Tally

GROUP = GroupId("r", 3)


class Books:
    """A ledger and the files that it wrote."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "drops.jsonl"
        self.records, self.tally = RunRecords(folder, FakeClock()), Tally()
        self.ledger = DropLedger(self.records, self.tally, "guess")

    def rows(self) -> list[dict[str, Any]]:
        self.records.flush()
        lines = self._path.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=dict[str, Any]) for line in lines]


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Books]:
    books = Books(tmp_path)
    yield books
    books.records.close()


def test_a_rollout_that_came_has_a_row_with_all_that_is_known(books: Books) -> None:
    place = ErrorPlace("ValueError", "/h/my_env.py", 15, "run")
    error = "ValueError: no tool (my_env.py:15 in run)"
    seen = SeenRollout(1, Outcome.AGENT_ERROR, 40, (3, 5), error, place)
    books.ledger.rollout(GROUP, "t7", seen, "stale: age 3", 3)
    [row] = books.rows()
    del row["time_s"]
    assert row == {
        "group_id": "r/3",
        "num_rollouts": 1,
        "reason": "stale: age 3",
        "index": 1,
        "task_id": "t7",
        "env": "guess",
        "length": 40,
        "age": 3,
        "outcome": "agent_error",
        "error": error,
        "place": {"kind": "ValueError", "file": "/h/my_env.py", "line": 15, "function": "run"},
    }
    assert books.tally.num_dropped == 1


def test_unseen_rollouts_of_a_group_are_one_row_with_their_number(books: Books) -> None:
    books.ledger.unseen(GROUP, "t7", 3, "deadline: over")
    books.ledger.unseen(GROUP, "t7", 0, "deadline: over")
    [row] = books.rows()
    assert (row["num_rollouts"], row["task_id"], row["env"]) == (3, "t7", "guess")
    assert not row.keys() & {"index", "length", "age"}
    assert books.tally.num_dropped == 3


def test_drops_outside_training_are_written_and_not_counted(books: Books) -> None:
    books.ledger.uncounted(GROUP, "t7", 1, "evaluation: deadline: over")
    assert [row["reason"] for row in books.rows()] == ["evaluation: deadline: over"]
    assert books.tally.num_dropped == 0


def test_every_row_is_one_that_bias_reads(books: Books) -> None:
    books.ledger.rollout(GROUP, "t", SeenRollout(0, Outcome.COMPLETED, 4, ()), "foreign: v9", None)
    books.ledger.unseen(GROUP, "t", 2, "env_failed: no licence")
    seen, unseen = (msgspec.convert(row, DropLine) for row in books.rows())
    assert (seen.code, seen.index, seen.length, seen.age) == ("foreign", 0, 4, None)
    assert (unseen.code, unseen.index, unseen.num_rollouts) == ("env_failed", None, 2)
