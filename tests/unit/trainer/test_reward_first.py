"""A run is shown by its mean reward; success is shown only where it is known."""

import threading
from typing import Any

import msgspec
import pytest

from rollmesh.core.config import JournalConfig
from rollmesh.core.types import GroupRecord, Outcome, Task
from rollmesh.testing.client import rollout
from tests.unit.trainer.trainer_incarnations import TrainerIncarnation, TrainerIncarnations

Scored = tuple[float, dict[str, float]]


def train(incarnation: TrainerIncarnation, *groups: tuple[Scored, ...]) -> list[dict[str, Any]]:
    """Run the train loop to its end on groups with these rewards and metrics; return its rows."""
    thread = threading.Thread(target=incarnation.loop.run, args=[incarnation.recovery])
    thread.start()
    for scored in groups:
        group_id, task = incarnation.receive_ask()
        rollouts = [rollout(at, Outcome.COMPLETED, (1,)) for at in range(len(scored))]
        for each, (reward, metrics) in zip(rollouts, scored, strict=True):
            each.reward, each.metrics = reward, metrics
        incarnation.deliver(group_id, GroupRecord(task=Task(id=task.id), rollouts=rollouts))
    thread.join()
    return incarnation.rows("metrics.jsonl")


def begun(begin: TrainerIncarnations, num_steps: int, *settings: str) -> TrainerIncarnation:
    return begin(JournalConfig(), "run.name=run", f"trainer.num_steps={num_steps}", *settings)


def success_keys(row: dict[str, Any]) -> list[str]:
    return [name for name in row if "success" in name and not name.startswith("env/")]


def test_run_with_fractional_rewards_has_a_mean_reward_and_no_success(
    begin: TrainerIncarnations,
) -> None:
    incarnation = begun(begin, 2)
    rows = train(incarnation, ((0.155, {}), (0.155, {})), ((0.155, {}), (0.155, {})))
    assert [row["reward"] for row in rows] == [0.155, 0.155]
    summary = incarnation.tally.summary()
    assert (summary["reward_first10"], summary["reward_last10"]) == (0.155, 0.155)
    assert next(iter(summary)) == "reward_untrained"
    assert [success_keys(each) for each in (*rows, summary)] == [[], [], []]


def test_success_of_rewards_of_0_and_1_is_their_share(begin: TrainerIncarnations) -> None:
    incarnation = begun(begin, 1)
    [row] = train(incarnation, ((1.0, {}), (0.0, {})))
    assert (row["reward"], row["success"]) == (0.5, 0.5)
    assert incarnation.tally.summary()["success_last10"] == 0.5


def test_success_is_no_longer_shown_once_another_reward_was_seen(
    begin: TrainerIncarnations,
) -> None:
    incarnation = begun(begin, 2)
    rows = train(incarnation, ((1.0, {}), (0.0, {})), ((0.3, {}), (0.0, {})))
    assert [success_keys(row) for row in rows] == [["success"], []]
    assert success_keys(incarnation.tally.summary()) == []
    incarnation.saver.save(2)
    again = begun(begin, 3)
    assert not again.tally.rule.is_known, "a later trainer process knows it too"


def test_a_threshold_of_the_settings_makes_success_known(begin: TrainerIncarnations) -> None:
    incarnation = begun(begin, 1, "pass_threshold=0.5")
    [row] = train(incarnation, ((0.7, {}), (0.155, {})))
    assert row["success"] == 0.5


def test_success_reported_by_the_environment_is_shown(begin: TrainerIncarnations) -> None:
    incarnation = begun(begin, 1)
    [row] = train(incarnation, ((0.7, {"success": 0.0}), (0.9, {"success": 1.0})))
    assert row["success"] == 0.5


def test_metrics_of_the_environment_reach_the_rows_as_means(begin: TrainerIncarnations) -> None:
    incarnation = begun(begin, 1)
    [row] = train(incarnation, ((0.7, {"turns": 3.0, "tests passed": 1.0}), (0.9, {"turns": 4.0})))
    assert (row["env/turns"], row["env/tests passed"]) == (3.5, 1.0)


@pytest.mark.parametrize("reward", [1e-9, 123456.789])
def test_a_mean_reward_keeps_its_digits(begin: TrainerIncarnations, reward: float) -> None:
    incarnation = begun(begin, 1)
    [row] = train(incarnation, ((reward, {}), (reward, {})))
    assert row["reward"] == pytest.approx(reward, rel=1e-5)
    assert msgspec.json.encode(incarnation.tally.summary())
