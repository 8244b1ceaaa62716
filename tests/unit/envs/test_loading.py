"""Loading an environment: short names, users' modules, and one clear line for each mistake."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmesh.core.errors import EnvError
from rollmesh.envs.echo import EchoEnv
from rollmesh.envs.guess import GuessEnv
from rollmesh.envs.loading import load_env

USER_MODULE = """
from rollmesh.core.types import Score, Task
from rollmesh.envs.env import Env, Transcript

class MyEnv(Env):
    def __init__(self, *, level: int = 1):
        if level < 1:
            raise ValueError("level must be at least 1")
        self.level = level
    def tasks(self, split, seed):
        while True:
            yield Task("t")
    async def run(self, task, agent):
        return Transcript()
    def score(self, task, transcript):
        return Score(1.0)

class Unfinished(Env):
    pass

not_a_class = 7
"""


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "rm_user_env.py").write_text(USER_MODULE)
    (tmp_path / "rm_broken_env.py").write_text("import module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    yield tmp_path
    for name in ("rm_user_env", "rm_broken_env"):
        sys.modules.pop(name, None)


def test_short_names_load_the_built_in_environments() -> None:
    env = load_env("guess", {"highest": 15, "num_guesses": 4})
    assert isinstance(env, GuessEnv)
    assert (env.highest, env.num_guesses) == (15, 4)
    assert isinstance(load_env("echo", {}), EchoEnv)


@pytest.mark.usefixtures("user_folder")
def test_users_module_in_the_working_directory_is_found() -> None:
    env = load_env("rm_user_env:MyEnv", {"level": 3})
    assert vars(env) == {"level": 3}
    assert next(env.tasks("train", 0)).id == "t"


@pytest.mark.usefixtures("user_folder")
@pytest.mark.parametrize(
    ("target", "settings", "line"),
    [
        ("gues", {}, "neither built in (echo, guess, gym, openenv) nor of the form"),
        ("gues", {}, "\"package.module:Class\"; did you mean 'guess'?"),
        ("rm_user_env:", {}, "nor of the form"),
        ("rm_absent:MyEnv", {}, "rm_absent cannot be imported: ModuleNotFoundError: No module"),
        (
            "rm_broken_env:X",
            {},
            "cannot be imported: ModuleNotFoundError: No module named 'module_",
        ),
        ("rm_user_env:Missing", {}, "module rm_user_env has no class Missing"),
        ("rm_user_env:not_a_class", {}, "is not a subclass of rollmesh.Env"),
        ("rm_user_env:Score", {}, "is not a subclass of rollmesh.Env"),
        ("rm_user_env:Unfinished", {}, "does not define run, score, tasks"),
        ("rm_user_env:MyEnv", {"lvl": 1}, "unexpected keyword argument 'lvl' (it takes: level)"),
        ("rm_user_env:MyEnv", {"levl": 1}, "(it takes: level); did you mean 'level'?"),
        ("rm_user_env:MyEnvv", {}, "has no class MyEnvv; did you mean 'MyEnv'?"),
        ("rm_user_env:MyEnv", {"level": 0}, "could not be built: ValueError: level must be at"),
        ("guess", {"highest": 1}, "could not be built: ValueError: highest must be at least 2"),
    ],
)
def test_mistake_is_one_line_that_names_target_and_cause(
    target: str, settings: dict[str, int], line: str
) -> None:
    with pytest.raises(EnvError) as caught:
        load_env(target, settings)
    message = str(caught.value)
    assert line in message
    assert f'env = "{target}"' in message
    assert "\n" not in message
