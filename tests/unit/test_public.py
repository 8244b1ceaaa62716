"""`import rollmesh` gives the public names, and loads none of them before it is used."""

import subprocess
import sys

import pytest

import rollmesh
from rollmesh.cli.main import main
from tests.house.slim import HEAVY, heavy_imports
from tests.house.source import ROOT

LOADED = """
import sys
import rollmesh
assert set(rollmesh.__all__) <= set(dir(rollmesh))
print(*(name for name in sys.modules if name.startswith("rollmesh.")))
"""
ENVIRONMENT_NAMES = """
import sys
from rollmesh import (
    AgentFailed, Endpoint, Env, HarnessEnv, InfraError, MultiTurnEnv, Score, SingleTurnEnv, Task,
    ToolEnv, Transcript, read_tasks,
)
print(*({"torch", "numpy", "zmq", "transformers"} & sys.modules.keys()))
"""


def printed(program: str) -> str:
    """Standard output of a fresh interpreter."""
    argv = [sys.executable, "-c", program]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_the_names_that_users_need_are_public() -> None:
    named = "Env Task Score Transcript read_tasks RolloutClient AsyncRolloutClient Gateway"
    assert set(named.split()) < set(rollmesh.__all__)


@pytest.mark.parametrize("name", sorted(set(rollmesh.__all__) - {"__version__"}))
def test_every_public_name_is_the_object_of_that_name(name: str) -> None:
    assert getattr(rollmesh, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'rollmesh' has no attribute 'Envv'"):
        rollmesh.Envv  # noqa: B018 - the access is what is tested


def test_import_rollmesh_loads_no_room() -> None:
    assert printed(LOADED) == ""


def test_an_environment_loads_no_torch_numpy_or_zmq() -> None:
    assert printed(ENVIRONMENT_NAMES) == ""


def test_no_public_name_loads_torch() -> None:
    modules = sorted({target.partition(":")[0] for target in rollmesh.TARGETS})
    assert heavy_imports(modules, [name for name in HEAVY if name != "numpy"]) == {}


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version  # noqa: PLC0415 - the only test that reads it

    assert rollmesh.__version__ == version("rollmesh")
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    assert f'version = "{rollmesh.__version__}"' in text


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_the_command_prints_its_version(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    assert capsys.readouterr().out == f"rollmesh {rollmesh.__version__}\n"
