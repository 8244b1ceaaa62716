"""Ranks that the trainer did not start, on this host; tests/hosts/test_ranks.py has two."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.core.process import FAILED, OK, USAGE
from rollmesh.envs.guess import GuessEnv
from rollmesh.testing.network import VirtualHost
from rollmesh.trainer.models.tiny import TinyShape, texts_of, write_tiny_model
from rollmesh.trainer.policy import Policy
from tests.flow.test_ranked import ALIKE, SETTINGS, STEPS, batch
from tests.flow.trained_mesh import TrainedMesh, wait_for

pytestmark = pytest.mark.slow

ENDS_S = 120.0
TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
]
OWN = [
    *("unshare", "--mount", "--uts", "sh", "-c"),
    'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && exec "$@"',
]
"""Runs a command with a host name and shared memory of its own, in namespaces of both."""
Finished = subprocess.CompletedProcess[str]
SILENCE_S = 6.0
NUM_STEPS = 5


class Job:
    """The settings of a run, and its processes on one or two hosts."""

    def __init__(self, folder: Path, model: Path, **trainer: Any) -> None:
        self.folder = folder
        self._model = model
        self._stack = ExitStack()
        self.environment = {"OMP_NUM_THREADS": "1"}
        self.settings = self.write_settings("mesh.json", **trainer)

    def write_settings(self, name: str, **trainer: Any) -> Path:
        """Write a settings file of the run."""
        trained = {"rank_silence_s": SILENCE_S, "num_local_ranks": 1} | trainer
        settings = msgspec.structs.replace(SETTINGS, device="cpu", **trained)
        tree = {
            "run": {"name": "run", "folder": str(self.folder)},
            "model": {"path": str(self._model)},
            "trainer": msgspec.to_builtins(settings),
        }
        path = self.folder / name
        path.write_bytes(msgspec.json.encode(tree))
        return path

    def train(
        self,
        host: VirtualHost | None = None,
        *,
        steps: tuple[int, int] = (0, NUM_STEPS - 1),
        restored: Path | None = None,
        written: Path | None = None,
        settings: Path | None = None,
    ) -> "subprocess.Popen[str]":
        """Start the trainer."""
        bind = f"tcp://{host.address if host else '127.0.0.1'}:0"
        files = [str(each or "") for each in (restored, written)]
        argv = [sys.executable, "-m", "tests.flow.scripted_trainer", str(settings or self.settings)]
        return self._start(host, [*argv, bind, *map(str, steps), *files])

    def join(
        self, rank: int, address: str, host: VirtualHost | None = None, settings: Path | None = None
    ) -> "subprocess.Popen[str]":
        """Start a rank."""
        argv = [
            sys.executable,
            "-m",
            "rollmesh",
            "rank",
            "--config",
            str(settings or self.settings),
        ]
        return self._start(host, [*argv, "--rank", str(rank), "--controller", address])

    def _start(self, host: VirtualHost | None, argv: list[str]) -> "subprocess.Popen[str]":
        whole = (
            [*host.prefix, "unshare", "--mount", "--uts", *OWN, host.name, *argv] if host else argv
        )
        started = subprocess.Popen(
            whole,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | self.environment,
        )
        self._stack.enter_context(started)
        self._stack.callback(started.kill)
        return started

    def events(self, name: str) -> list[dict[str, Any]]:
        """Events in the log of a process."""
        lines = (self.folder / "run" / "logs" / f"{name}.log").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self._stack.close()


def line_of(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """The next line of a trainer."""
    assert process.stdout
    line = process.stdout.readline()
    assert line, process.stderr and process.stderr.read()
    fields: dict[str, Any] = json.loads(line)
    return fields


def rest_of(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    """The lines of a trainer until its end."""
    output, errors = process.communicate(timeout=ENDS_S)
    assert process.returncode == 0, errors
    return [json.loads(line) for line in output.splitlines()]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elsewhere") / "model"
    write_tiny_model(folder, texts_of(GuessEnv()), TinyShape(), seed=0)
    return folder


@pytest.fixture(scope="module")
def alone(model_folder: Path) -> list[dict[str, float]]:
    """Loss and gradient norm of each step of one rank."""
    policy = Policy(str(model_folder), SETTINGS)
    reports = [policy.step(batch(at), at, step_of_version=STEPS) for at in range(NUM_STEPS)]
    return [{"loss": each.loss, "grad_norm": each.grad_norm} for each in reports]


def check_alike(steps: list[dict[str, Any]], alone: list[dict[str, float]]) -> None:
    """Check that these steps had the losses of one undisturbed rank."""
    for each in steps:
        expected = alone[each["step"]]
        assert {name: each[name] for name in expected} == pytest.approx(expected, abs=ALIKE)


def test_a_rank_started_by_hand_joins_and_one_with_other_settings_is_refused(
    tmp_path: Path, model_folder: Path, alone: list[dict[str, float]]
) -> None:
    job = Job(tmp_path, model_folder, num_ranks=2)
    try:
        trainer = job.train()
        address = line_of(trainer)["address"]
        other = job.write_settings("other.json", num_ranks=2, learning_rate=1.0)
        refused = job.join(1, address, settings=other)
        _, errors = refused.communicate(timeout=ENDS_S)
        assert refused.returncode == FAILED
        assert "rollmesh: rank 1 ends: its model.path or [trainer] differs" in errors
        rank = job.join(1, address)
        *steps, end = rest_of(trainer)
        assert end == {"gone": ""}
        assert [each["step"] for each in steps] == [*range(NUM_STEPS)]
        check_alike(steps, alone)
        assert rank.wait(ENDS_S) == OK
    finally:
        job.close()


def test_a_killed_rank_of_elsewhere_is_named_with_its_host(
    tmp_path: Path, model_folder: Path
) -> None:
    job = Job(tmp_path, model_folder, num_ranks=2)
    try:
        trainer = job.train(steps=(0, 10**6))
        rank = job.join(1, line_of(trainer)["address"])
        assert line_of(trainer)["step"] == 0
        rank.send_signal(signal.SIGKILL)
        end = rest_of(trainer)[-1]
        assert end["gone"].startswith("rank 1 on ")
        assert " is gone: " in end["gone"]
    finally:
        job.close()


def torchrun_training(mesh: TrainedMesh, num_ranks: int, *options: str) -> Finished:
    """Run `torchrun -m rollmesh train` to its end."""
    router = wait_for(mesh.run, "router").address
    argv = [*TORCHRUN, "--nproc-per-node", str(num_ranks), "-m", "rollmesh", "train"]
    argv += ["--config", str(mesh.run.parent / "mesh.json"), "--router", router]
    argv += ["--set", "run.name=trained", *options]  # launch has the mesh's own folder
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(argv, capture_output=True, text=True, timeout=ENDS_S, env=environment)


def test_torchrun_trains_with_the_processes_that_it_started(
    tmp_path: Path, model_folder: Path
) -> None:
    mesh = TrainedMesh(tmp_path, model_folder, num_steps=2, device="cpu")
    try:
        done = torchrun_training(mesh, 2)
        assert done.returncode == OK, done.stderr
        run = tmp_path / "trained"
        lines = (run / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        assert steps == [0, 1]
        logs = {path.name for path in (run / "logs").glob("rank-*.log")}
        assert logs == {"rank-0.log", "rank-1.log"}
    finally:
        mesh.close()


def test_a_number_of_ranks_that_torchrun_did_not_start_is_one_line(
    tmp_path: Path, model_folder: Path
) -> None:
    settings = tmp_path / "mesh.json"
    settings.write_bytes(msgspec.json.encode({"trainer": {"num_ranks": 3}}))
    argv = [*TORCHRUN, "--nproc-per-node", "2", "-m", "rollmesh", "train"]
    argv += ["--config", str(settings), "--router", "tcp://127.0.0.1:1"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=ENDS_S)
    line = "rollmesh: trainer.num_ranks = 3, and torchrun started 2 processes; leave it out"
    assert line in done.stderr
    assert done.returncode != OK


def test_a_rank_number_outside_of_the_settings_is_one_line(
    tmp_path: Path, model_folder: Path
) -> None:
    job = Job(tmp_path, model_folder, num_ranks=2)
    try:
        rank = job.join(2, "tcp://127.0.0.1:1")
        _, errors = rank.communicate(timeout=ENDS_S)
        assert rank.returncode == USAGE
        assert "rollmesh: rank 2: trainer.num_ranks = 2 has ranks 1 to 1" in errors
    finally:
        job.close()
