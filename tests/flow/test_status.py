"""`rollmesh status` of a mesh that launch runs, during and after the run, and drains that fail."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tests.flow.launched_mesh import LaunchedMesh

ROLLMESH = [sys.executable, "-m", "rollmesh.cli.main"]
WITHIN_S = 60.0
BOTH_LIVE = {"worker-0": "live", "worker-1": "live"}


def rollmesh(*args: str) -> "subprocess.CompletedProcess[str]":
    argv = [*ROLLMESH, *args]
    return subprocess.run(argv, capture_output=True, text=True, timeout=WITHIN_S, check=False)


def status_of(*args: str) -> dict[str, Any]:
    done = rollmesh("status", "--json", *args)
    assert done.returncode == 0, done.stderr
    status: dict[str, Any] = msgspec.json.decode(done.stdout)
    return status


def start(folder: Path) -> LaunchedMesh:
    """A mesh without an engine, so that it runs nothing."""
    mesh = LaunchedMesh(folder, "http://127.0.0.1:9", env="echo", worker={"num_workers": 2})
    try:
        mesh.until_ready("worker-0", "worker-1")
    except BaseException:
        mesh.close()
        raise
    return mesh


@pytest.fixture(scope="module")
def idle_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedMesh]:
    """A mesh that tests only read."""
    mesh = start(tmp_path_factory.mktemp("idle"))
    yield mesh
    mesh.close()


def test_a_mesh_is_found_by_its_folder_and_by_its_router(idle_mesh: LaunchedMesh) -> None:
    argv = [*ROLLMESH, "status", str(idle_mesh.run), "--watch", "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as watch:
        assert watch.stdout
        for line in watch.stdout:
            standing = msgspec.json.decode(line)
            workers = (standing["router"] or {"workers": []})["workers"]
            if {row["worker_id"]: row["state"] for row in workers} == BOTH_LIVE:
                break
        watch.send_signal(signal.SIGINT)
    assert watch.returncode == 0
    assert standing["run"]["phase"] == "running"
    assert {row["role"]: row["pid"] for row in standing["processes"]} == idle_mesh.pids()
    by_router = status_of("--router", idle_mesh.router().http_address)
    assert by_router["run"] is None
    assert [row["env"] for row in by_router["router"]["workers"]] == ["echo", "echo"]


def test_status_takes_either_address_and_prints_both(idle_mesh: LaunchedMesh) -> None:
    ready = idle_mesh.router()
    printed = f"router: {ready.address}, status {ready.http_address}"
    by_folder = rollmesh("status", str(idle_mesh.run)).stdout
    by_router = [
        rollmesh("status", "--router", address).stdout
        for address in (ready.address, ready.http_address)
    ]
    for shown in (by_folder, *by_router):
        assert printed in shown.splitlines()


def test_drain_takes_either_address(idle_mesh: LaunchedMesh) -> None:
    for address in (idle_mesh.router().address, idle_mesh.router().http_address):
        unknown = rollmesh("drain", "worker-7", "--router", address)
        assert unknown.stderr.startswith("rollmesh: no worker 'worker-7'; there are: worker-")


@pytest.mark.parametrize("verb", [("status",), ("drain", "worker-0")])
def test_an_address_of_another_kind_is_a_one_line_error_with_both_forms(
    verb: tuple[str, ...],
) -> None:
    ended = rollmesh(*verb, "--router", "127.0.0.1:5555")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "tcp://HOST:PORT or http://HOST:PORT" in ended.stderr


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_watch_ends_when_its_reader_closes_the_pipe(
    idle_mesh: LaunchedMesh, form: tuple[str, ...]
) -> None:
    argv = [*ROLLMESH, "status", str(idle_mesh.run), "--watch", *form]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as watch:
        assert watch.stdout
        assert watch.stdout.readline()
        watch.stdout.close()
        assert watch.stderr
        assert watch.stderr.read() == b""
    assert watch.returncode == 0


def test_a_watch_repaints_its_lines_until_ctrl_c(idle_mesh: LaunchedMesh) -> None:
    ours, its = pty.openpty()
    argv = [*ROLLMESH, "status", "--router", idle_mesh.router().http_address, "--watch"]
    with subprocess.Popen(argv, stdout=its, env={**os.environ, "TERM": "xterm"}) as watch:
        os.close(its)
        painted = b""
        while painted.count(b"worker-1") < 3:
            painted += os.read(ours, 65536)
        watch.send_signal(signal.SIGINT)
        # A terminal must be read to the last picture: it holds 4 KB, and a writer waits for room.
        with contextlib.suppress(OSError):
            while os.read(ours, 65536):
                pass
    os.close(ours)
    assert watch.returncode == 0
    assert b"\x1b[1A\x1b[2K" in painted  # a line up, and clear it


def test_a_drain_that_fails_is_a_one_line_error(idle_mesh: LaunchedMesh) -> None:
    unknown = rollmesh("drain", "worker-7", str(idle_mesh.run))
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("rollmesh: no worker 'worker-7'; there are: worker-")
    assert unknown.stderr.count("\n") == 1
    no_router = rollmesh("drain", "worker-0", "--router", "tcp://127.0.0.1:9")
    assert no_router.returncode == 2
    assert no_router.stderr == (
        "rollmesh: tcp://127.0.0.1:9: no answer from a router within 3 s; "
        "check its address and our keys\n"
    )


def test_a_mesh_whose_launch_is_killed_is_not_shown_as_running(tmp_path: Path) -> None:
    mesh = start(tmp_path)
    assert has_telemetry(mesh.run)
    processes = [psutil.Process(pid) for pid in mesh.pids().values()]
    mesh.process.kill()
    psutil.wait_procs(processes, WITHIN_S)
    mesh.close()
    standing = status_of(str(mesh.run))
    assert (standing["run"]["phase"], standing["processes"]) == ("killed", [])


def has_telemetry(run: Path) -> bool:
    """Wait until telemetry has a line."""
    argv = [*ROLLMESH, "status", str(run), "--watch", "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as watch:
        assert watch.stdout
        found = any(msgspec.json.decode(line)["processes"] for line in watch.stdout)
        watch.terminate()
    return found
