"""What a run selects against is read from what it left, finished or not."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.trainer.books.bias import Bias, Verdict, bias_of


class Left:
    """A run folder's two files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_groups = 0

    def append(self, name: str, row: dict[str, Any]) -> None:
        with (self.folder / name).open("ab") as file:
            file.write(msgspec.json.encode({"time_s": 1.0} | row) + b"\n")

    def group(
        self,
        task_id: str,
        lengths: list[int],
        rewards: list[float],
        reason: str = "",
        env: str = "guess",
        **more: Any,
    ) -> None:
        group_id = f"run/{self.num_groups}"
        self.num_groups += 1
        of = {"task_id": task_id, "env": env}
        for index, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
            if reason:
                drop = {"group_id": group_id, "index": index, "reason": reason, "length": length}
                self.append("drops.jsonl", drop | of | {"age": 3, "num_rollouts": 1})
            step = None if reason else 0
            row = {"rollout_id": f"{group_id}/{index}", "reward": reward, "length": length}
            self.append("trajectories.jsonl", row | of | {"step": step} | more)

    def verdict(self, fate: str, by: str) -> Verdict:
        bias = bias_of(self.folder)
        [found] = [each for each in bias.verdicts if (each.fate, each.by) == (fate, by)]
        return found


@pytest.fixture
def left(tmp_path: Path) -> Left:
    return Left(tmp_path)


def test_longer_and_harder_ones_that_were_dropped_are_found(left: Left) -> None:
    chance = random.Random(0)
    for number in range(30):
        is_hard = number % 3 == 0
        lengths = [chance.randint(800, 1500) if is_hard else chance.randint(50, 400)] * 2
        rewards = [0.0, 0.0] if is_hard else [1.0, float(number % 2)]
        left.group(f"t{number}", lengths, rewards, "stale: age 3" if is_hard else "")
    length, reward = left.verdict("stale", "length"), left.verdict("stale", "difficulty")
    assert (length.num, length.num_trained) == (10, 20), "groups, and not rollouts"
    assert length.test is not None
    assert length.test.share_larger == 1.0
    assert length.test.p < 0.001
    assert reward.test is not None
    assert (reward.median, reward.test.share_larger) == (0.0, 0.0)
    bias = bias_of(left.folder)
    assert (bias.num_ended, bias.fates) == (60, {"trained": 40, "stale": 20})
    assert bias.mean_age == {"stale": 3.0}
    assert bias.by_length[0].shares == {"trained": 1.0}
    assert bias.by_length[-1].shares == {"stale": 1.0}
    assert sum(part.num for part in bias.by_length) == 60
    assert [(part.name, part.num) for part in bias.by_env] == [("guess", 60)]


def test_where_chance_dropped_no_difference_is_told(left: Left) -> None:
    chance = random.Random(1)
    for number in range(60):
        lengths = [chance.randint(10, 1000) for _ in range(4)]
        rewards = [float(chance.random() < 0.5) for _ in range(4)]
        left.group(f"t{number}", lengths, rewards, "requeued: age 4" if number % 4 == 0 else "")
    for by in ("length", "difficulty"):
        test = left.verdict("requeued", by).test
        assert test is not None
        assert test.p > 0.05


def test_difficulty_is_what_the_others_of_the_task_earned(left: Left) -> None:
    left.group("t", [5, 5, 5], [1.0, 0.0, 0.0])
    left.group("alone", [5], [1.0])
    parts = bias_of(left.folder).by_difficulty
    assert [(part.name, part.num) for part in parts] == [("0", 1), ("0.5", 2)]


def test_masked_ones_are_told_apart(left: Left) -> None:
    left.group("t0", [5, 6], [1.0, 0.0])
    left.group("t1", [50, 60], [1.0, 0.0], num_masked=7)
    left.group("t2", [70], [1.0], "masked: no token of it is within the age bound")
    assert bias_of(left.folder).fates == {"masked": 3, "trained": 2}
    assert left.verdict("masked", "length").test is None, "too few"


def test_evaluations_and_other_runs_are_left_out(left: Left) -> None:
    left.append("drops.jsonl", {"group_id": "a/0", "num_rollouts": 1, "reason": "evaluation: away"})
    left.append(
        "drops.jsonl", {"group_id": "b/0", "num_rollouts": 0, "reason": "of an earlier run"}
    )
    left.append("drops.jsonl", {"group_id": "c/0", "num_rollouts": 4, "reason": "cancelled: why"})
    left.group("t0", [5], [1.0], is_eval=True, step=None)
    bias = bias_of(left.folder)
    assert (bias.num_ended, bias.unseen) == (0, {"cancelled": 4})


def test_environments_are_told_apart(left: Left) -> None:
    left.group("t0", [5, 5], [1.0, 1.0], env="a")
    left.group("t0", [5, 5], [0.0, 0.0], "agent_error: broke", env="b")
    bias = bias_of(left.folder)
    assert [(part.name, part.shares) for part in bias.by_env] == [
        ("a", {"trained": 1.0}),
        ("b", {"agent_error": 1.0}),
    ]
    assert [(part.name, part.num) for part in bias.by_difficulty] == [("0", 2), ("1", 2)]


def test_torn_lines_of_a_running_run_are_waited_for_and_others_counted(left: Left) -> None:
    left.group("t0", [5, 5], [1.0, 1.0])
    with (left.folder / "trajectories.jsonl").open("ab") as file:
        file.write(b'not json\n{"rollout_id": 7}\n{"rollout_id": "run/9/')
    bias = bias_of(left.folder)
    assert (bias.num_ended, bias.num_unread) == (2, 2)


def test_a_folder_in_which_nothing_has_ended(left: Left) -> None:
    assert bias_of(left.folder) == Bias(0, {}, {}, {}, [], [], [], [], 0)
