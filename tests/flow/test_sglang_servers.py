"""A run that starts SGLang servers, with a stand-in for SGLang's launcher: the embedded engine.

Servers are processes with children of their own; tests wait for lines of logs.
"""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from rollmesh.envs.guess import GuessEnv
from rollmesh.launch.folder import read_pids
from rollmesh.testing.sglang_server import write_sglang_python
from rollmesh.trainer.models.tiny import TinyShape, texts_of, write_tiny_model
from tests.flow.demo import Running, follow, read, start_with

WAIT_S = 100.0
KEY = "key-of-the-engines-0123456789"
Row = dict[str, Any]


@pytest.fixture
def python(tmp_path: Path) -> Path:
    return write_sglang_python(tmp_path)


def write_model(folder: Path) -> Path:
    """Write a tiny model that has weights."""
    write_tiny_model(folder / "model", texts_of(GuessEnv()), TinyShape(), seed=0)
    return folder / "model"


def servers_of(python: Path, num: int, *args: str) -> dict[str, object]:
    """Settings of a run that starts `num` servers."""
    return {
        "engine.launch": "sglang",
        "engine.num_servers": num,
        "engine.gpus_each": 0,
        "engine.python": python,
        "engine.args": json.dumps(args),
    }


def until(log: Iterator[Row], fits: Callable[[Row], bool]) -> Row:
    """The next line that fits."""
    return next(row for row in log if fits(row))


def is_ready(row: Row) -> bool:
    """Whether a line of launch's log reports that engine-0 is ready."""
    return bool(row["event"] == "child.ready" and row["child"] == "engine-0")


def server_of(wrapper: int) -> psutil.Process:
    """The server that a process of ours watches."""
    [server] = psutil.Process(wrapper).children()
    assert "sglang.launch_server" in server.cmdline()
    return server


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_run_starts_servers_and_restarts_a_killed_one_with_the_newest_weights(
    python: Path, tmp_path: Path
) -> None:
    model = write_model(tmp_path)
    settings = {"trainer.num_steps": 100_000, **servers_of(python, 2)}
    run = tmp_path / "runs" / "demo"
    with start_with(model, tmp_path, **settings) as process:
        launched = follow(run / "logs" / "launch.log", process.pid)
        until(launched, is_ready)
        trained = follow(run / "metrics.jsonl", process.pid)
        until(trained, lambda row: row["step"] >= 1 and row.get("policy_version", 0) >= 1)
        first = server_of({row.role: row.pid for row in read_pids(run)}["engine-0"])
        begun = [first, *first.children(recursive=True)]
        first.send_signal(signal.SIGKILL)
        died = until(launched, lambda row: row["event"] == "child.exited")
        assert (died["child"], died["code"]) == ("engine-0", 1)
        assert died["line"] == "rollmesh: engine-0: SGLang ended: killed by signal 9"
        until(launched, is_ready)
        step = until(trained, lambda row: True)["step"]
        until(trained, lambda row: row["step"] > step + 2)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S)
    starts = [row["argv"] for row in log_of(run, "engine-0") if row["event"] == "engine.starting"]
    assert len(starts) == 2
    assert [argv[argv.index("--port") + 1] for argv in starts] == [port_of(starts[0])] * 2
    assert int(starts[1][starts[1].index("--weight-version") + 1]) >= 1
    assert Path(starts[1][starts[1].index("--model-path") + 1]).parts[-2:] == (
        "loading",
        "engine-0",
    )
    assert not list((run / "loading").iterdir())
    assert read(run / "summary.json")["num_lost"] == 0
    assert not any(each.is_running() for each in begun)
    assert [row.pid for row in read_pids(run) if psutil.pid_exists(row.pid)] == []


def log_of(run: Path, role: str) -> list[Row]:
    lines = (run / "logs" / f"{role}.log").read_bytes().splitlines()
    return [msgspec.json.decode(line) for line in lines]


def port_of(argv: list[str]) -> str:
    return argv[argv.index("--port") + 1]


@pytest.mark.slow
def test_a_server_that_does_not_load_ends_the_run_with_its_reason(
    python: Path, tmp_path: Path
) -> None:
    model = write_model(tmp_path)
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    settings = servers_of(python, 1, "--fail", text)
    with start_with(model, tmp_path, **settings) as process:
        out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2, out
    last = out.strip().splitlines()[-1]
    assert "engine-0: SGLang ended while allocating KV cache: exit code 1: torch.OutOf" in last
    assert "lower --mem-fraction-static in engine.args" in last
    assert f"see {Path('runs/demo/logs/engine-0.out')}" in last


def test_a_python_without_sglang_is_refused_before_anything_starts(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    with start_with(model, tmp_path, **servers_of(Path(sys.executable), 1)) as process:
        out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2, out
    assert "it has no package sglang; name the Python of an environment that has it" in out
    assert not (tmp_path / "runs").exists()


class Server:
    """`rollmesh engine sglang`, started by hand."""

    def __init__(self, python: Path, folder: Path, *more: str) -> None:
        model = write_model(folder)
        reading, writing = os.pipe()
        argv = [sys.executable, "-m", "rollmesh.cli.main", "engine", "sglang"]
        argv += ["--model-dir", str(model), "--ready-fd", str(writing), *more]
        for key, value in servers_of(python, 1).items():
            argv += ["--set", f"{key}={value}"]
        self.process = Running(
            argv,
            cwd=folder,
            env={**os.environ, "ROLLMESH_ENGINE_KEY": KEY},
            pass_fds=[writing],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        os.close(writing)
        with os.fdopen(reading) as report:
            self.address: str = json.loads(report.readline())["address"]

    def model_info(self, key: str) -> Row:
        headers = {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{self.address}/model_info", headers=headers)
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            found: Row = json.load(reply)
            return found


@pytest.mark.slow
def test_the_key_of_the_engines_is_in_no_command_line_and_no_output(
    python: Path, tmp_path: Path
) -> None:
    server = Server(python, tmp_path)
    with server.process as process:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            server.model_info("another")
        assert server.model_info(KEY)["weight_version"] == "0"
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in tree:
            assert KEY not in " ".join(each.cmdline())
        process.terminate()
        out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert KEY not in out
    _, alive = psutil.wait_procs(tree, timeout=WAIT_S)
    assert alive == []


@pytest.mark.slow
def test_nothing_is_left_of_a_server_whose_watcher_is_killed(python: Path, tmp_path: Path) -> None:
    server = Server(python, tmp_path)
    with server.process as process:
        tree = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        _, alive = psutil.wait_procs(tree, timeout=WAIT_S)
    assert alive == []


@pytest.mark.slow
def test_a_server_on_a_shared_fleet_starts_asleep(python: Path, tmp_path: Path) -> None:
    server = Server(python, tmp_path, "--asleep")
    with server.process as process:
        assert server.model_info(KEY)["weight_version"] == "released-0"
        process.terminate()
        process.communicate(timeout=WAIT_S)
