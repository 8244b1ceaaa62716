"""Tasks come as posed, and what an environment does wrong is told in one line."""

from collections.abc import Iterator
from typing import Any

import pytest

from rollmesh.core.errors import EnvError
from rollmesh.core.types import Task
from rollmesh.envs.guess import GuessEnv
from rollmesh.trainer.pacing.tasks import endless_tasks


class Posing(GuessEnv):
    """Poses what a test says, and raises it where it is an error."""

    def __init__(self, *posed: Any) -> None:
        super().__init__()
        self._posed = posed

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        for each in self._posed:
            if isinstance(each, Exception):
                raise each
            yield each


TASK = Task(id="one", data={})


def test_tasks_come_as_the_environment_poses_them() -> None:
    tasks = endless_tasks(GuessEnv(), "guess", 0)
    posed = GuessEnv().tasks("train", 0)
    assert [next(tasks) for _ in range(20)] == [next(posed) for _ in range(20)]


@pytest.mark.parametrize(
    ("posed", "told"),
    [
        ((), "ended after 1 tasks; let it go on for ever, in rounds"),
        ((OSError("the data is gone\nmore"),), "failed after 1 tasks: OSError: the data is gone"),
        (({"id": "x"},), "failed after 1 tasks: TypeError: gave dict and not a Task"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(posed: tuple[Any, ...], told: str) -> None:
    tasks = endless_tasks(Posing(TASK, *posed), "my:Env", 0)
    assert next(tasks) == TASK
    with pytest.raises(EnvError) as error:
        next(tasks)
    assert str(error.value) == f'env = "my:Env": tasks("train") {told}'
