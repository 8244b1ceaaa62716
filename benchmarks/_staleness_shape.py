"""What is simulated: how long rollouts are, and how fast engines and the trainer.

Invariant: tasks differ more than the siblings of one, and a few are very much longer, as agents'
are; all from one seed, so that every arm is asked the same. Driven by _staleness_world.py.
"""

import math
import random

import msgspec

from rollmesh.core.ids import GroupId


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults are of no particular fleet: one step's rollouts are some ten seconds of it."""

    group_size: int = 8
    batch_groups: int = 8
    max_staleness: int = 2
    max_groups: int = 24
    """That run at the same time."""
    median_tokens: float = 400.0
    task_spread: float = 0.7
    """Standard deviation of the log of a task's median."""
    sibling_spread: float = 0.4
    """The same of the siblings of one task."""
    rare_share: float = 0.02
    """Of the tasks that are very long."""
    rare_factor: float = 12.0
    tokens_per_s: float = 50.0
    """Of each rollout that runs."""
    trained_tokens_per_s: float = 8000.0
    step_s: float = 1.0
    """Of a step, besides its tokens."""
    publish_s: float = 1.5
    """From a step's end until engines have its weights."""

    @property
    def batch(self) -> int:
        """Rollouts of a step."""
        return self.batch_groups * self.group_size

    @property
    def max_concurrent(self) -> int:
        """Rollouts that run at the same time."""
        return self.max_groups * self.group_size


class Task(msgspec.Struct, frozen=True):
    """One problem."""

    number: int
    median_tokens: float


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A task that was asked for."""

    group_id: GroupId
    task: Task
    num_requeued: int
    lengths: tuple[int, ...]
    """Of its rollouts, in tokens."""
    started_s: float
    asked_step: int
    """Steps done by the weights that sample its first tokens."""


class Lengths:
    """Draws tasks and rollouts."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape = shape
        self._seed = seed
        self._tasks = random.Random(f"{seed}/tasks")
        self._num_tasks = 0

    def task(self) -> Task:
        """The next one."""
        shape, chance = self._shape, self._tasks
        is_rare = chance.random() < shape.rare_share
        spread = chance.gauss(0.0, shape.task_spread)
        median = shape.median_tokens * math.exp(spread) * (shape.rare_factor if is_rare else 1.0)
        self._num_tasks += 1
        return Task(self._num_tasks - 1, median)

    def lengths(self, task: Task, num_requeued: int) -> tuple[int, ...]:
        """Of a group: the same for the same task, asked for the same time."""
        chance = random.Random(f"{self._seed}/{task.number}/{num_requeued}")
        spread = self._shape.sibling_spread
        return tuple(
            max(1, round(task.median_tokens * math.exp(chance.gauss(0.0, spread))))
            for _ in range(self._shape.group_size)
        )
