"""Groups whose siblings all have the same reward are counted, and a constant reward is reported."""

import threading

import pytest
from structlog.testing import capture_logs

from rollmesh.core.config import JournalConfig
from rollmesh.core.types import GroupRecord, Outcome, Task
from rollmesh.testing.client import rollout
from tests.unit.trainer.trainer_lives import Life, Lives


def train(life: Life, *rewards_of_groups: tuple[float, ...]) -> None:
    """Run the train loop to its end, on groups with these rewards."""
    thread = threading.Thread(target=life.loop.run, args=[life.recovery])
    thread.start()
    for rewards in rewards_of_groups:
        group_id, task = life.hear_ask()
        rollouts = [rollout(at, Outcome.COMPLETED, (1,)) for at in range(len(rewards))]
        for each, reward in zip(rollouts, rewards, strict=True):
            each.reward = reward
        life.deliver(group_id, GroupRecord(task=Task(id=task.id), rollouts=rollouts))
    thread.join()


def test_groups_with_equal_rewards_are_counted_in_each_step(begin: Lives) -> None:
    life = begin(JournalConfig(), "run.name=run", "trainer.num_steps=3")
    train(life, (0.1 + 0.2, 0.3), (0.0, 1.0), (1.0, 1.0))
    shares = [row["frac_equal_groups"] for row in life.rows("metrics.jsonl")]
    assert shares == [1.0, 0.0, 1.0]
    assert life.tally.summary()["frac_equal_groups"] == pytest.approx(2 / 3, abs=1e-4)


def test_a_constant_reward_is_reported_once_as_no_group_differs(begin: Lives) -> None:
    num_steps = 12
    settings = ("trainer.max_staleness=20", f"trainer.num_steps={num_steps}")
    life = begin(JournalConfig(), "run.name=run", *settings)
    with capture_logs() as told:
        train(life, *[(0.5, 0.5)] * num_steps)
    warnings = [each for each in told if each["event"] == "rewards.equal"]
    assert [each["step"] for each in warnings] == [9]
    assert "all rewards were equal" in warnings[0]["why"]
