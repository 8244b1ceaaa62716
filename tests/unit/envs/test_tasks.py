"""Tasks in their order, and tasks from a file."""

import itertools
from pathlib import Path

import pytest

from rollmesh.core.errors import EnvError
from rollmesh.core.types import Task
from rollmesh.envs.tasks import read_tasks, rounds

TASKS = [Task(str(n)) for n in range(5)]


def ids(split: str, seed: int, number: int) -> list[str]:
    return [task.id for task in itertools.islice(rounds(TASKS, split, seed), number)]


def test_training_goes_round_for_ever_and_each_round_has_each_task_once() -> None:
    found = ids("train", 1, 50)
    assert len(found) == 50
    for start in range(0, 50, 5):
        assert sorted(found[start : start + 5]) == list("01234")
    assert found == ids("train", 1, 50)
    assert found != ids("train", 2, 50)


def test_another_split_has_each_task_once_as_it_stands() -> None:
    assert ids("eval", 7, 99) == list("01234")


def test_no_tasks_are_a_mistake_and_not_an_endless_search() -> None:
    with pytest.raises(EnvError, match="no tasks for train"):
        next(rounds([], "train", 0))


def test_a_line_is_a_task(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a", "question": "?"}\n\n{"question": "!"}\n')
    assert read_tasks(path) == [Task("a", {"question": "?"}), Task("3", {"question": "!"})]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a"}\n[1]\n')
    with pytest.raises(EnvError, match=r"tasks\.jsonl:2: not a JSON object"):
        read_tasks(path)
    with pytest.raises(EnvError, match="no-such-file"):
        read_tasks(tmp_path / "no-such-file")
