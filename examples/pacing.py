"""Pace a train loop in two ways: with AReaL's interface, and with a StalenessManager.

    python -m examples.pacing

- There is no model: rollouts are durations, most of them short, one as long as twenty steps, and
  one in eight is rejected. After half of the steps the trainer restarts while its rollouts
  continue.
- Both loops get the same rollouts.
"""

import random

import msgspec

from rollmesh.compat import ArealStalenessManager
from rollmesh.core.ids import GroupId
from rollmesh.trainer.staleness import (
    BatchTaken,
    GroupAdmitted,
    GroupArrived,
    GroupEnded,
    StalenessManager,
    StalenessSettings,
    StepPublished,
    TakeBatch,
)

BATCH, MAX_STALENESS, MAX_RUNNING, STEPS = 4, 2, 64, 40
LONG = 5
"""Number of the long rollout."""


class Rollout(msgspec.Struct):
    """A rollout that runs elsewhere."""

    number: int
    asked_step: int
    left: int
    is_good: bool

    @property
    def group_id(self) -> GroupId:
        return GroupId("pacing", self.number)


class Elsewhere:
    """Simulated engines and environments that advance in turns."""

    def __init__(self) -> None:
        self.running: list[Rollout] = []
        self._chance = random.Random(0)
        self._num_asked = 0

    def ask(self, step: int) -> Rollout:
        """Start a rollout."""
        num, chance = self._num_asked, self._chance
        left = 30 if num == LONG else chance.randint(1, 5)
        self.running.append(Rollout(num, step, left, num == LONG or chance.random() > 1 / 8))
        self._num_asked += 1
        return self.running[-1]

    def advance(self) -> list[Rollout]:
        """Advance by one turn; return the rollouts that have ended."""
        for each in self.running:
            each.left -= 1
        ended = [each for each in self.running if not each.left]
        self.running = [each for each in self.running if each.left]
        return ended


class Trained:
    """Trained steps and the ages of their rollouts."""

    def __init__(self) -> None:
        self.ages: list[int] = []
        self.step = 0

    def get_version(self) -> int:
        """Number of steps; called by ArealStalenessManager."""
        return self.step

    def train(self, batch: list[Rollout]) -> None:
        """Train one step."""
        self.ages += [self.step - each.asked_step for each in batch]
        self.step += 1


def known() -> Trained:
    """Run a loop written for AReaL's interface."""
    trained, elsewhere, ready = Trained(), Elsewhere(), list[Rollout]()
    staleness = ArealStalenessManager(trained, MAX_RUNNING, BATCH, MAX_STALENESS)
    while trained.step < STEPS:
        for _ in range(min(staleness.get_capacity(), staleness.get_pending_limit())):
            staleness.on_rollout_enqueued()
            staleness.on_rollout_submitted()
            elsewhere.ask(trained.step)
        for each in elsewhere.advance():
            if each.is_good:
                staleness.on_rollout_accepted()
                ready.append(each)
            else:
                staleness.on_rollout_rejected()
        if len(ready) >= BATCH:
            ready.sort(key=lambda each: each.asked_step)
            trained.train(ready[:BATCH])
            del ready[:BATCH]
            if trained.step == STEPS // 2:
                staleness = ArealStalenessManager(trained, MAX_RUNNING, BATCH, MAX_STALENESS)
                staleness.on_version_recovered(trained.step)
                for _ in elsewhere.running:
                    staleness.on_rollout_enqueued()
                    staleness.on_rollout_submitted()
    print(f"known names:      {staleness.get_stats()}")
    return trained


def ours() -> Trained:
    """Run the same loop with a StalenessManager."""
    trained, elsewhere, ready = Trained(), Elsewhere(), dict[GroupId, Rollout]()
    settings = StalenessSettings(
        batch=BATCH, max_staleness=MAX_STALENESS, max_concurrent=MAX_RUNNING
    )
    staleness = StalenessManager(settings)
    while trained.step < STEPS:
        for _ in range(staleness.capacity):
            staleness.step(GroupAdmitted(elsewhere.ask(trained.step).group_id, num_rollouts=1))
        for each in elsewhere.advance():
            if each.is_good:
                staleness.step(GroupArrived(each.group_id, 1, each.asked_step))
                ready[each.group_id] = each
            else:
                staleness.step(GroupEnded(each.group_id))
        for action in staleness.step(TakeBatch(trained.step)):
            assert isinstance(action, BatchTaken), "stale_policy `wait` drops nothing"
            trained.train([ready.pop(group_id) for group_id in action.group_ids])
            staleness.step(StepPublished(trained.step))
            if trained.step == STEPS // 2:
                staleness = StalenessManager(settings, trained.step, None, staleness.state)
                for each in [*elsewhere.running, *ready.values()]:
                    staleness.step(GroupAdmitted(each.group_id, 1, each.asked_step))
                for each in ready.values():
                    staleness.step(GroupArrived(each.group_id, 1, each.asked_step))
    print(
        f"StalenessManager: {staleness.consumed} consumed, {staleness.running} running, the "
        f"oldest by policy version {staleness.oldest_version}"
    )
    return trained


def main() -> None:
    """Run both loops and print the ages of their trained rollouts."""
    by_known, by_ours = known(), ours()
    for name, trained in (("known names", by_known), ("StalenessManager", by_ours)):
        print(
            f"{name}: {len(trained.ages)} rollouts in {trained.step} steps, at most "
            f"{max(trained.ages)} steps old; {MAX_STALENESS} allowed"
        )


if __name__ == "__main__":
    main()
