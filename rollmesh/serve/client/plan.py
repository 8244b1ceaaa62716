"""What an evaluation evaluates: its plan, in its folder, and the tasks that an environment poses.

Invariant: a plan that was written is the plan of all that is in its folder; what the environment's
code does wrong is one line. Driven by `rollmesh eval`, and free of numpy, as all verbs are.
"""

from itertools import islice
from pathlib import Path

import msgspec

from rollmesh.core.errors import EnvError, UserError
from rollmesh.core.types import Json, SamplingPolicy, Task
from rollmesh.envs.env import Env

PLAN = "eval.json"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is evaluated."""

    env: str
    env_settings: dict[str, Json]
    model: str
    """Its folder; empty where the mesh was there before."""
    split: str
    num_tasks: int
    """At most; a split may end before."""
    num_samples: int
    seed: int
    sampling: SamplingPolicy


def write_plan(plan: Plan, folder: Path) -> None:
    """Into the evaluation's folder; UserError if that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PLAN).write_bytes(msgspec.json.format(msgspec.json.encode(plan)) + b"\n")
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; name another --out") from None


def read_plan(folder: Path) -> Plan:
    """What the folder evaluates; UserError if it does not say."""
    try:
        return msgspec.json.decode((folder / PLAN).read_bytes(), type=Plan)
    except FileNotFoundError:
        raise UserError(f"{folder}: no evaluation to go on with; leave out --resume") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{folder / PLAN}: {error}; begin anew without --resume") from None


def pose(env: Env, plan: Plan) -> list[Task]:
    """The tasks of `plan`, in order; EnvError in one line where the environment fails."""
    where = f'env = "{plan.env}": tasks("{plan.split}")'
    tasks: list[Task] = []
    try:
        for task in islice(env.tasks(plan.split, plan.seed), plan.num_tasks):
            if not isinstance(task, Task):
                raise TypeError(f"gave {type(task).__name__} and not a Task")
            tasks.append(task)
    except Exception as error:  # door: a user's generator may raise anything
        first_line = next(iter(str(error).splitlines()), "")
        told = f"{type(error).__name__}: {first_line}"
        raise EnvError(f"{where} failed after {len(tasks)} tasks: {told}") from error
    if not tasks:
        raise EnvError(f"{where} gave no task; name another --split")
    return tasks
