"""Results: rows stand for every rollout, and what a crash has cut is asked for again."""

import resource
from pathlib import Path

import numpy as np
import pytest

from rollmesh.core.errors import UserError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import GroupRecord, Outcome, RolloutRecord, Task
from rollmesh.serve.client.arrivals import Dropped, Finished
from rollmesh.serve.client.evaluation import rows_of
from rollmesh.serve.client.evaluation_files import RESULTS, Results, Row


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


def test_row_says_what_its_rollout_came_to() -> None:
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


def test_group_without_a_result_has_a_row_for_each_rollout_and_says_why() -> None:
    rows = rows_of(Dropped(GroupId("r1", 5), "quarantined: w1 and w2 died"), "t", 3)
    assert [row.index for row in rows] == [0, 1, 2]
    assert {(row.outcome, row.error) for row in rows} == {
        ("quarantined", "quarantined: w1 and w2 died")
    }
    assert not any(row.has_result for row in rows)


def test_incomplete_group_shows_what_there_is() -> None:
    record = GroupRecord(
        task=Task(id="t"),
        rollouts=[RolloutRecord(index=1, outcome=Outcome.COMPLETED, reward=1.0)],
    )
    first, second = rows_of(Dropped(GroupId("r1", 5), "infra_error: 1 of 2", record), "t", 2)
    assert (first.outcome, first.has_result) == ("infra_error", False)
    assert (second.outcome, second.reward, second.has_result) == ("completed", 1.0, False)


def test_opening_again_keeps_whole_groups_that_came_to_a_result(tmp_path: Path) -> None:
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


def test_full_disk_is_one_line_and_cuts_no_other_group(tmp_path: Path) -> None:
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


def test_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="name another --out"):
        Results(tmp_path / "file" / "folder")
