"""A simulated fleet, trainer and publisher on a virtual clock, and rules that bound staleness.

    wait mask drop requeue   the StalenessManager of the product, used as the pacer uses it
    wait, bound 0, 4, 8      the same with another bound; 0: each step waits for all its requests
    known formula            ArealStalenessManager of compat.py, in groups, as AReaL uses it: the
                             oldest results first, whatever their age
    unbounded                the same without a bound on counts: the capacity of the fleet

- Tasks differ more than siblings, and a few are much longer, as tasks of agents are. All lengths
  come from one seed, so every arm gets the same rollouts.
- Rollouts start when requested and continue through weight updates. Weights reach all engines at
  once, some time after a step, one publication after the other.
- An arm knows only what a trainer knows. The simulation checks that no sample is trained beyond the
  bound, that no group is trained twice, and that each requested one is trained or dropped.
"""

import bisect
import collections
import functools
import heapq
import itertools
import math
import random
from collections.abc import Callable
from typing import Protocol

import msgspec

from rollmesh.compat import ArealStalenessManager
from rollmesh.core.config import StalePolicy
from rollmesh.core.ids import GroupId
from rollmesh.trainer.pacing.lifecycle import MAX_REQUEUES
from rollmesh.trainer.staleness import (
    BatchTaken,
    GroupAdmitted,
    GroupArrived,
    GroupStale,
    StalenessManager,
    StalenessSettings,
    StepPublished,
    TakeBatch,
)


class FleetShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and speeds; by default the rollouts of one step take about ten seconds."""

    group_size: int = 8
    batch_groups: int = 8
    max_staleness: int = 2
    max_groups: int = 24
    """Concurrent groups."""
    median_tokens: float = 400.0
    task_spread: float = 0.7
    """Standard deviation of the log of a task's median."""
    sibling_spread: float = 0.4
    """Standard deviation of the log of siblings' lengths."""
    rare_share: float = 0.02
    """Share of tasks that are very long."""
    rare_factor: float = 12.0
    tokens_per_s: float = 50.0
    """Tokens per second of each running rollout."""
    trained_tokens_per_s: float = 8000.0
    step_s: float = 1.0
    """Fixed part of a step's duration."""
    publish_s: float = 1.5
    """Seconds from the end of a step until engines have its weights."""

    @property
    def batch(self) -> int:
        """Rollouts of a step."""
        return self.batch_groups * self.group_size

    @property
    def max_concurrent(self) -> int:
        """Concurrent rollouts."""
        return self.max_groups * self.group_size


class SizedTask(msgspec.Struct, frozen=True):
    """A task and the median length of its rollouts."""

    number: int
    median_tokens: float


class RequestedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a task."""

    group_id: GroupId
    task: SizedTask
    num_requeued: int
    lengths: tuple[int, ...]
    """Lengths of its rollouts, in tokens."""
    started_s: float
    asked_step: int
    """Train steps of the weights that sample its first tokens."""


class LengthSampler:
    """Draw tasks and the lengths of their rollouts."""

    def __init__(self, shape: FleetShape, seed: int) -> None:
        self._shape = shape
        self._seed = seed
        self._tasks = random.Random(f"{seed}/tasks")
        self._num_tasks = 0

    def task(self) -> SizedTask:
        """Draw the next task."""
        shape, chance = self._shape, self._tasks
        is_rare = chance.random() < shape.rare_share
        spread = chance.gauss(0.0, shape.task_spread)
        median = shape.median_tokens * math.exp(spread) * (shape.rare_factor if is_rare else 1.0)
        self._num_tasks += 1
        return SizedTask(self._num_tasks - 1, median)

    def lengths(self, task: SizedTask, num_requeued: int) -> tuple[int, ...]:
        """Lengths of a group, a function of the task and the number of its requests."""
        chance = random.Random(f"{self._seed}/{task.number}/{num_requeued}")
        spread = self._shape.sibling_spread
        return tuple(
            max(1, round(task.median_tokens * math.exp(chance.gauss(0.0, spread))))
            for _ in range(self._shape.group_size)
        )


FAR = 10**9


class StepBatch(msgspec.Struct):
    """The batch of a step, and groups that are too old for any step."""

    batch: list[GroupId] = []
    oldest_step: int = -FAR
    """Tokens of older weights are not trained."""
    stale: list[GroupId] = []


class StalenessRule(Protocol):
    """A rule that bounds staleness."""

    name: str
    bound: int
    """Largest age of a sample; FAR: unbounded."""
    requeues: bool
    """Whether the task of a stale group is requested again."""

    def capacity(self) -> int:
        """Rollouts that may be requested."""

    def asked(self, group: RequestedGroup) -> None:
        """Handle that a group was requested."""

    def arrived(self, group: RequestedGroup, newest_steps: tuple[int, ...]) -> None:
        """Handle that a group has ended; `newest_steps` are of its rollouts' last tokens."""

    def take(self, step: int, num_rollouts: int) -> StepBatch:
        """Return the batch of `step`, of `num_rollouts` (0: the configured batch)."""

    def published(self, step: int) -> None:
        """Handle that engines sample with the weights after `step` steps."""


class Managed:
    """The StalenessManager of rollmesh."""

    def __init__(self, name: str, policy: StalePolicy, shape: FleetShape, bound: int) -> None:
        self.name, self.bound = name, bound
        self.requeues = policy == "requeue"
        self._manager = StalenessManager(
            StalenessSettings(
                batch=shape.batch,
                max_staleness=bound,
                max_concurrent=shape.max_concurrent,
                policy=policy,
            )
        )

    def capacity(self) -> int:
        return self._manager.capacity

    def asked(self, group: RequestedGroup) -> None:
        self._manager.step(GroupAdmitted(group.group_id, len(group.lengths)))

    def arrived(self, group: RequestedGroup, newest_steps: tuple[int, ...]) -> None:
        num = len(group.lengths)
        self._manager.step(GroupArrived(group.group_id, num, group.asked_step, newest_steps))

    def take(self, step: int, num_rollouts: int) -> StepBatch:
        taken = StepBatch()
        for action in self._manager.step(TakeBatch(step, num_rollouts)):
            match action:
                case GroupStale():
                    taken.stale.append(action.group_id)
                case BatchTaken():
                    taken.batch, taken.oldest_step = [*action.group_ids], action.oldest_step
        return taken

    def published(self, step: int) -> None:
        self._manager.step(StepPublished(step))


class Known:
    """AReaL's formula; with a bound of FAR, no bound."""

    requeues = False
    bound = FAR
    """The bound is on counts, not on ages."""

    def __init__(self, name: str, shape: FleetShape, max_staleness: int) -> None:
        self.name = name
        self._size, self._batch = shape.group_size, shape.batch_groups
        self._version = 0
        most = shape.max_concurrent // shape.group_size
        self._known = ArealStalenessManager(self, most, shape.batch_groups, max_staleness)
        self._ready: list[tuple[float, GroupId]] = []

    def get_version(self) -> int:
        """Number of published steps."""
        return self._version

    def capacity(self) -> int:
        return max(0, self._known.get_capacity()) * self._size

    def asked(self, group: RequestedGroup) -> None:
        self._known.on_rollout_enqueued()
        self._known.on_rollout_submitted()

    def arrived(self, group: RequestedGroup, newest_steps: tuple[int, ...]) -> None:
        del newest_steps
        self._known.on_rollout_accepted()
        self._ready.append((group.started_s, group.group_id))

    def take(self, step: int, num_rollouts: int) -> StepBatch:
        del step
        wanted = -(-num_rollouts // self._size) or self._batch
        if len(self._ready) < wanted:
            return StepBatch()
        self._ready.sort()
        batch = [group_id for _, group_id in self._ready[:wanted]]
        del self._ready[:wanted]
        return StepBatch(batch)

    def published(self, step: int) -> None:
        self._version = step


def arms(shape: FleetShape) -> list[StalenessRule]:
    """Return all arms."""
    bound = shape.max_staleness
    waits = [Managed(f"wait, bound {far}", "wait", shape, far) for far in (0, 4, 8)]
    return [
        waits[0],
        Managed("wait", "wait", shape, bound),
        *waits[1:],
        Managed("mask", "mask", shape, bound),
        Managed("drop", "drop", shape, bound),
        Managed("requeue", "requeue", shape, bound),
        Known("known formula", shape, bound),
        Known("unbounded", shape, FAR),
    ]


class RunFigures(msgspec.Struct):
    """Figures of one run, or of several together."""

    seconds: float = 0.0
    """Until the last step; tokens that train while the run is drained are not in
    `tokens_in_time`."""
    tokens_in_time: int = 0
    ages: collections.Counter[int] = msgspec.field(default_factory=collections.Counter)
    """Rollouts that trained, by the age of their oldest trained token."""
    num_asked: int = 0
    """Requested rollouts, without repeated requests of a task."""
    tokens_asked: int = 0
    """Tokens of these rollouts."""
    num_trained: int = 0
    tokens_trained: int = 0
    tokens_masked: int = 0
    num_dropped: int = 0
    num_requeued: int = 0

    def add(self, other: "RunFigures") -> None:
        """Add the figures of another run."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def figures(self) -> dict[str, float]:
        """Return the figures by which arms are compared."""
        num_ended = self.num_trained + self.num_dropped + self.num_requeued
        total = sum(age * num for age, num in self.ages.items())
        return {
            "tokens_per_s": self.tokens_in_time / self.seconds,
            "max_age": float(max(self.ages)),
            "mean_age": total / self.num_trained,
            "dropped_share": self.num_dropped / num_ended,
            "requeued_share": self.num_requeued / num_ended,
            "masked_share": self.tokens_masked / (self.tokens_trained + self.tokens_masked),
            "length_bias": (self.tokens_trained / self.num_trained)
            / (self.tokens_asked / self.num_asked),
        }


class StalenessSimulation:
    """One simulated run."""

    def __init__(self, shape: FleetShape, arm: StalenessRule, seed: int) -> None:
        self._shape = shape
        self._arm = arm
        self._lengths = LengthSampler(shape, seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now_s = 0.0
        self._published_s = [0.0]
        """Times at which the weights after 0, 1, 2... steps reached the engines."""
        self._running: dict[GroupId, RequestedGroup] = {}
        self._ready: dict[GroupId, RequestedGroup] = {}
        self._again = collections.deque[tuple[SizedTask, int]]()
        self._num_asked = 0
        self._step = 0
        self._is_training = self._is_publishing = False
        self._is_over = False
        self.outcome = RunFigures()

    def run(self, num_steps: int) -> RunFigures:
        """Run `num_steps` steps, then drain: request nothing more, and let all groups end."""
        self._advance()
        while self._events:
            self._now_s, _, action = heapq.heappop(self._events)
            action()
            if self._step >= num_steps and not self._is_over:
                self._is_over = True
                self.outcome.seconds = self._now_s
                self.outcome.tokens_in_time = self.outcome.tokens_trained
            self._advance()
        assert not self._running, "every requested group has ended"
        assert not self._ready, "every ended group was trained or dropped"
        return self.outcome

    def _after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now_s + delay_s, next(self._order), action))

    def _advance(self) -> None:
        self._ask()
        self._take()
        self._publish()

    def _ask(self) -> None:
        while not self._is_over and self._arm.capacity() > 0:
            task, num_requeued = self._next_task()
            group = RequestedGroup(
                group_id=GroupId("sim", self._num_asked),
                task=task,
                num_requeued=num_requeued,
                lengths=self._lengths.lengths(task, num_requeued),
                started_s=self._now_s,
                asked_step=len(self._published_s) - 1,
            )
            self._num_asked += 1
            if not num_requeued:
                self.outcome.num_asked += len(group.lengths)
                self.outcome.tokens_asked += sum(group.lengths)
            self._arm.asked(group)
            self._running[group.group_id] = group
            self._after(
                max(group.lengths) / self._shape.tokens_per_s, functools.partial(self._end, group)
            )

    def _next_task(self) -> tuple[SizedTask, int]:
        return self._again.popleft() if self._again else (self._lengths.task(), 0)

    def _end(self, group: RequestedGroup) -> None:
        del self._running[group.group_id]
        self._ready[group.group_id] = group
        ends_s = [group.started_s + each / self._shape.tokens_per_s for each in group.lengths]
        newest = tuple(bisect.bisect_right(self._published_s, each) - 1 for each in ends_s)
        self._arm.arrived(group, newest)

    def _take(self) -> None:
        if self._is_training:
            return
        taken = self._arm.take(self._step, 0)
        if self._is_over and not (taken.batch or taken.stale or self._running) and self._ready:
            taken = self._arm.take(self._step, 1)  # the last groups, which make no full batch
        for group_id in taken.stale:
            self._drop(self._ready.pop(group_id))
        if taken.batch:
            groups = [self._ready.pop(group_id) for group_id in taken.batch]
            self._train(groups, max(0, taken.oldest_step))
        elif taken.stale:
            self._take()

    def _train(self, groups: list[RequestedGroup], oldest_step: int) -> None:
        self._is_training = True
        tokens = sum(self._record(group, oldest_step) for group in groups)
        step_s = self._shape.step_s + tokens / self._shape.trained_tokens_per_s
        self._after(step_s, self._end_step)

    def _record(self, group: RequestedGroup, oldest_step: int) -> int:
        """Record a rollout that trains; return its number of trained tokens."""
        age = self._step - max(group.asked_step, oldest_step)
        assert age <= self._arm.bound, f"{self._arm.name}: {group.group_id} is {age} steps old"
        cut_s = (
            self._published_s[oldest_step] - group.started_s
            if self._masks(group, oldest_step)
            else 0.0
        )
        num_cut = int(max(0.0, cut_s) * self._shape.tokens_per_s)
        left = [max(0, each - num_cut) for each in group.lengths]
        num_left = sum(each > 0 for each in left)
        outcome = self.outcome
        outcome.ages[age] += num_left
        outcome.num_trained += num_left
        outcome.num_dropped += len(left) - num_left
        outcome.tokens_trained += sum(left)
        outcome.tokens_masked += sum(group.lengths) - sum(left)
        return sum(left)

    @staticmethod
    def _masks(group: RequestedGroup, oldest_step: int) -> bool:
        return group.asked_step < oldest_step

    def _end_step(self) -> None:
        self._is_training = False
        self._step += 1

    def _publish(self) -> None:
        num_published = len(self._published_s) - 1
        if not self._is_publishing and num_published < self._step:
            self._is_publishing = True
            self._after(self._shape.publish_s, functools.partial(self._end_publish, self._step))

    def _end_publish(self, step: int) -> None:
        self._is_publishing = False
        while len(self._published_s) <= step:
            self._published_s.append(self._now_s)
        self._arm.published(step)

    def _drop(self, group: RequestedGroup) -> None:
        if self._arm.requeues and group.num_requeued < MAX_REQUEUES and not self._is_over:
            self.outcome.num_requeued += len(group.lengths)
            self._again.append((group.task, group.num_requeued + 1))
        else:
            self.outcome.num_dropped += len(group.lengths)
