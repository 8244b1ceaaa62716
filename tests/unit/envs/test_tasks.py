"""The order of tasks, and tasks from a file."""

import itertools
import sys
from pathlib import Path

import pytest

from rollmesh.core.errors import EnvError
from rollmesh.core.types import Task
from rollmesh.envs.tasks import read_tasks, rounds

TASKS = [Task(str(n)) for n in range(5)]


def ids(split: str, seed: int, number: int) -> list[str]:
    return [task.id for task in itertools.islice(rounds(TASKS, split, seed), number)]


def test_training_repeats_in_rounds_with_each_task_once() -> None:
    found = ids("train", 1, 50)
    assert len(found) == 50
    for start in range(0, 50, 5):
        assert sorted(found[start : start + 5]) == list("01234")
    assert found == ids("train", 1, 50)
    assert found != ids("train", 2, 50)


def test_another_split_has_each_task_once_in_order() -> None:
    assert ids("eval", 7, 99) == list("01234")


def test_an_empty_task_list_is_an_error() -> None:
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


def test_a_json_list_of_tasks_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    path.write_text('[{"id": 7, "question": "?"},\n {"question": "!"}]')
    assert read_tasks(str(path)) == [Task("7", {"question": "?"}), Task("2", {"question": "!"})]


def test_a_csv_file_is_read_with_its_header(tmp_path: Path) -> None:
    path = tmp_path / "tasks.csv"
    path.write_text('\ufeffquestion,answer\n"What is\n2 + 2?",4\nWhy?,\n')
    assert read_tasks(path) == [
        Task("3", {"question": "What is\n2 + 2?", "answer": "4"}),
        Task("4", {"question": "Why?", "answer": ""}),
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"id": 1}\n{"id"', "a.jsonl:2: not a JSON object: Input data was truncated"),
        ("a.json", '[{"id": 1},\n 5]', "a.json:2: not a JSON object, but int"),
        ("a.json", '{"id": 1}', "a.json: not a JSON list of objects: Expected `array`"),
        ("a.csv", "a,b\n1,2\n3\n", "a.csv:3: the row does not have the 2 fields of the first"),
        ("a.csv", "a,b\n1,2,3\n", "a.csv:2: the row does not have the 2 fields of the first"),
        ("a.csv", 'a,b\n1,"2\n', "a.csv:2: not CSV: unexpected end of data"),
        ("a.jsonl", "\n", "a.jsonl: the file has no tasks"),
    ],
)
def test_a_bad_file_is_one_line_with_its_place(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(EnvError) as error:
        read_tasks(tmp_path / name)
    assert str(error.value).startswith(f"{tmp_path}/{message}")
    assert "\n" not in str(error.value)


def test_parquet_without_its_library_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EnvError, match="pip install pyarrow"):
        read_tasks(tmp_path / "tasks.parquet")
