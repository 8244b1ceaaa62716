"""Worker, router, gateway, page and `rollmesh --help` load no torch.

Rich is loaded by the library renderers, which workers need; so rich is checked for the router and
`--help` only, and import-linter keeps our own workers from importing it.
"""

import resource
import subprocess
import sys

import pytest

from tests.house.slim import HEAVY, heavy_imports
from tests.house.source import ROOT, all_modules

SLIM_ROOMS = (
    "core",
    "wire",
    "engine",
    "envs",
    "runtime",
    "serve/interception",
    "serve/router",
    "serve/server",
    "dashboard",
    "launch",
    "cli",
)
HELP = ["-m", "rollmesh.cli.main", "--help"]
MAX_HELP_CPU_S = 0.4


def modules_of(*rooms: str) -> list[str]:
    """Names of the modules in `rooms`, without the torch engine, main guards, and Ray's modules."""
    return [
        module.name
        for module in all_modules()
        if module.is_in(*(f"rollmesh/{room}" for room in rooms))
        and not module.is_in("rollmesh/engine/embedded")
        and module.file_name != "__main__.py"
        and not module.file_name.startswith("ray")
    ]


@pytest.mark.parametrize("room", SLIM_ROOMS)
def test_slim_room_never_loads_torch(room: str) -> None:
    names = modules_of(room)
    assert names or not (ROOT / "rollmesh" / room).is_dir()
    assert heavy_imports(names) == {}


def test_owners_that_make_no_tensors_never_load_torch() -> None:
    heavier = ("torch_bridge", "plane", "compat", "ray_backend")
    names = [name for name in modules_of("tensors") if name.rpartition(".")[2] not in heavier]
    assert "rollmesh.tensors.store" in names
    assert heavy_imports(names, ["torch", "transformers", "ray"]) == {}


def test_rollout_clients_never_load_torch() -> None:
    names = modules_of("serve/client")
    assert "rollmesh.serve.client.samples" in names
    assert heavy_imports(names, ["torch", "transformers", "ray"]) == {}


@pytest.mark.slow
def test_a_trainer_of_one_rank_loads_no_controller() -> None:
    ranked = ["rollmesh.trainer.ranked", "rollmesh.trainer.controller.controller"]
    assert heavy_imports(["rollmesh.trainer.process"], ranked) == {}


def test_router_never_loads_rich() -> None:
    names = modules_of("core", "wire", "serve/router")
    assert names
    assert heavy_imports(names, [*HEAVY, "rich", "renderers"]) == {}


def test_the_probe_reports_a_heavy_library_and_the_module_that_loaded_it() -> None:
    assert heavy_imports(["json", "numpy.linalg"]) == {"numpy": "numpy.linalg"}


def test_help_loads_nothing_heavy() -> None:
    if not (ROOT / "rollmesh/cli").is_dir():
        return
    traced = subprocess.run([sys.executable, "-X", "importtime", *HELP], capture_output=True)
    modules = {line.rpartition(b"|")[2].strip().decode() for line in traced.stderr.splitlines()}
    assert traced.returncode == 0, traced.stderr[-500:]
    assert "rollmesh.cli" in modules
    assert not modules & {*HEAVY, "rich", "renderers"}


def test_help_answers_at_once() -> None:
    if not (ROOT / "rollmesh/cli").is_dir():
        return
    assert min(cpu_s([sys.executable, *HELP]) for _ in range(3)) < MAX_HELP_CPU_S


def cpu_s(argv: list[str]) -> float:
    """CPU seconds of a child process, which other load on the machine does not change."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
