"""Requests for groups: the endless tasks of a run, a seed for each request, and requeued tasks.

- A requeued task comes before new ones.
- A finite split is repeated: the first round is in the environment's order, each later one is
  shuffled by seed and round number. The order is the same after a restart.
- Requests for training are counted in the tally, evaluations apart from them.
- A fault in the environment's code (no task, a value that is not a Task, an exception) is one line.
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
from rollmesh.trainer.checkpoints.recovery_plan import RecoveryPlan
from rollmesh.trainer.pacing.lifecycle import GroupLifecycle, GroupRequest, GroupRequested
from rollmesh.trainer.reports.records import Tally

SPLIT = "train"


def endless_tasks(env: Env, name: str, seed: int, num_before: int = 0) -> Iterator[Task]:
    """Yield the tasks of `env`, called `name` in the settings, after the first `num_before`.

    Raises EnvError if the environment fails or has no task.
    """
    return itertools.islice(_rounds(env, name, seed), num_before, None)


def _rounds(env: Env, name: str, seed: int) -> Iterator[Task]:
    where = f'env = "{name}": tasks("{SPLIT}")'
    for number in itertools.count():
        round_ = _one_round(env, where, seed)
        if number:
            # Only a finite split has a second round, so it fits in memory.
            tasks = list(round_)
            random.Random(f"{SPLIT}/{seed}/{number}").shuffle(tasks)
            round_ = iter(tasks)
        first = next(round_, None)
        if first is None:
            raise EnvError(f"{where} returned no task; yield at least one")
        yield first
        yield from round_


def _one_round(env: Env, where: str, seed: int) -> Iterator[Task]:
    """Yield the tasks of one round, in the environment's order."""
    num_tasks = 0
    try:
        for task in env.tasks(SPLIT, seed):
            if not isinstance(task, Task):
                raise TypeError(f"yielded {type(task).__name__} in place of a Task")
            num_tasks += 1
            yield task
    except Exception as error:  # door: a user's generator may raise anything
        first_line = next(iter(str(error).splitlines()), "")
        cause = f"{type(error).__name__}: {first_line}"
        raise EnvError(f"{where} failed after {num_tasks} tasks: {cause}") from error


class RequestSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that all requests of a run share."""

    env: str
    num_samples: int
    sampling: SamplingPolicy
    seed: int
    branches: tuple[Branch, ...]


class GroupSource(Protocol):
    """The part of a RolloutClient that the pacer uses."""

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
        """Request a group; return its id at once."""

    def take(self, timeout_s: float) -> list[Arrival]:
        """Return groups that have ended since the last call."""

    def cancel(self, group_id: GroupId, reason: str) -> None:
        """End an open group; do nothing if it has ended."""

    def open(self, arrival: Unopened) -> Arrival:
        """Decode a result, and read it first if it is on disk; never raise."""

    def done_with(
        self, group_ids: Iterable[GroupId], reason: str = "", step: int = 0, times: int = 0
    ) -> None:
        """Record that no step takes these results, with the reason."""


class GroupRequester:
    """Requests groups of a run from a client."""

    def __init__(
        self,
        client: GroupSource,
        tasks: Iterator[Task],
        settings: RequestSettings,
        tally: Tally,
        lifecycle: GroupLifecycle,
    ) -> None:
        self._client = client
        self._tasks = tasks
        self._settings = settings
        self._tally = tally
        self._course = lifecycle
        self._num_asked = 0
        self.num_drawn = 0
        """Tasks drawn, in all processes of the run."""

    def resume(self, recovery: RecoveryPlan) -> None:
        """Continue after earlier processes, whose tasks the iterator has skipped."""
        self.num_drawn = recovery.num_tasks
        self._num_asked = recovery.num_asked

    def ask(self, asked_step: int) -> None:
        """Request a group to train; engines have the weights after `asked_step` steps."""
        request = self._course.next_again() or GroupRequest(self._draw())
        self._tally.num_asked += self._settings.num_samples
        self._ask(request, self._settings.num_samples, asked_step)

    def evaluate(self, asked_step: int) -> None:
        """Request one rollout that does not train."""
        request = GroupRequest(self._draw(), is_eval=True)
        self._tally.num_evals += 1
        self._ask(request, 1, asked_step)

    def _draw(self) -> Task:
        task = next(self._tasks)
        self.num_drawn += 1
        return task

    def _ask(self, request: GroupRequest, num_samples: int, asked_step: int) -> None:
        seed = random.Random(f"{self._settings.seed}/{self._num_asked}").getrandbits(63)
        self._num_asked += 1
        policy_version = self._course.versions.named(asked_step)
        group_id = self._client.ask(
            request.task,
            env=self._settings.env,
            num_samples=num_samples,
            sampling=self._settings.sampling,
            seed=seed,
            is_eval=request.is_eval,
            asked_step=asked_step,
            num_drawn=self.num_drawn,
            again=request.again,
            # A router that was just restarted may not know yet that an engine has old weights.
            min_policy_version=-1 if policy_version is None else policy_version,
        )
        self._course.step(GroupRequested(group_id, request))
