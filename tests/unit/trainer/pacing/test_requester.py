"""Tasks are requested in turn, and requeued ones before new ones.

A finite split is repeated, and a fault of the environment is one line.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from rollmesh.core.errors import EnvError
from rollmesh.core.types import Task
from rollmesh.envs.guess import GuessEnv
from rollmesh.trainer.pacing.lifecycle import MAX_REQUEUES
from rollmesh.trainer.pacing.requester import endless_tasks
from tests.unit.trainer.pacing.pacer_stage import MANY, Stage, staged


def test_requeued_task_is_requested_before_new_ones(tmp_path: Path) -> None:
    stage = staged(tmp_path, "requeue")
    stage.pacer.ask(MANY)
    first, *rest = stage.open()
    for group_id in rest:
        stage.client.drop(group_id, "agent_error: it broke")
    stage.pacer.collect(0.0)
    for num_requeued in range(MAX_REQUEUES + 1):
        stage.client.finish(first, policy_versions=(0,))
        stage.pacer.collect(0.0)
        assert stage.pacer.take(step=3) is None
        stage.pacer.ask(MANY)
        tasks = {task.id: group_id for group_id, (task, _) in stage.client.asked.items()}
        reasons = {drop["reason"] for drop in stage.rows("drops.jsonl")}
        assert ("t0" in tasks) == (num_requeued < MAX_REQUEUES) == ("stale: age 3" not in reasons)
        first = tasks.get("t0", first)
    assert stage.lost() == 0
    stage.records.close()


def test_end_of_tasks_is_not_counted_as_a_request(tmp_path: Path) -> None:
    stage = Stage(tmp_path, num_tasks=3)
    with pytest.raises(StopIteration):
        stage.pacer.ask(MANY)
    assert (stage.tally.num_asked, stage.lost()) == (12, 0)
    stage.records.close()


def test_request_names_the_policy_version_that_pacing_assumes(tmp_path: Path) -> None:
    stage = staged(tmp_path, "wait")
    stage.pacer.publishing(policy_version=7, step=4)
    stage.pacer.ask(MANY)
    assert set(stage.client.min_policy_versions) == {3}  # 7 is on its way
    stage.records.close()


class Posing(GuessEnv):
    """An environment that yields the test's tasks, and raises those that are errors."""

    def __init__(self, *posed: Any) -> None:
        super().__init__()
        self._posed = posed

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        for each in self._posed:
            if isinstance(each, Exception):
                raise each
            yield each


TASK = Task(id="one", data={})


def test_tasks_keep_the_order_of_the_environment() -> None:
    tasks = endless_tasks(GuessEnv(), "guess", 0)
    posed = GuessEnv().tasks("train", 0)
    assert [next(tasks) for _ in range(20)] == [next(posed) for _ in range(20)]


@pytest.mark.parametrize(
    ("posed", "message"),
    [
        ((OSError("the data is gone\nmore"),), "failed after 1 tasks: OSError: the data is gone"),
        (({"id": "x"},), "failed after 1 tasks: TypeError: yielded dict in place of a Task"),
    ],
)
def test_malformed_task_list_is_reported_in_one_line(posed: tuple[Any, ...], message: str) -> None:
    tasks = endless_tasks(Posing(TASK, *posed), "my:Env", 0)
    assert next(tasks) == TASK
    with pytest.raises(EnvError) as error:
        next(tasks)
    assert str(error.value) == f'env = "my:Env": tasks("train") {message}'


FIVE = [Task(id=str(number)) for number in range(5)]


def ids(seed: int, num_before: int, number: int) -> list[str]:
    tasks = endless_tasks(Posing(*FIVE), "my:Env", seed, num_before)
    return [task.id for task in islice(tasks, number)]


def test_a_finite_split_is_repeated_in_shuffled_rounds() -> None:
    found = ids(1, 0, 50)
    rounds = [found[at : at + 5] for at in range(0, 50, 5)]
    assert rounds[0] == list("01234")
    assert all(sorted(each) == list("01234") for each in rounds)
    assert len({tuple(each) for each in rounds}) > 5
    assert found != ids(2, 0, 50)


@pytest.mark.parametrize("num_before", [0, 1, 5, 7, 23])
def test_resumed_run_continues_with_the_same_tasks(num_before: int) -> None:
    assert ids(3, num_before, 20) == ids(3, 0, num_before + 20)[num_before:]


def test_empty_split_is_refused() -> None:
    with pytest.raises(EnvError, match=r'env = "my:Env": tasks\("train"\) returned no task'):
        next(endless_tasks(Posing(), "my:Env", 0))
