"""Record files can be read back and wait for a full disk; counts and rows of drops agree."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rollmesh.core.errors import UserError
from rollmesh.core.ids import GroupId, RolloutId
from rollmesh.core.types import ErrorPlace, GroupRecord, Outcome, RolloutRecord, Task
from rollmesh.serve.client.journal_entries import SeenRollout
from rollmesh.serve.client.samples import Sample
from rollmesh.testing.clock import FakeClock
from rollmesh.trainer.reports.exactness import GapFindings, GapStats, Origin
from rollmesh.trainer.reports.records import (
    MAX_WORKERS,
    OTHER_WORKERS,
    DropLedger,
    RunRecords,
    Tally,
    open_waiting,
    write_summary,
)
from rollmesh.trainer.reports.selection_bias import DropLine

GROUP = GroupId("r1", 3)


def sample() -> Sample:
    return Sample(
        rollout_id=RolloutId(GROUP, 0),
        branch="main",
        token_ids=np.array([5, 6, 7], np.int32),
        logprobs=np.array([0, -0.5, -1.25], np.float32),
        loss_mask=np.array([False, True, True]),
        policy_versions=np.array([-1, 2, 3], np.int32),
        reward=1.0,
        weight=1.0,
        temperature=1.0,
    )


def rows(path: Path) -> list[dict[str, object]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def test_rollout_row_holds_messages_and_tokens(tmp_path: Path) -> None:
    records = RunRecords(tmp_path, FakeClock())
    rollout = RolloutRecord(
        index=0, outcome=Outcome.COMPLETED, reward=1.0, messages=msgspec.Raw(b'[{"role":"user"}]')
    )
    group = GroupRecord(task=Task(id="guess-3"), rollouts=[rollout])
    records.rollout(RolloutId(GROUP, 0), group, rollout, [sample()], step=4, worker_id="w0")
    records.close()
    (row,) = rows(tmp_path / "trajectories.jsonl")
    assert row["rollout_id"] == "r1/3/0"
    assert (row["task_id"], row["outcome"], row["step"]) == ("guess-3", "completed", 4)
    assert row["messages"] == [{"role": "user"}]
    assert row["samples"] == [
        {
            "token_ids": [5, 6, 7],
            "logprobs": [0.0, -0.5, -1.25],
            "loss_mask": [0, 1, 1],
            "policy_versions": [-1, 2, 3],
            "branch": "main",
        }
    ]


def test_drops_and_steps_are_rows_of_their_own_files(tmp_path: Path) -> None:
    records = RunRecords(tmp_path, FakeClock())
    records.step({"step": 0, "success": 0.5})
    records.drop(GROUP, 4, "stale: age 3")
    records.flush()
    assert rows(tmp_path / "metrics.jsonl")[0]["success"] == 0.5
    assert rows(tmp_path / "drops.jsonl")[0]["reason"] == "stale: age 3"
    records.close()


def test_summary_counts_the_unexplained_remainder_as_lost() -> None:
    tally = Tally()
    tally.num_asked, tally.num_trained, tally.num_dropped, tally.num_open = 100, 80, 12, 5
    assert tally.summary()["num_lost"] == 3


def test_summary_of_a_run_without_a_step_has_no_reward_and_no_success() -> None:
    summary = Tally().summary()
    assert summary["reward_first10"] is None
    assert not any("success" in name for name in summary)
    assert summary["share_age_ge_1"] == 0.0


def test_summary_shares_and_means() -> None:
    tally = Tally()
    for success in [0.0] * 10 + [0.5] * 1000 + [1.0] * 10:
        tally.add_step(success / 10, success)
    tally.ages.update({0: 3, 1: 1})
    tally.workers.update({"worker-0": 1, "worker-1": 3})
    tally.outcomes.update({"completed": 4})
    summary = tally.summary()
    assert list(summary)[:3] == ["reward_untrained", "reward_first10", "reward_last10"]
    assert (summary["reward_first10"], summary["reward_last10"]) == (0.0, 0.1)
    assert (summary["success_first10"], summary["success_last10"]) == (0.0, 1.0)
    assert summary["num_steps"] == 1020
    assert (summary["max_staleness"], summary["share_age_ge_1"]) == (1, 0.25)
    assert summary["share_by_worker"] == {"worker-0": 0.25, "worker-1": 0.75}


def test_workers_are_counted_by_name_up_to_a_bound() -> None:
    tally = Tally()
    for number in range(MAX_WORKERS + 5):
        tally.add_worker(f"worker-{number}")
        tally.add_worker("worker-0")
    assert len(tally.workers) == MAX_WORKERS + 1
    assert tally.workers["worker-0"] == MAX_WORKERS + 6
    assert tally.workers[OTHER_WORKERS] == 5


def test_summary_file_is_complete(tmp_path: Path) -> None:
    write_summary(tmp_path, {"num_lost": 0})
    assert msgspec.json.decode((tmp_path / "summary.json").read_bytes()) == {"num_lost": 0}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_restarted_trainer_rewrites_what_no_checkpoint_covers(tmp_path: Path) -> None:
    first = RunRecords(tmp_path, FakeClock())
    first.step({"step": 0})
    first.drop(GROUP, 4, "stale: age 3")
    covered = first.offsets()
    first.step({"step": 1})
    first.step({"step": 2})
    first.close()
    second = RunRecords(tmp_path, FakeClock(), covered)
    second.step({"step": 1})
    second.recovery({"life": 2})
    second.close()
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [0, 1]
    assert len(rows(tmp_path / "drops.jsonl")) == 1
    third = RunRecords(tmp_path, FakeClock())
    third.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    assert rows(tmp_path / "recoveries.jsonl")[0]["life"] == 2


def test_file_shorter_than_its_checkpoint_offset_is_unchanged(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b"{}\n")
    records = RunRecords(tmp_path, FakeClock(), {"metrics.jsonl": 100})
    assert records.offsets()["metrics.jsonl"] == 3
    records.close()


def test_counts_continue_from_a_checkpoint() -> None:
    tally, again = Tally(), Tally()
    for success in [0.25] * 12:
        tally.add_step(success, success)
    tally.num_asked, tally.num_trained, tally.reward_untrained = 48, 40, 0.5
    tally.rule.see(0.5, {})
    tally.ages.update({0: 3, 2: 1})
    tally.add_worker("worker-0")
    origin = Origin(3, "http://e", "chat", "")
    tally.exactness.add(GapFindings({origin: GapStats(2, math.inf, math.nan, 1, 1)}, {}, [0], {}))
    again.restore(msgspec.json.decode(msgspec.json.encode(tally.state())))
    assert repr(again.summary()) == repr(tally.summary())
    assert repr(again.state()) == repr(tally.state())
    again.ages[5] += 1
    again.add_step(1.0, None)
    assert (again.num_steps, again.summary()["max_staleness"]) == (13, 5)


FULL = Path("/dev/full")
"""Every write fails for lack of space (full(4))."""


def test_row_refused_by_a_full_disk_is_written_when_there_is_space(tmp_path: Path) -> None:
    with (tmp_path / "room").open("wb") as allocator:
        num_waits = 0

        def makes_room() -> bool:
            nonlocal num_waits
            num_waits += 1
            os.dup2(allocator.fileno(), file.fileno())
            return True

        with open_waiting(FULL, makes_room) as file:
            file.write(b"a row\n")
            file.flush()
            file.write(b"another\n")
    assert (tmp_path / "room").read_bytes() == b"a row\nanother\n"
    assert num_waits == 1


def test_ended_wait_is_one_line() -> None:
    file = open_waiting(FULL, lambda: False)
    file.write(b"a row\n")
    for end in (file.flush, file.close):
        with pytest.raises(UserError, match=r"^/dev/full: No space left .*; free disk space, then"):
            end()


DROPPED_GROUP = GroupId("r", 3)


class LedgerFiles:
    """A drop ledger, and the files that it writes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "drops.jsonl"
        self.records, self.tally = RunRecords(folder, FakeClock()), Tally()
        self.ledger = DropLedger(self.records, self.tally, "guess")

    def rows(self) -> list[dict[str, Any]]:
        self.records.flush()
        lines = self._path.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=dict[str, Any]) for line in lines]


@pytest.fixture
def ledger_files(tmp_path: Path) -> Iterator[LedgerFiles]:
    ledger_files = LedgerFiles(tmp_path)
    yield ledger_files
    ledger_files.records.close()


def test_dropped_rollout_has_a_row_with_all_that_is_known(ledger_files: LedgerFiles) -> None:
    place = ErrorPlace("ValueError", "/h/my_env.py", 15, "run")
    error = "ValueError: no tool (my_env.py:15 in run)"
    seen = SeenRollout(1, Outcome.AGENT_ERROR, 40, (3, 5), error, place)
    ledger_files.ledger.rollout(DROPPED_GROUP, "t7", seen, "stale: age 3", 3)
    [row] = ledger_files.rows()
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
    assert ledger_files.tally.num_dropped == 1


def test_unseen_rollouts_of_a_group_are_one_row_with_their_number(
    ledger_files: LedgerFiles,
) -> None:
    ledger_files.ledger.unseen(DROPPED_GROUP, "t7", 3, "deadline: over")
    ledger_files.ledger.unseen(DROPPED_GROUP, "t7", 0, "deadline: over")
    [row] = ledger_files.rows()
    assert (row["num_rollouts"], row["task_id"], row["env"]) == (3, "t7", "guess")
    assert not row.keys() & {"index", "length", "age"}
    assert ledger_files.tally.num_dropped == 3


def test_drops_outside_training_are_written_and_not_counted(ledger_files: LedgerFiles) -> None:
    ledger_files.ledger.uncounted(DROPPED_GROUP, "t7", 1, "evaluation: deadline: over")
    assert [row["reason"] for row in ledger_files.rows()] == ["evaluation: deadline: over"]
    assert ledger_files.tally.num_dropped == 0


def test_bias_report_reads_every_drop_row(ledger_files: LedgerFiles) -> None:
    ledger_files.ledger.rollout(
        DROPPED_GROUP, "t", SeenRollout(0, Outcome.COMPLETED, 4, ()), "foreign: v9", None
    )
    ledger_files.ledger.unseen(DROPPED_GROUP, "t", 2, "env_failed: no licence")
    seen, unseen = (msgspec.convert(row, DropLine) for row in ledger_files.rows())
    assert (seen.code, seen.index, seen.length, seen.age) == ("foreign", 0, 4, None)
    assert (unseen.code, unseen.index, unseen.num_rollouts) == ("env_failed", None, 2)
