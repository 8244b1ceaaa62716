"""Groups whose siblings all have the same reward are counted, and a constant reward is reported."""

import threading

import pytest
from structlog.testing import capture_logs

from rollmesh.core.config import JournalConfig
from rollmesh.core.types import GroupRecord, Outcome, Task
from rollmesh.testing.client import rollout
from tests.unit.trainer.trainer_incarnations import TrainerIncarnation, TrainerIncarnations


def train(incarnation: TrainerIncarnation, *rewards_of_groups: tuple[float, ...]) -> None:
    """Run the train loop to its end, on groups with these rewards."""
    thread = threading.Thread(target=incarnation.loop.run, args=[incarnation.recovery])
    thread.start()
    for rewards in rewards_of_groups:
        group_id, task = incarnation.receive_ask()
        rollouts = [rollout(at, Outcome.COMPLETED, (1,)) for at in range(len(rewards))]
        for each, reward in zip(rollouts, rewards, strict=True):
            each.reward = reward
        incarnation.deliver(group_id, GroupRecord(task=Task(id=task.id), rollouts=rollouts))
    thread.join()


def test_groups_with_equal_rewards_are_counted_in_each_step(begin: TrainerIncarnations) -> None:
    incarnation = begin(JournalConfig(), "run.name=run", "trainer.num_steps=3")
    train(incarnation, (0.1 + 0.2, 0.3), (0.0, 1.0), (1.0, 1.0))
    shares = [row["frac_equal_groups"] for row in incarnation.rows("metrics.jsonl")]
    assert shares == [1.0, 0.0, 1.0]
    assert incarnation.tally.summary()["frac_equal_groups"] == pytest.approx(2 / 3, abs=1e-4)


def test_constant_reward_is_logged_once(begin: TrainerIncarnations) -> None:
    num_steps = 12
    settings = ("trainer.max_staleness=20", f"trainer.num_steps={num_steps}")
    incarnation = begin(JournalConfig(), "run.name=run", *settings)
    with capture_logs() as logs:
        train(incarnation, *[(0.5, 0.5)] * num_steps)
    warnings = [each for each in logs if each["event"] == "rewards.equal"]
    assert [each["step"] for each in warnings] == [9]
    assert "all rewards were equal" in warnings[0]["why"]
