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


class Evaluation:
    """A scripted router, and the folder of one evaluation."""

    def __init__(self, folder: Path) -> None:
        self.router = FakeRouter()
        self.folder = folder
        self.row_counts: list[int] = []
        self._has_new_count = asyncio.Event()

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
        while num_rows not in self.row_counts:
            self._has_new_count.clear()
            await self._has_new_count.wait()

    def _on_rows(self, num_rows: int) -> None:
        self.row_counts.append(num_rows)
        self._has_new_count.set()

    def counts(self) -> Counter[str]:
        return Counter(row.task_id for row in rows_in(self.folder))


@pytest.fixture
async def evaluation(tmp_path: Path) -> AsyncIterator[Evaluation]:
    evaluation = Evaluation(tmp_path)
    async with asyncio.timeout(PATIENCE_S):
        yield evaluation
    evaluation.router.hub.close()


@asynccontextmanager
async def stopped(running: "asyncio.Task[None]") -> AsyncIterator[None]:
    """Stop the evaluation at the end of the block."""
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_every_task_is_requested_as_often_as_configured(evaluation: Evaluation) -> None:
    running = evaluation.evaluate()
    asked = [await evaluation.asked() for _ in TASKS]
    assert [task.id for _, task, _ in asked] == ["a", "b", "a", "c"]
    assert len({seed for _, _, seed in asked}) == 4
    for each in asked:
        await evaluation.finish(each)
    await running
    assert evaluation.counts() == {"a": 4, "b": 2, "c": 2}
    assert evaluation.row_counts == [0, 2, 4, 6, 8]


async def test_a_stopped_evaluation_cancels_running_groups_and_requests_them_again_later(
    evaluation: Evaluation,
) -> None:
    running = evaluation.evaluate()
    first = [await evaluation.asked() for _ in TASKS]
    async with stopped(running):
        await evaluation.finish(first[0])
        await evaluation.until_rows(2)
    cancelled = {
        (await asyncio.to_thread(evaluation.router.expect, CancelGroup))[1].group_id
        for _ in range(3)
    }
    assert cancelled == {ask.group_id for ask, _, _ in first[1:]}
    again = evaluation.evaluate()
    asked = [await evaluation.asked() for _ in range(3)]
    assert [(task.id, seed) for _, task, seed in asked] == [
        (task.id, seed) for _, task, seed in first[1:]
    ]
    for each in asked:
        await evaluation.finish(each)
    await again
    assert evaluation.counts() == {"a": 4, "b": 2, "c": 2}


async def test_a_group_without_a_result_is_requested_again_by_the_next_evaluation(
    evaluation: Evaluation,
) -> None:
    running = evaluation.evaluate()
    asked = [await evaluation.asked() for _ in TASKS]
    for each in asked[1:]:
        await evaluation.finish(each)
    route = evaluation.router.routes[asked[0][0].group_id]
    evaluation.router.send(route, GroupFailed(asked[0][0].group_id, "quarantined: w1 and w2 died"))
    await running
    lost = [row for row in rows_in(evaluation.folder) if not row.has_result]
    assert [(row.task_id, row.outcome) for row in lost] == [("a", "quarantined")] * 2
    again = evaluation.evaluate()
    ask = await evaluation.asked()
    assert ask[1].id == "a"
    await evaluation.finish(ask)
    await again
    assert evaluation.counts() == {"a": 4, "b": 2, "c": 2}
    assert all(row.has_result for row in rows_in(evaluation.folder))


@pytest.mark.parametrize("num_cut", [0, 1, 150, 10_000])
async def test_a_result_that_a_crash_left_in_the_journal_is_counted_once(
    evaluation: Evaluation, num_cut: int
) -> None:
    """Between the writing of its rows and its removal from the journal, a group is in both
    places.
    """
    client = RolloutClient(
        evaluation.router.hub.address, JournalConfig(), evaluation.folder, keep=True
    )
    client.start()
    client.ask(TASKS[0], env="guess", num_samples=2, sampling=EVAL_SAMPLING, seed=1)
    _, ask, _ = await asyncio.to_thread(evaluation.router.expect, AskGroup)
    await asyncio.to_thread(deliver, ask.sink, ask.group_id, 1, "a")
    [arrival] = await asyncio.to_thread(client.take, PATIENCE_S)
    client.close()
    with Results(evaluation.folder) as results:
        results.add(rows_of(arrival, "a", 2))
    path = evaluation.folder / RESULTS
    path.write_bytes(path.read_bytes()[: max(0, path.stat().st_size - num_cut)])
    running = evaluation.evaluate()
    asked = [await evaluation.asked() for _ in range(3)]
    assert [task.id for _, task, _ in asked] == ["b", "a", "c"]
    for each in asked:
        await evaluation.finish(each)
    await running
    assert evaluation.counts() == {"a": 4, "b": 2, "c": 2}


async def test_a_second_evaluation_of_a_folder_is_a_one_line_error_and_changes_nothing(
    evaluation: Evaluation,
) -> None:
    running = evaluation.evaluate()
    asked = [await evaluation.asked() for _ in TASKS]
    for each in asked[:2]:
        await evaluation.finish(each)
    await evaluation.until_rows(4)
    with pytest.raises(UserError, match="let it end, or name another --out"):
        await evaluation.evaluate()
    for each in asked[2:]:
        await evaluation.finish(each)
    await running
    assert evaluation.counts() == {"a": 4, "b": 2, "c": 2}


async def test_a_task_that_no_router_accepts_is_a_one_line_error(evaluation: Evaluation) -> None:
    running = evaluation.evaluate([TASKS[0], Task(id="big", data={"text": "x" * 40_000_000})])
    await evaluation.asked()
    with pytest.raises(
        EnvError, match=r"task 'big' has \d+ bytes; at most \d+: let it name a file"
    ):
        await running
    _, cancelled, _ = await asyncio.to_thread(evaluation.router.expect, CancelGroup)
    assert cancelled.reason == "cancelled: the evaluation was stopped"
