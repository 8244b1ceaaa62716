"""The tasks that a run trains on, as the user's environment poses them.

- A finite split is repeated: the first round is in the environment's order, each later round is
  shuffled by seed and round number. The order is the same after a restart.
- A mistake of the environment's code ends the run with one line that names it: no task, a value
  that is not a Task, or a generator that raises.

Asks for groups: task after task, each with a seed of its own, and some tasks again.

Invariants: a task that is to be asked for again comes before new ones (course.py says which); what
is asked for in order to train is counted in the tally, and evaluations apart from it; the course
hears of each. How many is the pacer's word, which drives this.
"""

import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec

from rollmesh.core.errors import EnvError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import Branch, SamplingPolicy, Task
from rollmesh.envs.env import Env
from rollmesh.serve.client.arrivals import Arrival, Unopened
from rollmesh.serve.client.journal_entries import Again
from rollmesh.trainer.books.records import Tally
from rollmesh.trainer.pacing.lifecycle import GroupLifecycle, GroupRequest, GroupRequested
from rollmesh.trainer.recovery.plan import Recovery

SPLIT = "train"


def endless_tasks(env: Env, name: str, seed: int, num_before: int = 0) -> Iterator[Task]:
    """The tasks of `env`, which the settings call `name`, after the first `num_before`.

    EnvError where the environment fails, or poses no task at all.
    """
    return itertools.islice(_rounds(env, name, seed), num_before, None)


def _rounds(env: Env, name: str, seed: int) -> Iterator[Task]:
    where = f'env = "{name}": tasks("{SPLIT}")'
    for number in itertools.count():
        posed = _posed(env, where, seed)
        if number:
            # Only a finite split gets here, so that all of it may be held.
            tasks = list(posed)
            random.Random(f"{SPLIT}/{seed}/{number}").shuffle(tasks)
            posed = iter(tasks)
        first = next(posed, None)
        if first is None:
            raise EnvError(f"{where} gave no task; let it yield at least one")
        yield first
        yield from posed


def _posed(env: Env, where: str, seed: int) -> Iterator[Task]:
    """One round, in the environment's order."""
    num_posed = 0
    try:
        for task in env.tasks(SPLIT, seed):
            if not isinstance(task, Task):
                raise TypeError(f"gave {type(task).__name__} and not a Task")
            num_posed += 1
            yield task
    except Exception as error:  # door: a user's generator may raise anything
        first_line = next(iter(str(error).splitlines()), "")
        told = f"{type(error).__name__}: {first_line}"
        raise EnvError(f"{where} failed after {num_posed} tasks: {told}") from error


class RequestSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every ask of this run has in common."""

    env: str
    num_samples: int
    sampling: SamplingPolicy
    seed: int
    branches: tuple[Branch, ...]


class GroupSource(Protocol):
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


class GroupRequester:
    """See the module."""

    def __init__(
        self,
        client: GroupSource,
        tasks: Iterator[Task],
        asking: RequestSettings,
        tally: Tally,
        lifecycle: GroupLifecycle,
    ) -> None:
        self._client = client
        self._tasks = tasks
        self._asking = asking
        self._tally = tally
        self._course = lifecycle
        self._num_asked = 0
        self.num_drawn = 0
        """Tasks, in all lives."""

    def go_on(self, recovery: Recovery) -> None:
        """After earlier lives, whose tasks the iterator has passed."""
        self.num_drawn = recovery.num_tasks
        self._num_asked = recovery.num_asked

    def ask(self, asked_step: int) -> None:
        """Ask for a group to train; engines have the weights after `asked_step` steps."""
        turn = self._course.next_again() or GroupRequest(self._draw())
        self._tally.num_asked += self._asking.num_samples
        self._ask(turn, self._asking.num_samples, asked_step)

    def evaluate(self, asked_step: int) -> None:
        """Ask for one rollout that does not train."""
        turn = GroupRequest(self._draw(), is_eval=True)
        self._tally.num_evals += 1
        self._ask(turn, 1, asked_step)

    def _draw(self) -> Task:
        task = next(self._tasks)
        self.num_drawn += 1
        return task

    def _ask(self, turn: GroupRequest, num_samples: int, asked_step: int) -> None:
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
        self._course.step(GroupRequested(group_id, turn))
