"""A fleet, a trainer and a publisher on a virtual clock, paced by one arm.

Rollouts begin when they are asked for and go on through new weights, as legs do; a step takes time
by its tokens; its weights reach all engines together, some time after it, one publication after the
other. Invariants, checked here and not in the arm: no sample is trained older than the arm's bound,
no group twice, and in the end each that was asked for was trained or given up. Driven by
staleness.py, and by tests/sim.
"""

import bisect
import collections
import functools
import heapq
import itertools
from collections.abc import Callable

import msgspec

from benchmarks._staleness_arms import Arm
from benchmarks._staleness_shape import Group, Lengths, Shape, Task
from rollmesh.core.ids import GroupId
from rollmesh.trainer.pacing.lifecycle import MAX_REQUEUES


class Outcome(msgspec.Struct):
    """Of a run, or of several together."""

    seconds: float = 0.0
    """Until its last step; what was trained after that, as all came to its end, is not in
    `tokens_in_time`."""
    tokens_in_time: int = 0
    ages: collections.Counter[int] = msgspec.field(default_factory=collections.Counter)
    """Rollouts that trained, by the age of their oldest trained token."""
    num_asked: int = 0
    """Rollouts; of tasks that were asked for again, the first ones."""
    tokens_asked: int = 0
    """Of those."""
    num_trained: int = 0
    tokens_trained: int = 0
    tokens_masked: int = 0
    num_dropped: int = 0
    num_requeued: int = 0

    def add(self, other: "Outcome") -> None:
        """Another run's."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def figures(self) -> dict[str, float]:
        """What the arms are compared by."""
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


class World:
    """See the module."""

    def __init__(self, shape: Shape, arm: Arm, seed: int) -> None:
        self._shape = shape
        self._arm = arm
        self._lengths = Lengths(shape, seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now_s = 0.0
        self._published_s = [0.0]
        """When the weights after 0, 1, 2... steps reached the engines."""
        self._running: dict[GroupId, Group] = {}
        self._ready: dict[GroupId, Group] = {}
        self._again = collections.deque[tuple[Task, int]]()
        self._num_asked = 0
        self._step = 0
        self._is_training = self._is_publishing = False
        self._is_over = False
        self.outcome = Outcome()

    def run(self, num_steps: int) -> Outcome:
        """So many steps; then nothing is asked for any more, and what there is comes to its end."""
        self._go_on()
        while self._events:
            self._now_s, _, deed = heapq.heappop(self._events)
            deed()
            if self._step >= num_steps and not self._is_over:
                self._is_over = True
                self.outcome.seconds = self._now_s
                self.outcome.tokens_in_time = self.outcome.tokens_trained
            self._go_on()
        assert not self._running, "all that was asked for has ended"
        assert not self._ready, "and was trained, or given up"
        return self.outcome

    def _after(self, delay_s: float, deed: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now_s + delay_s, next(self._order), deed))

    def _go_on(self) -> None:
        self._ask()
        self._take()
        self._publish()

    def _ask(self) -> None:
        while not self._is_over and self._arm.capacity() > 0:
            task, num_requeued = self._next_task()
            group = Group(
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

    def _next_task(self) -> tuple[Task, int]:
        return self._again.popleft() if self._again else (self._lengths.task(), 0)

    def _end(self, group: Group) -> None:
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
            taken = self._arm.take(self._step, 1)  # the last ones, which make no full batch
        for group_id in taken.stale:
            self._give_up(self._ready.pop(group_id))
        if taken.batch:
            groups = [self._ready.pop(group_id) for group_id in taken.batch]
            self._train(groups, max(0, taken.oldest_step))
        elif taken.stale:
            self._take()

    def _train(self, groups: list[Group], oldest_step: int) -> None:
        self._is_training = True
        tokens = sum(self._book(group, oldest_step) for group in groups)
        step_s = self._shape.step_s + tokens / self._shape.trained_tokens_per_s
        self._after(step_s, self._end_step)

    def _book(self, group: Group, oldest_step: int) -> int:
        """One that trains; how many tokens of it do."""
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
    def _masks(group: Group, oldest_step: int) -> bool:
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

    def _give_up(self, group: Group) -> None:
        if self._arm.requeues and group.num_requeued < MAX_REQUEUES and not self._is_over:
            self.outcome.num_requeued += len(group.lengths)
            self._again.append((group.task, group.num_requeued + 1))
        else:
            self.outcome.num_dropped += len(group.lengths)
