"""Results are decoded by their receiver; a malformed one is dropped with its reason; reasons select
errors."""

import resource
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec import structs

from rollmesh.core.errors import (
    AttemptsExhausted,
    DeadlineExceeded,
    EnvFailedError,
    GroupCancelled,
    GroupError,
    GroupIncomplete,
    Overloaded,
    Quarantined,
    RollmeshError,
    UserError,
)
from rollmesh.core.ids import GroupId
from rollmesh.core.types import (
    ErrorPlace,
    GroupRecord,
    NodeRow,
    Outcome,
    RolloutRecord,
    Task,
    VersionRun,
)
from rollmesh.serve.client.arrivals import Dropped, Finished, RawResult, booked_of, open_result
from rollmesh.serve.client.async_client import error_of
from rollmesh.serve.client.evaluation import rows_of
from rollmesh.serve.client.evaluation_files import RESULTS, Results, Row
from rollmesh.serve.client.journal_entries import decode_entry, encode_entry
from rollmesh.wire.frames import encode_record

IDS = np.array([7, 8, 9], np.int32).tobytes()
LOGPROBS = np.array([-0.5, -1.5], np.float32).tobytes()


def record(reason: str = "") -> GroupRecord:
    rollout = RolloutRecord(
        index=0,
        outcome=Outcome.COMPLETED,
        reward=1.0,
        nodes=[NodeRow(-1, 1, False), NodeRow(0, 2, True, (VersionRun(3, 2),))],
        num_tokens=3,
        num_logprobs=2,
        messages=msgspec.Raw(b'[{"role":"user","content":"hi \\u00e9"}]'),
    )
    return GroupRecord(task=Task(id="t"), rollouts=[rollout], reason=reason)


def raw(
    body: bytes, buffers: tuple[bytes, ...] = (IDS, LOGPROBS), complete: bool = True
) -> RawResult:
    return RawResult(GroupId("r1", 1), 2, "w1", complete, body, buffers, 99)


def test_a_result_contains_its_record_and_arrays() -> None:
    finished = open_result(raw(encode_record(record())))
    assert isinstance(finished, Finished)
    assert finished.token_ids.tolist() == [7, 8, 9]
    assert finished.logprobs.tolist() == [-0.5, -1.5]
    assert (finished.attempt, finished.worker_id, finished.position) == (2, "w1", 99)
    assert bytes(finished.record.rollouts[0].messages).startswith(b'[{"role":"user"')


def test_an_incomplete_result_is_dropped_with_the_workers_reason() -> None:
    dropped = open_result(raw(encode_record(record("infra_error: gone")), complete=False))
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "infra_error: gone"
    assert dropped.record is not None


def test_the_location_of_an_error_reaches_the_drop_log() -> None:
    """The location of a rollout's own error, or else of the error in scoring its group."""
    came, place = record("infra_error: score_group"), ErrorPlace("KeyError", "/h/e.py", 9, "score")
    come = structs.replace(came, place=place)
    dropped = open_result(raw(encode_record(come), complete=False))
    assert isinstance(dropped, Dropped)
    assert [each.place for each in booked_of(dropped, 0).rollouts] == [place]
    failed = structs.replace(
        came.rollouts[0], outcome=Outcome.INFRA_ERROR, error="KeyError: x", place=place
    )
    sibling = structs.replace(came.rollouts[0], index=1, outcome=Outcome.CANCELLED)
    come = structs.replace(come, rollouts=[failed, sibling])
    dropped = open_result(raw(encode_record(come), complete=False))
    assert isinstance(dropped, Dropped)
    booked = booked_of(dropped, 0)
    assert [(each.error, each.place) for each in booked.rollouts] == [
        ("KeyError: x", place),
        ("", None),
    ]
    assert decode_entry([encode_entry(booked)]) == booked


@pytest.mark.parametrize(
    ("body", "buffers"),
    [
        (b"not json", (IDS, LOGPROBS)),
        (encode_record(record()), (IDS,)),
        (encode_record(record()), (IDS[:5], LOGPROBS)),
        (encode_record(record()), (IDS[:4], LOGPROBS)),
    ],
)
def test_a_malformed_result_is_dropped_with_its_reason(
    body: bytes, buffers: tuple[bytes, ...]
) -> None:
    dropped = open_result(raw(body, buffers))
    assert isinstance(dropped, Dropped)
    assert dropped.reason.startswith("malformed: ")


GROUP = GroupId("r1", 3)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("deadline: no result within 5 s", DeadlineExceeded),
        ("cancelled: by the router", GroupCancelled),
        ("client_left: c1 was silent", GroupCancelled),
        ("env_failed: no module named x", EnvFailedError),
        ("attempts_exhausted: 3 have begun", AttemptsExhausted),
        ("quarantined: w1 killed by signal 9, w2 killed by signal 9", Quarantined),
        ("infra_error: 1 of 4 rollouts: no engine", GroupIncomplete),
        ("bad_ask: num_samples must be at least 1", GroupError),
        ("malformed: not a group's record", GroupError),
        ("a reason of tomorrow", GroupError),
    ],
)
def test_a_drop_reason_selects_the_error_that_is_raised(
    reason: str, kind: type[GroupError]
) -> None:
    record = GroupRecord(task=Task(id="t"))
    error = error_of(Dropped(GROUP, reason, record))
    assert type(error) is kind
    assert (error.group_id, error.reason, error.record) == (GROUP, reason, record)
    assert str(error) == f"group r1/3: {reason}"
    assert isinstance(error, RollmeshError)


def test_an_overload_error_has_a_retry_time() -> None:
    error = error_of(Dropped(GROUP, "overloaded: 9 groups wait", retry_after_s=1.5))
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 1.5


def finished(seq: int, task_id: str = "t", num_samples: int = 2) -> Finished:
    rollouts = [
        RolloutRecord(
            index=index,
            outcome=Outcome.COMPLETED,
            reward=float(index),
            num_calls=3,
            num_logprobs=7,
            num_tokens=20,
            duration_s=0.5,
        )
        for index in range(num_samples)
    ]
    return Finished(
        group_id=GroupId("r1", seq),
        attempt=2,
        worker_id="worker-1",
        record=GroupRecord(task=Task(id=task_id), rollouts=rollouts),
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        position=0,
    )


def test_a_row_describes_the_result_of_its_rollout() -> None:
    first, second = rows_of(finished(4, "t"), "t", 2)
    assert first == Row(
        task_id="t",
        group_id="r1/4",
        index=0,
        num_samples=2,
        outcome="completed",
        reward=0.0,
        num_calls=3,
        num_tokens=7,
        duration_s=0.5,
        worker_id="worker-1",
        attempt=2,
    )
    assert (second.index, second.reward) == (1, 1.0)


def test_a_group_without_a_result_has_a_row_with_the_reason_for_each_rollout() -> None:
    rows = rows_of(Dropped(GroupId("r1", 5), "quarantined: w1 and w2 died"), "t", 3)
    assert [row.index for row in rows] == [0, 1, 2]
    assert {(row.outcome, row.error) for row in rows} == {
        ("quarantined", "quarantined: w1 and w2 died")
    }
    assert not any(row.has_result for row in rows)


def test_an_incomplete_group_has_the_results_of_its_finished_rollouts() -> None:
    record = GroupRecord(
        task=Task(id="t"),
        rollouts=[RolloutRecord(index=1, outcome=Outcome.COMPLETED, reward=1.0)],
    )
    first, second = rows_of(Dropped(GroupId("r1", 5), "infra_error: 1 of 2", record), "t", 2)
    assert (first.outcome, first.has_result) == ("infra_error", False)
    assert (second.outcome, second.reward, second.has_result) == ("completed", 1.0, False)


def test_a_reopened_file_keeps_only_whole_groups_with_a_result(tmp_path: Path) -> None:
    with Results(tmp_path) as results:
        results.add(rows_of(finished(0), "t", 2))
        results.add(rows_of(Dropped(GroupId("r1", 1), "env_failed: no"), "u", 2))
        results.add(rows_of(finished(2, "v"), "v", 2))
    path = tmp_path / RESULTS
    path.write_bytes(path.read_bytes()[:-30])
    with Results(tmp_path) as again:
        assert {row.group_id for row in again.rows} == {"r1/0"}
        assert again.holds(GroupId("r1", 0))
        assert not again.holds(GroupId("r1", 2))
        assert again.num_groups() == {"t": 1}
        again.add(rows_of(finished(2, "v"), "v", 2))
    assert len(path.read_bytes().splitlines()) == 4
    with Results(tmp_path) as last:
        assert last.num_groups() == {"t": 1, "v": 1}


def test_a_full_disk_is_a_one_line_error_and_damages_no_other_group(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Results(tmp_path) as results:
        results.add(rows_of(finished(0), "t", 2))
        size = (tmp_path / RESULTS).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, limits[1]))
        try:
            with pytest.raises(
                UserError, match=r"File too large; raise the limit .*, then --resume"
            ):
                results.add(rows_of(finished(1), "t", 2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with Results(tmp_path) as again:
        assert {row.group_id for row in again.rows} == {"r1/0"}
        again.add(rows_of(finished(1), "t", 2))
    assert len((tmp_path / RESULTS).read_bytes().splitlines()) == 4


def test_an_unwritable_folder_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="name another --out"):
        Results(tmp_path / "file" / "folder")
