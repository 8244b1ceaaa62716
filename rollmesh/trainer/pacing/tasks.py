"""The tasks that a run trains on, as the user's environment poses them.

Invariant: what the environment's code does wrong ends the run with one line that names it: tasks
that run out, that are no Task, or a generator that raises. Driven by the pacer, which asks for one
task per group.
"""

from collections.abc import Iterator

from rollmesh.core.errors import EnvError
from rollmesh.core.types import Task
from rollmesh.envs.env import Env

SPLIT = "train"


def endless_tasks(env: Env, name: str, seed: int, num_before: int = 0) -> Iterator[Task]:
    """The tasks of `env`, which the settings call `name`, after the first `num_before`.

    EnvError where there is none left.
    """
    where = f'env = "{name}": tasks("{SPLIT}")'
    num_posed = 0
    try:
        for task in env.tasks(SPLIT, seed):
            if not isinstance(task, Task):
                raise TypeError(f"gave {type(task).__name__} and not a Task")
            num_posed += 1
            if num_posed > num_before:
                yield task
    except Exception as error:  # door: a user's generator may raise anything
        first_line = next(iter(str(error).splitlines()), "")
        told = f"{type(error).__name__}: {first_line}"
        raise EnvError(f"{where} failed after {num_posed} tasks: {told}") from error
    raise EnvError(f"{where} ended after {num_posed} tasks; let it go on for ever, in rounds")
