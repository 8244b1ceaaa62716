"""Tasks from a list or a file, in the order that the interface asks for.

Invariant: the same split and seed give the same order; training never runs out of tasks, any other
split has each once. Driven by environments.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from rollmesh.core.errors import EnvError
from rollmesh.core.types import Json, Task


def rounds(tasks: Sequence[Task], split: str, seed: int) -> Iterator[Task]:
    """For `train` the tasks in shuffled rounds, without an end; else each once, as they stand."""
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


def read_tasks(path: Path) -> list[Task]:
    """A task for each line of a file: a JSON object, whose `id` names it, or else its line number.

    EnvError, with the line, where there is none.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise EnvError(f"{path}: {error.strerror}; name another file of tasks") from None
    tasks = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data = msgspec.json.decode(line, type=dict[str, Json])
        except msgspec.MsgspecError as error:
            raise EnvError(f"{path}:{number}: not a JSON object: {error}") from None
        tasks.append(Task(id=str(data.pop("id", number)), data=data))
    return tasks
