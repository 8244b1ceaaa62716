"""Asks for groups: task after task, each with a seed of its own, and some tasks again.

Invariants: a task that is to be asked for again comes before new ones (course.py says which); what
is asked for in order to train is counted in the tally, and evaluations apart from it; the course
hears of each. How many is the pacer's word, which drives this.
"""

import random
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.core.types import Branch, SamplingPolicy, Task
from rollmesh.serve.client.arrivals import Arrival, Unopened
from rollmesh.serve.client.journal_entries import Again
from rollmesh.trainer.books.records import Tally
from rollmesh.trainer.pacing.course import Course
from rollmesh.trainer.pacing.course_events import Asked, Turn
from rollmesh.trainer.recovery.plan import Recovery


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """What every ask of this run has in common."""

    env: str
    num_samples: int
    sampling: SamplingPolicy
    seed: int
    branches: tuple[Branch, ...]


class Client(Protocol):
    """What the pacer needs of a RolloutClient."""

    def ask(
        self,
        task: Task,
        *,
        env: str,
        num_samples: int,
        sampling: SamplingPolicy,
        seed: int,
        is_eval: bool = False,
        asked_step: int = 0,
        num_drawn: int = 0,
        again: Again | None = None,
        min_policy_version: int = -1,
    ) -> GroupId:
        """Ask for a group; its id, at once."""

    def take(self, timeout_s: float) -> list[Arrival]:
        """What has ended since the last call."""

    def cancel(self, group_id: GroupId, reason: str) -> None:
        """End an open group; nothing happens if it has ended."""

    def open(self, arrival: Unopened) -> Arrival:
        """Decode a result, and read it first where it stands on the disk; never an error."""

    def done_with(
        self, group_ids: Iterable[GroupId], reason: str = "", step: int = 0, times: int = 0
    ) -> None:
        """Write down that no step takes these results, and why."""


class Asker:
    """See the module."""

    def __init__(
        self, client: Client, tasks: Iterator[Task], asking: Asking, tally: Tally, course: Course
    ) -> None:
        self._client = client
        self._tasks = tasks
        self._asking = asking
        self._tally = tally
        self._course = course
        self._num_asked = 0
        self.num_drawn = 0
        """Tasks, in all lives."""

    def go_on(self, recovery: Recovery) -> None:
        """After earlier lives, whose tasks the iterator has passed."""
        self.num_drawn = recovery.num_tasks
        self._num_asked = recovery.num_asked

    def ask(self, asked_step: int) -> None:
        """Ask for a group to train; engines have the weights after `asked_step` steps."""
        turn = self._course.next_again() or Turn(self._draw())
        self._tally.num_asked += self._asking.num_samples
        self._ask(turn, self._asking.num_samples, asked_step)

    def evaluate(self, asked_step: int) -> None:
        """Ask for one rollout that does not train."""
        turn = Turn(self._draw(), is_eval=True)
        self._tally.num_evals += 1
        self._ask(turn, 1, asked_step)

    def _draw(self) -> Task:
        task = next(self._tasks)
        self.num_drawn += 1
        return task

    def _ask(self, turn: Turn, num_samples: int, asked_step: int) -> None:
        seed = random.Random(f"{self._asking.seed}/{self._num_asked}").getrandbits(63)
        self._num_asked += 1
        policy_version = self._course.versions.named(asked_step)
        group_id = self._client.ask(
            turn.task,
            env=self._asking.env,
            num_samples=num_samples,
            sampling=self._asking.sampling,
            seed=seed,
            is_eval=turn.is_eval,
            asked_step=asked_step,
            num_drawn=self.num_drawn,
            again=turn.again,
            # A router that has just been restarted may not know yet that an engine is behind.
            min_policy_version=-1 if policy_version is None else policy_version,
        )
        self._course.step(Asked(group_id, turn))
