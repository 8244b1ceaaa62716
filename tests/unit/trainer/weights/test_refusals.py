"""A publication that no engine accepts is shown with its reason, and ends the run if that lasts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from rollmesh.core.clock import SystemClock
from rollmesh.core.errors import PublishError
from rollmesh.trainer.books.records import RunRecords
from rollmesh.trainer.weights.folder import Refusal
from rollmesh.trainer.weights.refusals import Refusals

REFUSAL = Refusal(7, 6, "http://a: scoring: its log-probs differ by 0.251")
AT_ONCE_S = 1e-9
NEVER_S = 1e9


@pytest.fixture
def records(tmp_path: Path) -> Iterator[RunRecords]:
    records = RunRecords(tmp_path, SystemClock())
    yield records
    records.close()


def rows(records: RunRecords) -> list[dict[str, Any]]:
    lines = (records.folder / "metrics.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line) for line in lines]


def test_each_refusal_is_logged_and_recorded_once_and_so_is_its_end(records: RunRecords) -> None:
    refusals = Refusals(records, NEVER_S)
    with capture_logs() as logs:
        for refusal in (None, REFUSAL, REFUSAL, None, None):
            refusals.look(refusal, all_asleep=False)
    assert [(row["policy_version"], row["refused"]) for row in rows(records)] == [
        (7, REFUSAL.reason),
        (7, ""),
    ]
    [told] = logs
    assert (told["log_level"], told["error"]) == ("error", f"no engine serves: {REFUSAL.reason}")


def test_run_ends_where_no_engine_accepts_for_too_long(records: RunRecords) -> None:
    refusals = Refusals(records, AT_ONCE_S)
    refusals.look(None, all_asleep=False)
    refusals.look(REFUSAL, all_asleep=True)
    with pytest.raises(PublishError) as ended:
        refusals.look(REFUSAL, all_asleep=False)
    assert "publish.accept_timeout_s = 1e-09" in str(ended.value)
    assert REFUSAL.reason in str(ended.value)


def test_newer_publications_that_are_refused_too_do_not_start_the_clock_again(
    records: RunRecords,
) -> None:
    refusals = Refusals(records, AT_ONCE_S)
    refusals.look(REFUSAL, all_asleep=True)
    with pytest.raises(PublishError, match="version 8"):
        refusals.look(Refusal(8, 7, "why"), all_asleep=False)


def test_a_fleet_that_sleeps_refuses_nothing(records: RunRecords) -> None:
    refusals = Refusals(records, AT_ONCE_S)
    for _ in range(3):
        refusals.look(REFUSAL, all_asleep=True)
    assert len(rows(records)) == 1
