"""The selection bias of a run is computed from its files, finished or not; the rank-sum test is
exact."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.trainer.reports.selection_bias import (
    OutcomeComparison,
    SelectionBias,
    rank_sum,
    selection_bias,
)


class Left:
    """The two files of a run folder."""

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

    def verdict(self, outcome: str, by: str) -> OutcomeComparison:
        bias = selection_bias(self.folder)
        [found] = [each for each in bias.verdicts if (each.outcome, each.by) == (outcome, by)]
        return found


@pytest.fixture
def left(tmp_path: Path) -> Left:
    return Left(tmp_path)


def test_dropping_longer_and_harder_rollouts_is_found(left: Left) -> None:
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
    bias = selection_bias(left.folder)
    assert (bias.num_ended, bias.outcomes) == (60, {"trained": 40, "stale": 20})
    assert bias.mean_age == {"stale": 3.0}
    assert bias.by_length[0].shares == {"trained": 1.0}
    assert bias.by_length[-1].shares == {"stale": 1.0}
    assert sum(part.num for part in bias.by_length) == 60
    assert [(part.name, part.num) for part in bias.by_env] == [("guess", 60)]


def test_random_drops_show_no_difference(left: Left) -> None:
    chance = random.Random(1)
    for number in range(60):
        lengths = [chance.randint(10, 1000) for _ in range(4)]
        rewards = [float(chance.random() < 0.5) for _ in range(4)]
        left.group(f"t{number}", lengths, rewards, "requeued: age 4" if number % 4 == 0 else "")
    for by in ("length", "difficulty"):
        test = left.verdict("requeued", by).test
        assert test is not None
        assert test.p > 0.05


def test_difficulty_is_the_mean_reward_of_the_tasks_other_rollouts(left: Left) -> None:
    left.group("t", [5, 5, 5], [1.0, 0.0, 0.0])
    left.group("alone", [5], [1.0])
    parts = selection_bias(left.folder).by_difficulty
    assert [(part.name, part.num) for part in parts] == [("0", 1), ("0.5", 2)]


def test_masked_samples_are_reported_separately(left: Left) -> None:
    left.group("t0", [5, 6], [1.0, 0.0])
    left.group("t1", [50, 60], [1.0, 0.0], num_masked=7)
    left.group("t2", [70], [1.0], "masked: no token of it is within the age bound")
    assert selection_bias(left.folder).outcomes == {"masked": 3, "trained": 2}
    assert left.verdict("masked", "length").test is None, "too few"


def test_evaluations_and_other_runs_are_left_out(left: Left) -> None:
    left.append("drops.jsonl", {"group_id": "a/0", "num_rollouts": 1, "reason": "evaluation: away"})
    left.append(
        "drops.jsonl", {"group_id": "b/0", "num_rollouts": 0, "reason": "of an earlier run"}
    )
    left.append("drops.jsonl", {"group_id": "c/0", "num_rollouts": 4, "reason": "cancelled: why"})
    left.group("t0", [5], [1.0], is_eval=True, step=None)
    bias = selection_bias(left.folder)
    assert (bias.num_ended, bias.unseen) == (0, {"cancelled": 4})


def test_environments_are_reported_separately(left: Left) -> None:
    left.group("t0", [5, 5], [1.0, 1.0], env="a")
    left.group("t0", [5, 5], [0.0, 0.0], "agent_error: broke", env="b")
    bias = selection_bias(left.folder)
    assert [(part.name, part.shares) for part in bias.by_env] == [
        ("a", {"trained": 1.0}),
        ("b", {"agent_error": 1.0}),
    ]
    assert [(part.name, part.num) for part in bias.by_difficulty] == [("0", 2), ("1", 2)]


def test_incomplete_last_line_is_ignored_and_other_malformed_lines_are_counted(left: Left) -> None:
    left.group("t0", [5, 5], [1.0, 1.0])
    with (left.folder / "trajectories.jsonl").open("ab") as file:
        file.write(b'not json\n{"rollout_id": 7}\n{"rollout_id": "run/9/')
    bias = selection_bias(left.folder)
    assert (bias.num_ended, bias.num_unread) == (2, 2)


def test_folder_without_ended_rollouts_has_an_empty_report(left: Left) -> None:
    assert selection_bias(left.folder) == SelectionBias(0, {}, {}, {}, [], [], [], [], 0)


VALUES = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=20)


def pairs_won(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the statistic, computed from its definition."""
    won = sum((a > b) + (a == b) / 2 for a, b in itertools.product(first, second))
    return won / (len(first) * len(second))


@given(first=VALUES, second=VALUES)
def test_the_share_of_pairs_is_counted_with_ties_as_halves(
    first: list[float], second: list[float]
) -> None:
    found, swapped = rank_sum(first, second), rank_sum(second, first)
    assert found is not None
    assert swapped is not None
    assert found.share_larger == pytest.approx(pairs_won(first, second))
    assert swapped.share_larger == pytest.approx(1.0 - found.share_larger)
    assert swapped.p == pytest.approx(found.p)


def test_probability_equals_that_of_shuffled_groups() -> None:
    """Compare with a permutation test, which assumes nothing."""
    chance = random.Random(0)
    first = [float(chance.randint(2, 12)) for _ in range(20)]
    second = [float(chance.randint(0, 10)) for _ in range(25)]
    found = rank_sum(first, second)
    assert found is not None
    both, num_as_far = first + second, 0
    far = abs(found.share_larger - 0.5)
    for _ in range(4000):
        chance.shuffle(both)
        shuffled = rank_sum(both[:20], both[20:])
        assert shuffled is not None
        num_as_far += abs(shuffled.share_larger - 0.5) >= far - 1e-12
    assert found.p == pytest.approx(num_as_far / 4000, rel=0.25)


def test_rank_sum_matches_a_textbook_example() -> None:
    """U = 11 of 36 pairs; sd = sqrt(6 * 6 / 12 * 13); z = (18 - 11 - 1/2) / sd = 1.0408."""
    found = rank_sum([1, 2, 4, 5, 8, 12], [3, 6, 7, 9, 10, 11])
    assert found is not None
    assert found.share_larger == pytest.approx(11 / 36)
    assert found.p == pytest.approx(0.2980, abs=1e-4)


def test_equal_values_show_no_difference() -> None:
    found = rank_sum([1.0] * 9, [1.0] * 9)
    assert found is not None
    assert (found.share_larger, found.p) == (0.5, 1.0)
    assert rank_sum([], [1.0]) is None
