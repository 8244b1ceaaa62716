"""One evaluation: the first tasks of an environment, n rollouts of each, their rows in a folder.

    folder/eval.json      what is evaluated
    folder/results.jsonl  a row per rollout, see results.py
    folder/journal/       the client's

Invariants: what came to a result is neither asked for again nor counted twice, however often the
process was killed and the evaluation gone on with; a task without a result is asked for again by
the next one. Tasks of one id are one task, posed so many times. Driven by `rollmesh eval`.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import msgspec

from rollmesh.core.errors import EnvError, UserError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import Json, SamplingPolicy, Task
from rollmesh.envs.env import Env
from rollmesh.serve.client.arrivals import Arrival, Finished
from rollmesh.serve.client.calls import AsyncRolloutClient
from rollmesh.serve.client.results import Results, rows_of

PLAN = "eval.json"
WINDOW = 1024
"""Groups asked for at the same time."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is evaluated."""

    env: str
    env_settings: dict[str, Json]
    model: str
    """Its folder; empty where the mesh was there before."""
    split: str
    num_tasks: int
    """At most; a split may end before."""
    num_samples: int
    seed: int
    sampling: SamplingPolicy


def write_plan(plan: Plan, folder: Path) -> None:
    """Into the evaluation's folder; UserError if that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PLAN).write_bytes(msgspec.json.format(msgspec.json.encode(plan)) + b"\n")
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; name another --out") from None


def read_plan(folder: Path) -> Plan:
    """What the folder evaluates; UserError if it does not say."""
    try:
        return msgspec.json.decode((folder / PLAN).read_bytes(), type=Plan)
    except FileNotFoundError:
        raise UserError(f"{folder}: no evaluation to go on with; leave out --resume") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{folder / PLAN}: {error}; begin anew without --resume") from None


def pose(env: Env, plan: Plan) -> list[Task]:
    """The tasks of `plan`, in order; EnvError in one line where the environment fails."""
    where = f'env = "{plan.env}": tasks("{plan.split}")'
    tasks: list[Task] = []
    try:
        for task in islice(env.tasks(plan.split, plan.seed), plan.num_tasks):
            if not isinstance(task, Task):
                raise TypeError(f"gave {type(task).__name__} and not a Task")
            tasks.append(task)
    except Exception as error:  # door: a user's generator may raise anything
        first_line = next(iter(str(error).splitlines()), "")
        told = f"{type(error).__name__}: {first_line}"
        raise EnvError(f"{where} failed after {len(tasks)} tasks: {told}") from error
    if not tasks:
        raise EnvError(f"{where} gave no task; name another --split")
    return tasks


class Evaluation:
    """One pass over what is missing; `on_row` is told how many rows there are."""

    def __init__(
        self,
        client: AsyncRolloutClient,
        plan: Plan,
        tasks: list[Task],
        results: Results,
        on_rows: Callable[[int], None],
    ) -> None:
        """`client` keeps its groups, and its folder is that of `results`."""
        self._client = client
        self._plan = plan
        self._tasks = tasks
        self._results = results
        self._on_rows = on_rows
        self._posed: dict[GroupId, Task] = {}
        """Open here."""

    async def run(self) -> None:
        """Ask for what has no result yet, until everything has ended.

        Where it is cancelled, the mesh is told to stop what runs for it.
        """
        try:
            await self._run()
        finally:
            for group_id in self._posed:
                await self._client.cancel(group_id, "the evaluation was stopped")

    async def _run(self) -> None:
        self._posed.update(self._client.reopened)
        self._on_rows(len(self._results.rows))
        stream = self._client.stream()
        for _ in range(self._client.num_ended):
            self._book(await anext(stream))
        missing = self._missing()
        for task, seed in islice(missing, WINDOW):
            await self._ask(task, seed)
        async for arrival in stream:
            self._book(arrival)
            for task, seed in islice(missing, 1):
                await self._ask(task, seed)

    def _missing(self) -> Iterator[tuple[Task, int]]:
        """Tasks that have neither a result nor an open group, each with its seed."""
        there = self._results.num_groups() + Counter(task.id for task in self._posed.values())
        posed: Counter[str] = Counter()
        for task in self._tasks:
            posed[task.id] += 1
            if posed[task.id] > there[task.id]:
                text = f"{self._plan.seed}/{task.id}/{posed[task.id]}"
                yield task, random.Random(text).getrandbits(63)

    async def _ask(self, task: Task, seed: int) -> None:
        group_id = await self._client.ask(
            task,
            self._plan.num_samples,
            env=self._plan.env,
            sampling=self._plan.sampling,
            seed=seed,
            is_eval=True,
        )
        self._posed[group_id] = task

    def _book(self, arrival: Arrival) -> None:
        task = self._posed.pop(arrival.group_id, None)
        if task is None:  # an earlier process had asked, and did not get to write it down
            assert isinstance(arrival, Finished)
            task = arrival.record.task
        if not self._results.holds(arrival.group_id):
            self._results.add(rows_of(arrival, task.id, self._plan.num_samples))
        self._on_rows(len(self._results.rows))
