"""Mistakes of a user: the real command reports each in one line, with exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh.core.process import listen
from rollmesh.testing.run_folder import FakeRun
from tests.flow.router_process import RouterProcess


def rollmesh(*args: str, cwd: Path) -> tuple[int, str]:
    """Run `rollmesh ARGS`; return its exit code and stderr."""
    argv = [sys.executable, "-m", "rollmesh.cli.main", *args]
    ended = subprocess.run(argv, capture_output=True, text=True, cwd=cwd, timeout=60, check=False)
    return ended.returncode, ended.stderr


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def mesh_toml(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "mesh.toml"
    path.write_text(f'[model]\npath = "{model}"\n')
    return path


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.num_step=3", "unknown key 'trainer.num_step'"),
        ("trainer.num_steps=-3", "trainer.num_steps: expected `int` >= 0"),
        ("model.path=nowhere", "model.path = nowhere: no such folder"),
        ("dashboard.bind=0.0.0.0:0", "dashboard.bind = 0.0.0.0:0: the dashboard has no login"),
        ("run.folder=/proc/none", "run.folder = /proc/none: cannot make /proc/none/mesh there"),
        ("router.http_bind=nonsense", "router.http_bind = nonsense: cannot listen there"),
        ('engine.urls=["http://127.0.0.1:9"]', "engine.urls: http://127.0.0.1:9 does not answer"),
    ],
)
def test_a_mistake_in_the_settings_is_a_one_line_error(
    tmp_path: Path, mesh_toml: Path, override: str, message: str
) -> None:
    code, err = rollmesh("up", str(mesh_toml), "--set", override, cwd=tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("rollmesh: ")
    assert message in err


@pytest.mark.parametrize(
    ("command", "need"),
    [
        ("up", "worker.max_rollouts = 64 needs 320"),  # the folder's mesh.toml is used
        ("demo", "worker.max_rollouts = 64 needs 320"),
        (
            "worker --router tcp://127.0.0.1:9 --env echo --model-dir model",
            "worker.max_rollouts = 64 needs 320",
        ),
        ("router", "a router needs 128"),
        (
            "gateway --engine http://127.0.0.1:9 --model-dir model --admin-token-file token",
            "a gateway needs 128",
        ),
    ],
)
def test_a_shell_that_allows_few_open_files_is_a_one_line_error(
    tmp_path: Path, mesh_toml: Path, command: str, need: str
) -> None:
    assert mesh_toml.parent == tmp_path
    argv = ["sh", "-c", f'ulimit -n 64; exec "{sys.executable}" -m rollmesh.cli.main {command}']
    ended = subprocess.run(
        argv, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr == (
        f"rollmesh: {need} open files and this shell allows 64; raise the limit: ulimit -n 65536\n"
    )


def test_a_folder_without_a_settings_file_is_a_one_line_error(tmp_path: Path) -> None:
    code, err = rollmesh("up", cwd=tmp_path)
    assert code == 2
    assert err == "rollmesh: mesh.toml: No such file or directory; `rollmesh init` writes one\n"


def test_a_missing_settings_file_is_a_one_line_error(tmp_path: Path) -> None:
    code, err = rollmesh("up", "none.toml", cwd=tmp_path)
    assert code == 2
    assert err == "rollmesh: none.toml: No such file or directory; `rollmesh init` writes one\n"


def test_a_port_in_use_is_a_one_line_error(tmp_path: Path, mesh_toml: Path) -> None:
    with listen("127.0.0.1:0") as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        code, err = rollmesh("up", str(mesh_toml), "--set", f"dashboard.bind={bind}", cwd=tmp_path)
    assert code == 2
    assert err.startswith(f"rollmesh: dashboard.bind = {bind}: cannot listen there: address")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("no_such_package:Env", "no_such_package"),
        ("nonsense", "nonsense"),
        ("pathlib:Path", "pathlib:Path"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_a_one_line_error(
    tmp_path: Path, router: RouterProcess, env: str, message: str
) -> None:
    # The worker reports it to the router too, so the router must run; otherwise it would wait.
    args = ["worker", "--router", router.ready.address, "--model-dir", "."]
    code, err = rollmesh(*args, "--set", f"env={env}", cwd=tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert message in err


def test_an_engine_with_an_invalid_model_folder_is_a_one_line_error(tmp_path: Path) -> None:
    code, err = rollmesh("engine", "--model-dir", str(tmp_path), cwd=tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"rollmesh: {tmp_path}")


@pytest.mark.parametrize("verb", [("dashboard",), ("status",), ("trace", "bias")])
def test_a_missing_run_folder_is_a_one_line_error(verb: tuple[str, ...], tmp_path: Path) -> None:
    code, err = rollmesh(*verb, "runs/none", cwd=tmp_path)
    assert (code, err) == (2, "rollmesh: runs/none: not a run folder; runs are in runs/NAME\n")


def test_a_dashboard_without_login_on_all_addresses_is_refused(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "demo").folder
    code, err = rollmesh("dashboard", str(run), "--host", "0.0.0.0", cwd=tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "loopback only" in err
