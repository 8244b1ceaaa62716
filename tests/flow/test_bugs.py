"""Generated bugs: the checks detect each, and only a fixed function gets a reward."""

import itertools
from pathlib import Path

import pytest

from examples.bugs.bugs import all_bugs
from examples.bugs.env import BugsEnv
from examples.bugs.functions import FUNCTIONS
from rollmesh.core.errors import EnvError
from rollmesh.core.types import Task
from rollmesh.envs.env import Transcript

BUGS = {bug.id: bug for bug in all_bugs()}


@pytest.fixture
def env() -> BugsEnv:
    return BugsEnv(agent="small")


async def reward(env: BugsEnv, task_id: str, source: str) -> float:
    transcript = Transcript(data={"source": source, "exit_code": 0})
    return (await env.score(Task(task_id), transcript)).reward


def test_every_function_has_bugs_and_every_bug_another_source() -> None:
    assert {bug.function.name for bug in BUGS.values()} == {each.name for each in FUNCTIONS}
    assert len({bug.source for bug in BUGS.values()}) == len(BUGS) >= 20
    assert [*BUGS] == [bug.id for bug in all_bugs()]


async def test_the_bug_fails_and_the_fixed_function_passes(env: BugsEnv) -> None:
    for function in FUNCTIONS:
        bug = next(bug for bug in BUGS.values() if bug.function is function)
        assert await reward(env, bug.id, bug.source) == 0.0
        assert await reward(env, bug.id, function.source) == 1.0


@pytest.mark.parametrize(
    "source", ["", "def clamp(", "import sys; sys.exit(0)", "import os; os._exit(0)", "clamp = 1"]
)
async def test_a_file_without_a_function_earns_nothing(env: BugsEnv, source: str) -> None:
    assert await reward(env, "clamp-0", source) == 0.0


def test_tasks_show_the_bug_and_hide_the_checks(env: BugsEnv) -> None:
    task = next(env.tasks("eval", 0))
    bug = BUGS[task.id]
    assert task.data["files"] == {f"{bug.function.name}.py": bug.source}
    assert "assert" not in str(task.data)
    endless = itertools.islice(env.tasks("train", 0), 2 * len(BUGS))
    assert len([*endless]) == 2 * len(BUGS)


def test_a_missing_file_is_scored_as_an_empty_one(env: BugsEnv, tmp_path: Path) -> None:
    assert env.collect(Task("clamp-0"), tmp_path) == {"source": ""}


def test_a_symbolic_link_instead_of_the_file_is_not_followed(env: BugsEnv, tmp_path: Path) -> None:
    (tmp_path / "clamp.py").symlink_to("/etc/hostname")
    assert env.collect(Task("clamp-0"), tmp_path) == {"source": ""}


def test_an_unknown_agent_is_refused() -> None:
    with pytest.raises(EnvError, match='it is "mini" or "small"'):
        BugsEnv(agent="large")
