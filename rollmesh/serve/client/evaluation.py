"""An evaluation: the first tasks of an environment, n rollouts of each, their rows in a folder.

    folder/eval.json           the plan
    folder/results.jsonl       a row per rollout
    folder/trajectories.jsonl  its messages and samples
    folder/journal/            the client's journal

- A task with a result is neither requested nor counted again, however often the evaluation was
  killed and resumed. A task without a result is requested again when it is resumed.
- Tasks with equal ids are one task, asked several times.
"""

import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Protocol, Unpack

import msgspec

from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import AddressError, EnvError, JournalError, UserError, WireError
from rollmesh.core.ids import GroupId
from rollmesh.core.types import RolloutRecord, Task
from rollmesh.serve.client.arrivals import Arrival, Dropped, Finished
from rollmesh.serve.client.async_client import AsyncRolloutClient, CallOptions, code_of
from rollmesh.serve.client.evaluation_files import EvaluationPlan, Results, Row
from rollmesh.serve.client.trajectories import Trajectories
from rollmesh.wire.keys import Keys

ANSWER_S = 5.0
WINDOW = 1024
"""Groups asked for at the same time."""


class Site(msgspec.Struct, frozen=True):
    """The mesh and the folder of an evaluation."""

    router: str
    folder: Path
    journal: JournalConfig
    keys: Keys | None


async def evaluate(
    plan: EvaluationPlan,
    tasks: list[Task],
    site: Site,
    on_rows: Callable[[int], None],
    on_client: Callable[[Callable[[], str]], None] | None = None,
) -> None:
    """Run what is missing. `on_rows` receives the number of rows whenever it grows, `on_client`
    once a function that returns why groups wait ('' if unknown).

    Raises UserError if another process evaluates in the folder or no router answers.
    """
    try:
        client = AsyncRolloutClient(
            site.router, site.folder, journal=site.journal, keys=site.keys, keep=True
        )
    except JournalError as error:
        raise UserError(f"{error}; let it end, or name another --out") from None
    async with client:
        if not await client.meet_router(ANSWER_S):
            raise AddressError(
                f"{site.router}: no router answers there; are its address and our keys right?"
            )
        if on_client is not None:
            on_client(client.why_waiting)
        # Only now: the client's journal keeps a second evaluation out of the folder.
        with Results(site.folder) as results, Trajectories(site.folder) as trajectories:
            await Evaluation(client, plan, tasks, (results, trajectories), on_rows).run()


async def evaluate_locally(
    client: "Client",
    plan: EvaluationPlan,
    tasks: list[Task],
    folder: Path,
    on_rows: Callable[[int], None],
) -> None:
    """Run what is missing in `folder` with a client that needs no mesh."""
    with Results(folder) as results, Trajectories(folder) as trajectories:
        await Evaluation(client, plan, tasks, (results, trajectories), on_rows).run()


class Client(Protocol):
    """The part of AsyncRolloutClient that an evaluation uses."""

    @property
    def reopened(self) -> Mapping[GroupId, Task]: ...
    @property
    def num_ended(self) -> int: ...
    async def ask(
        self, task: Task, num_samples: int, **options: Unpack[CallOptions]
    ) -> GroupId: ...
    def stream(self) -> AsyncGenerator[Arrival, None]: ...
    async def cancel(self, group_id: GroupId, reason: str = ...) -> None: ...


class Evaluation:
    """One pass over what is missing."""

    def __init__(
        self,
        client: Client,
        plan: EvaluationPlan,
        tasks: list[Task],
        files: tuple[Results, Trajectories],
        on_rows: Callable[[int], None],
    ) -> None:
        """Prepare a pass; `client` keeps its groups, and its folder is that of `files`."""
        self._client = client
        self._plan = plan
        self._tasks = tasks
        self._results, self._trajectories = files
        self._on_rows = on_rows
        self._posed: dict[GroupId, Task] = {}
        """Open groups of this pass."""

    async def run(self) -> None:
        """Ask for what has no result yet, until everything has ended.

        If it is cancelled, its open groups are cancelled in the mesh.
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
            self._client_journal(await anext(stream))
        missing = self._missing()
        for task, seed in islice(missing, WINDOW):
            await self._ask(task, seed)
        async for arrival in stream:
            self._client_journal(arrival)
            for task, seed in islice(missing, 1):
                await self._ask(task, seed)

    def _missing(self) -> Iterator[tuple[Task, int]]:
        """Yield tasks that have neither a result nor an open group, each with its seed."""
        there = self._results.num_groups() + Counter(task.id for task in self._posed.values())
        posed: Counter[str] = Counter()
        for task in self._tasks:
            posed[task.id] += 1
            if posed[task.id] > there[task.id]:
                text = f"{self._plan.seed}/{task.id}/{posed[task.id]}"
                yield task, random.Random(text).getrandbits(63)

    async def _ask(self, task: Task, seed: int) -> None:
        try:
            group_id = await self._client.ask(
                task,
                self._plan.num_samples,
                env=self._plan.env,
                sampling=self._plan.sampling,
                seed=seed,
                is_eval=True,
            )
        except WireError as error:
            raise EnvError(f'env = "{self._plan.env}": {error}') from None
        self._posed[group_id] = task

    def _client_journal(self, arrival: Arrival) -> None:
        task = self._posed.pop(arrival.group_id, None)
        if task is None:  # an earlier process asked and ended before it wrote that
            assert isinstance(arrival, Finished)
            task = arrival.record.task
        if not self._results.holds(arrival.group_id):
            self._trajectories.add(arrival)
            self._results.add(rows_of(arrival, task.id, self._plan.num_samples))
        self._on_rows(len(self._results.rows))


def rows_of(arrival: Arrival, task_id: str, num_samples: int) -> list[Row]:
    """Return one row per requested rollout, whether or not it has a result."""
    row = Row(
        task_id=task_id,
        group_id=str(arrival.group_id),
        index=0,
        num_samples=num_samples,
        outcome="",
    )
    if isinstance(arrival, Dropped):
        code, error = code_of(arrival.reason), arrival.reason
        blank = msgspec.structs.replace(row, outcome=code, error=error, has_result=False)
        records = arrival.record.rollouts if arrival.record else []
    else:
        where = {"worker_id": arrival.worker_id, "attempt": arrival.attempt}
        blank = msgspec.structs.replace(row, **where)
        records = arrival.record.rollouts
    by_index = {record.index: record for record in records}
    return [_row(blank, index, by_index.get(index)) for index in range(num_samples)]


def _row(blank: Row, index: int, record: RolloutRecord | None) -> Row:
    if record is None:
        return msgspec.structs.replace(blank, index=index)
    return msgspec.structs.replace(
        blank,
        index=index,
        outcome=record.outcome.value,
        reward=record.reward,
        metrics=record.metrics,
        error=record.error,
        place=record.place,
        num_calls=record.num_calls,
        num_tokens=record.num_logprobs,
        duration_s=round(record.duration_s, 4),
    )
