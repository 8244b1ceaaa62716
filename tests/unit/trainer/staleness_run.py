"""A trainer, its publisher and its rollouts, in random order, on one staleness manager."""

import random
from typing import NamedTuple

from hypothesis import strategies as st

from rollmesh.core.config import StalenessFormula, StalePolicy
from rollmesh.core.ids import GroupId
from rollmesh.trainer.staleness import (
    BatchTaken,
    GroupAdmitted,
    GroupArrived,
    GroupEnded,
    GroupStale,
    StalenessManager,
    StalenessSettings,
    StepPublished,
    TakeBatch,
)

GROUP = 4


class Sizes(NamedTuple):
    batch: int
    bound: int
    size: int
    num_at_once: int
    every: int


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    """Sizes for which groups need not fill a batch, and weights need not be published each step."""
    bound = draw(st.integers(0, 3))
    return Sizes(
        batch=draw(st.integers(1, 9)),
        bound=bound,
        size=draw(st.integers(1, 4)),
        num_at_once=draw(st.integers(1, 8)),
        every=draw(st.integers(1, bound + 1)),
    )


def manager(
    batch: int = 2 * GROUP,
    max_staleness: int = 1,
    max_concurrent: int = 100 * GROUP,
    policy: StalePolicy = "wait",
    formula: StalenessFormula = "under_way",
) -> StalenessManager:
    return StalenessManager(
        StalenessSettings(
            batch=batch,
            max_staleness=max_staleness,
            max_concurrent=max_concurrent,
            policy=policy,
            formula=formula,
        )
    )


def group(seq: int) -> GroupId:
    return GroupId("r", seq)


class Run:
    """A trainer, its publisher and its rollouts, in random order."""

    def __init__(
        self,
        policy: StalePolicy,
        seed: int,
        sizes: Sizes,
        formula: StalenessFormula = "under_way",
    ) -> None:
        self.rng = random.Random(seed)
        self.sizes = sizes
        num_at_once = sizes.size * sizes.num_at_once
        self.m = manager(sizes.batch, sizes.bound, num_at_once, policy, formula)
        self.running: dict[GroupId, int] = {}
        self.floors: dict[GroupId, int] = {}
        self.to_publish: list[int] = []
        self.seq = self.step = self.num_gone = 0
        self.stale: list[int] = []

    def ask(self) -> None:
        while self.m.capacity > 0:
            self.m.step(GroupAdmitted(group(self.seq), self.sizes.size))
            self.running[group(self.seq)] = self.m.published_step
            self.seq += 1

    def end(self, group_id: GroupId) -> None:
        asked_step, size = self.running.pop(group_id), self.sizes.size
        num = self.rng.choice([0, self.rng.randint(1, size), size])
        self.num_gone += size - num
        if not num:
            self.m.step(GroupEnded(group_id))
            return
        oldest = self.rng.randint(asked_step, self.m.published_step)
        newest = tuple(self.rng.randint(oldest, self.m.published_step) for _ in range(num))
        self.floors[group_id] = oldest
        self.m.step(GroupArrived(group_id, num, oldest, newest))

    def take(self, num_rollouts: int = 0) -> None:
        before = self.m.state
        actions, after = self.m.step(TakeBatch(self.step, num_rollouts)), self.m.state
        for action in actions:
            if isinstance(action, GroupStale):
                self.stale.append(action.age)
                assert action.age > self.sizes.bound
            elif self.m.settings.policy != "mask":
                ages = [self.step - self.floors[each] for each in action.group_ids]
                assert max(ages) <= self.sizes.bound
        self.num_gone += before.ready - after.ready - (after.training - before.training)
        if any(isinstance(each, BatchTaken) for each in actions):
            self.step += 1
            if self.step % self.sizes.every == 0:
                self.to_publish.append(self.step)

    def publish(self) -> None:
        if self.to_publish:
            self.m.step(StepPublished(self.to_publish.pop(0)))

    def go_on(self) -> None:
        """Apply one random event."""
        self.ask()
        what = self.rng.random()
        if what < 0.6 and self.running:
            self.end(self.rng.choice(sorted(self.running)))
        elif what < 0.85:
            self.take(self.rng.choice([0, 0, 1, 12]))
        else:
            self.publish()

    def check(self) -> None:
        state = self.m.state
        assert max(state.histogram, default=0) <= self.sizes.bound
        under_way = state.running + state.ready + state.training + state.consumed
        assert under_way + self.num_gone == self.seq * self.sizes.size, "counted twice, or lost"
