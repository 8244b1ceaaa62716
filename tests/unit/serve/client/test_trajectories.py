"""An evaluation stores messages and samples of every rollout with a result."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollmesh.core.errors import UserError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import (
    ErrorPlace,
    GroupRecord,
    NodeRow,
    Outcome,
    RolloutRecord,
    SamplingParams,
    Task,
    VersionRun,
)
from rollmesh.serve.client.arrivals import Dropped, Finished
from rollmesh.serve.client.trajectories import BLOCK_BYTES, TRAJECTORIES, Trajectories
from tests.disks import full_disk

GROUP = GroupId("r1", 3)
PLACE = ErrorPlace("ValueError", "/h/my_env.py", 15, "run")
MESSAGES = b'[{"role":"user","content":"hi \\u00e9"}]'


def record() -> GroupRecord:
    params = SamplingParams(max_tokens=8)
    played = RolloutRecord(
        index=0,
        outcome=Outcome.COMPLETED,
        reward=0.155,
        metrics={"turns": 2.0},
        nodes=[NodeRow(-1, 1, False), NodeRow(0, 2, True, (VersionRun(3, 2),), params=params)],
        num_tokens=3,
        num_logprobs=2,
        messages=msgspec.Raw(MESSAGES),
        started_s=1000.0,
        duration_s=0.5,
    )
    broke = RolloutRecord(index=1, outcome=Outcome.AGENT_ERROR, error="ValueError: no", place=PLACE)
    return GroupRecord(task=Task(id="t"), rollouts=[played, broke], is_eval=True)


def finished() -> Finished:
    token_ids, logprobs = np.array([7, 8, 9], np.int32), np.array([-0.5, -1.5], np.float32)
    return Finished(GROUP, 1, "w1", record(), token_ids, logprobs, 0)


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / TRAJECTORIES).read_bytes().splitlines()
    return [msgspec.json.decode(line, type=dict[str, Any]) for line in lines]


def test_a_group_with_a_result_leaves_messages_samples_and_errors(tmp_path: Path) -> None:
    with Trajectories(tmp_path) as trajectories:
        trajectories.add(finished())
    played, broke = rows(tmp_path)
    assert (played["rollout_id"], played["task_id"], played["is_eval"]) == ("r1/3/0", "t", True)
    assert (played["reward"], played["metrics"]) == (0.155, {"turns": 2.0})
    assert played["messages"] == [{"role": "user", "content": "hi \u00e9"}]
    assert (played["time_s"], played["worker_id"]) == (1000.5, "w1")
    [sample] = played["samples"]
    assert (sample["token_ids"], sample["loss_mask"]) == ([7, 8, 9], [0, 1, 1])
    assert (broke["error"], broke["samples"]) == ("ValueError: no", [])
    assert broke["place"] == msgspec.to_builtins(PLACE)


def test_a_group_without_a_result_leaves_its_finished_rollouts(tmp_path: Path) -> None:
    with Trajectories(tmp_path) as trajectories:
        trajectories.add(Dropped(GROUP, "infra_error: 1 of 2", record()))
        trajectories.add(Dropped(GROUP, "env_failed: none"))
    assert [row["samples"] for row in rows(tmp_path)] == [[], []]
    assert rows(tmp_path)[0]["messages"]


@pytest.mark.parametrize("torn", [b"", b'{"rollout_id": "r1', b"x" * (BLOCK_BYTES + 7)])
def test_a_row_torn_by_a_crash_is_removed_before_more_is_written(
    tmp_path: Path, torn: bytes
) -> None:
    with Trajectories(tmp_path) as trajectories:
        trajectories.add(finished())
    path = tmp_path / TRAJECTORIES
    path.write_bytes(path.read_bytes() + torn)
    with Trajectories(tmp_path) as trajectories:
        trajectories.add(finished())
    assert len(rows(tmp_path)) == 4


def test_an_unwritable_folder_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none/trajectories\.jsonl: .*; name another --out"):
        Trajectories(tmp_path / "none")


def test_a_full_disk_is_a_one_line_error_and_damages_no_earlier_row(tmp_path: Path) -> None:
    with Trajectories(tmp_path) as trajectories:
        trajectories.add(finished())
        size = (tmp_path / TRAJECTORIES).stat().st_size
        with full_disk(size + 100), pytest.raises(UserError, match=r"ulimit -f.*, then --resume"):
            trajectories.add(finished())
    with Trajectories(tmp_path):
        assert len(rows(tmp_path)) == 2
