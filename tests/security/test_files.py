"""A run can be read by the user who started it, or by that user's group if run.mode allows it."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh.core.config import Config, RunConfig
from rollmesh.envs.guess import GuessEnv
from rollmesh.launch.folder import RunFolder
from rollmesh.trainer.models.tiny import TinyShape, texts_of, write_tiny_model
from tests.flow.demo import SHORT, start_with

PATIENCE_S = 110


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, texts_of(GuessEnv()), TinyShape(), seed=0)
    return folder


def modes(folder: Path) -> dict[str, int]:
    """Permissions of `folder` and of everything in it."""
    found = {each: each.stat().st_mode & 0o777 for each in (folder, *folder.rglob("*"))}
    return {str(each.relative_to(folder)): mode for each, mode in found.items()}


def evaluated(folder: Path, model: Path, *args: str) -> dict[str, int]:
    argv = [sys.executable, "-m", "rollmesh.cli.main", "eval", "--env", "guess", "--out", "out"]
    argv += ["--model-dir", str(model), "-n", "1", "--num-tasks", "2", *args]
    done = subprocess.run(
        argv, cwd=folder, capture_output=True, text=True, umask=0o022, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return modes(folder / "out")


@pytest.mark.slow
def test_no_other_user_reads_the_files_of_a_run(tmp_path: Path, model: Path) -> None:
    settings = {**SHORT, "trainer.num_steps": 2, "trainer.eval_rollouts": 0}
    with start_with(model, tmp_path, **settings) as run:
        out, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, out
    found = modes(tmp_path / "runs" / "demo")
    assert {"config.json", "trajectories.jsonl", "telemetry.jsonl", "checkpoint"} <= found.keys()
    assert {"journal", "weights", "logs/trainer.log", "logs/worker-0.out"} <= found.keys()
    assert [name for name, mode in found.items() if mode & 0o077] == []


def test_no_other_user_reads_the_files_of_an_evaluation(tmp_path: Path, model: Path) -> None:
    found = evaluated(tmp_path, model)
    assert {"results.jsonl", "trajectories.jsonl", "config.json", "mesh"} <= found.keys()
    assert [name for name, mode in found.items() if mode & 0o077] == []


def test_run_mode_group_lets_only_the_group_read(tmp_path: Path, model: Path) -> None:
    found = evaluated(tmp_path, model, "--set", "run.mode=group")
    shown = {name: mode for name, mode in found.items() if mode & 0o077}
    assert {".", "results.jsonl", "mesh/config.json", "mesh/logs/worker-0.log"} <= shown.keys()
    assert set(shown.values()) == {0o750, 0o640}


@pytest.mark.slow
def test_a_resumed_evaluation_that_was_readable_becomes_private(
    tmp_path: Path, model: Path
) -> None:
    evaluated(tmp_path, model)
    (tmp_path / "out").chmod(0o755)
    assert evaluated(tmp_path, model, "--resume")["."] == 0o700


def test_a_client_s_journal_is_private_whatever_the_program_s_umask(tmp_path: Path) -> None:
    code = "from pathlib import Path; from rollmesh.core.journal import Journal;"
    code += "Journal(Path('journal'), 1000).append([b'x'])"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, umask=0o022, check=True)
    found = modes(tmp_path / "journal")
    assert len(found) == 3
    assert [name for name, mode in found.items() if mode & 0o077] == []


def test_a_resumed_run_that_was_readable_becomes_private(tmp_path: Path) -> None:
    config = Config(run=RunConfig(name="demo", folder=str(tmp_path)))
    first = RunFolder(config)
    first.path.chmod(0o755)
    del first
    assert modes(RunFolder(config, resume=True).path)["."] == 0o700
