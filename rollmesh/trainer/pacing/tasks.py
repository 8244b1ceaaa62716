"""The tasks that a run trains on, as the user's environment poses them.

- A finite split is repeated: the first round is in the environment's order, each later round is
  shuffled by seed and round number. The order is the same after a restart.
- A mistake of the environment's code ends the run with one line that names it: no task, a value
  that is not a Task, or a generator that raises.
"""

import itertools
import random
from collections.abc import Iterator

from rollmesh.core.errors import EnvError
from rollmesh.core.types import Task
from rollmesh.envs.env import Env

SPLIT = "train"


def endless_tasks(env: Env, name: str, seed: int, num_before: int = 0) -> Iterator[Task]:
    """The tasks of `env`, which the settings call `name`, after the first `num_before`.

    EnvError where the environment fails, or poses no task at all.
    """
    return itertools.islice(_rounds(env, name, seed), num_before, None)


def _rounds(env: Env, name: str, seed: int) -> Iterator[Task]:
    where = f'env = "{name}": tasks("{SPLIT}")'
    for number in itertools.count():
        posed = _posed(env, where, seed)
        if number:
            # Only a finite split gets here, so that all of it may be held.
            tasks = list(posed)
            random.Random(f"{SPLIT}/{seed}/{number}").shuffle(tasks)
            posed = iter(tasks)
        first = next(posed, None)
        if first is None:
            raise EnvError(f"{where} gave no task; let it yield at least one")
        yield first
        yield from posed


def _posed(env: Env, where: str, seed: int) -> Iterator[Task]:
    """One round, in the environment's order."""
    num_posed = 0
    try:
        for task in env.tasks(SPLIT, seed):
            if not isinstance(task, Task):
                raise TypeError(f"gave {type(task).__name__} and not a Task")
            num_posed += 1
            yield task
    except Exception as error:  # door: a user's generator may raise anything
        first_line = next(iter(str(error).splitlines()), "")
        told = f"{type(error).__name__}: {first_line}"
        raise EnvError(f"{where} failed after {num_posed} tasks: {told}") from error
