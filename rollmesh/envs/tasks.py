"""Read tasks from a file, and repeat a finite list of tasks in shuffled rounds.

- The same split and seed give the same order.
- `train` never ends; any other split has each task once.
"""

import csv
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from rollmesh.core.errors import EnvError
from rollmesh.core.types import Json, Task

Row = tuple[int, Json]
"""Line or row number, counted from 1, and the decoded row."""


def rounds(tasks: Sequence[Task], split: str, seed: int) -> Iterator[Task]:
    """Repeat the tasks of `train` in shuffled rounds without end; yield others once, in order."""
    if not tasks:
        raise EnvError(f"there are no tasks for {split}")
    if split != "train":
        yield from tasks
        return
    rng = random.Random(f"{split}/{seed}")
    order = list(tasks)
    while True:
        rng.shuffle(order)
        yield from order


def read_tasks(path: str | Path) -> list[Task]:
    """Read a task from each row of a file: JSONL, JSON (a list of objects), CSV or Parquet.

    The row's `id` names the task, or else its line (in Parquet its row), counted from 1; the other
    fields become `task.data`. The suffix decides the format: .json, .csv, .tsv, .parquet, and JSONL
    for any other. CSV values are strings. Parquet needs pyarrow. EnvError names file and line.
    """
    path = Path(path)
    read = _READERS.get(path.suffix.lower(), _jsonl_rows)
    try:
        tasks = [_task(path, number, row) for number, row in read(path)]
    except OSError as error:
        raise EnvError(f"{path}: {error.strerror}; name another file of tasks") from None
    except UnicodeDecodeError as error:
        raise EnvError(f"{path}: not UTF-8 text: {error}") from None
    if not tasks:
        raise EnvError(f"{path}: the file has no tasks")
    return tasks


def _task(path: Path, number: int, row: Json) -> Task:
    if not isinstance(row, dict):
        raise EnvError(f"{path}:{number}: not a JSON object, but {type(row).__name__}")
    name = row.pop("id", None)
    return Task(id=str(number if name is None else name), data=row)


def _jsonl_rows(path: Path) -> Iterator[Row]:
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                yield number, msgspec.json.decode(line)
            except msgspec.MsgspecError as error:
                raise EnvError(f"{path}:{number}: not a JSON object: {error}") from None


def _json_rows(path: Path) -> Iterator[Row]:
    raw = path.read_bytes()
    try:
        rows = msgspec.json.decode(raw, type=list[msgspec.Raw])
        at = 0
        for row in rows:
            at = raw.index(bytes(row), at)
            yield raw.count(b"\n", 0, at) + 1, msgspec.json.decode(row)
            at += len(bytes(row))
    except msgspec.MsgspecError as error:
        raise EnvError(f"{path}: not a JSON list of objects: {error}") from None


def _csv_rows(path: Path, delimiter: str = ",") -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, delimiter=delimiter, strict=True)
        try:
            for row in rows:
                if None in row or None in row.values():
                    raise EnvError(
                        f"{path}:{rows.line_num}: the row does not have the "
                        f"{len(rows.fieldnames or ())} fields of the first line"
                    )
                yield rows.line_num, row
        except csv.Error as error:
            raise EnvError(f"{path}:{rows.reader.line_num}: not CSV: {error}") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet  # noqa: PLC0415 - not a dependency
    except ModuleNotFoundError:
        raise EnvError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    try:
        with path.open("rb") as file:
            yield from enumerate(parquet.read_table(file).to_pylist(), start=1)
    except ArrowException as error:
        raise EnvError(f"{path}: not Parquet: {error}") from None


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": lambda path: _csv_rows(path, "\t"),
    ".parquet": _parquet_rows,
}
