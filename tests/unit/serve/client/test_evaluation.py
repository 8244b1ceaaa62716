"""Evaluations with a scripted router: a rollout with a result is neither requested nor counted
again."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import EnvError, UserError
from rollmesh.core.types import EVAL_SAMPLING, Task
from rollmesh.serve.client.client import RolloutClient
from rollmesh.serve.client.evaluation import Site, evaluate, rows_of
from rollmesh.serve.client.evaluation_files import RESULTS, EvaluationPlan, Results, rows_in
from rollmesh.wire.frames import decode_ask
from rollmesh.wire.messages import AskGroup, CancelGroup, GroupFailed
from tests.unit.serve.client.fake_router import FakeRouter, deliver

PLAN = EvaluationPlan(
    env="guess",
    env_settings={},
    model="m",
    split="eval",
    num_tasks=4,
    num_samples=2,
    seed=0,
    sampling=EVAL_SAMPLING,
)
TASKS = [Task(id=name) for name in ("a", "b", "a", "c")]
PATIENCE_S = 60.0
Asked = tuple[AskGroup, Task, int]


class World:
    """A scripted router, and the folder of one evaluation."""

    def __init__(self, folder: Path) -> None:
        self.router = FakeRouter()
        self.folder = folder
        self.told: list[int] = []
        self._is_told = asyncio.Event()

    def evaluate(self, tasks: list[Task] = TASKS) -> "asyncio.Task[None]":
        site = Site(self.router.hub.address, self.folder, JournalConfig(), None)
        return asyncio.create_task(evaluate(PLAN, tasks, site, self._on_rows))

    async def asked(self) -> Asked:
        """Return the next request: its message, task and seed."""
        _, ask, packet = await asyncio.to_thread(self.router.expect, AskGroup)
        body = decode_ask(packet.body)
        assert (body.is_eval, ask.num_samples) == (True, 2)
        return ask, body.task, body.seed

    async def finish(self, asked: Asked) -> None:
        ask, task, _ = asked
        await asyncio.to_thread(deliver, ask.sink, ask.group_id, 1, task.id)

    async def until_rows(self, num_rows: int) -> None:
        while num_rows not in self.told:
            self._is_told.clear()
            await self._is_told.wait()

    def _on_rows(self, num_rows: int) -> None:
        self.told.append(num_rows)
        self._is_told.set()

    def counts(self) -> Counter[str]:
        return Counter(row.task_id for row in rows_in(self.folder))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    async with asyncio.timeout(PATIENCE_S):
        yield world
    world.router.hub.close()


@asynccontextmanager
async def stopped(running: "asyncio.Task[None]") -> AsyncIterator[None]:
    """Stop the evaluation at the end of the block."""
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_every_task_is_asked_for_as_often_as_it_is_posed(world: World) -> None:
    running = world.evaluate()
    asked = [await world.asked() for _ in TASKS]
    assert [task.id for _, task, _ in asked] == ["a", "b", "a", "c"]
    assert len({seed for _, _, seed in asked}) == 4
    for each in asked:
        await world.finish(each)
    await running
    assert world.counts() == {"a": 4, "b": 2, "c": 2}
    assert world.told == [0, 2, 4, 6, 8]


async def test_stopped_evaluation_cancels_what_runs_and_asks_for_it_again_later(
    world: World,
) -> None:
    running = world.evaluate()
    first = [await world.asked() for _ in TASKS]
    async with stopped(running):
        await world.finish(first[0])
        await world.until_rows(2)
    cancelled = {
        (await asyncio.to_thread(world.router.expect, CancelGroup))[1].group_id for _ in range(3)
    }
    assert cancelled == {ask.group_id for ask, _, _ in first[1:]}
    again = world.evaluate()
    asked = [await world.asked() for _ in range(3)]
    assert [(task.id, seed) for _, task, seed in asked] == [
        (task.id, seed) for _, task, seed in first[1:]
    ]
    for each in asked:
        await world.finish(each)
    await again
    assert world.counts() == {"a": 4, "b": 2, "c": 2}


async def test_group_without_a_result_is_asked_for_again_by_the_next(world: World) -> None:
    running = world.evaluate()
    asked = [await world.asked() for _ in TASKS]
    for each in asked[1:]:
        await world.finish(each)
    route = world.router.routes[asked[0][0].group_id]
    world.router.say(route, GroupFailed(asked[0][0].group_id, "quarantined: w1 and w2 died"))
    await running
    lost = [row for row in rows_in(world.folder) if not row.has_result]
    assert [(row.task_id, row.outcome) for row in lost] == [("a", "quarantined")] * 2
    again = world.evaluate()
    ask = await world.asked()
    assert ask[1].id == "a"
    await world.finish(ask)
    await again
    assert world.counts() == {"a": 4, "b": 2, "c": 2}
    assert all(row.has_result for row in rows_in(world.folder))


@pytest.mark.parametrize("num_cut", [0, 1, 150, 10_000])
async def test_result_that_a_crash_left_in_the_journal_is_counted_once(
    world: World, num_cut: int
) -> None:
    """Between its rows and its removal, a group is in both places."""
    client = RolloutClient(world.router.hub.address, JournalConfig(), world.folder, keep=True)
    client.start()
    client.ask(TASKS[0], env="guess", num_samples=2, sampling=EVAL_SAMPLING, seed=1)
    _, ask, _ = await asyncio.to_thread(world.router.expect, AskGroup)
    await asyncio.to_thread(deliver, ask.sink, ask.group_id, 1, "a")
    [arrival] = await asyncio.to_thread(client.take, PATIENCE_S)
    client.close()
    with Results(world.folder) as results:
        results.add(rows_of(arrival, "a", 2))
    path = world.folder / RESULTS
    path.write_bytes(path.read_bytes()[: max(0, path.stat().st_size - num_cut)])
    running = world.evaluate()
    asked = [await world.asked() for _ in range(3)]
    assert [task.id for _, task, _ in asked] == ["b", "a", "c"]
    for each in asked:
        await world.finish(each)
    await running
    assert world.counts() == {"a": 4, "b": 2, "c": 2}


async def test_second_evaluation_in_the_folder_is_one_line_and_harms_nothing(world: World) -> None:
    running = world.evaluate()
    asked = [await world.asked() for _ in TASKS]
    for each in asked[:2]:
        await world.finish(each)
    await world.until_rows(4)
    with pytest.raises(UserError, match="let it end, or name another --out"):
        await world.evaluate()
    for each in asked[2:]:
        await world.finish(each)
    await running
    assert world.counts() == {"a": 4, "b": 2, "c": 2}


async def test_task_that_no_router_takes_is_one_line(world: World) -> None:
    running = world.evaluate([TASKS[0], Task(id="big", data={"text": "x" * 40_000_000})])
    await world.asked()
    with pytest.raises(
        EnvError, match=r"task 'big' has \d+ bytes; at most \d+: let it name a file"
    ):
        await running
    _, cancelled, _ = await asyncio.to_thread(world.router.expect, CancelGroup)
    assert cancelled.reason == "cancelled: the evaluation was stopped"
