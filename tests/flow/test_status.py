"""`rollmesh status` and `rollmesh drain` on a mesh that launch runs, while it does and after."""

import asyncio
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from rollmesh.core.config import JournalConfig
from rollmesh.core.types import SamplingPolicy, Task
from rollmesh.serve.client.client import Finished, RolloutClient
from rollmesh.testing.engine import ScriptedEngine
from tests.flow.launched_mesh import LaunchedMesh
from tests.flow.worker_mesh import TURNS, byte_token

ROLLMESH = [sys.executable, "-m", "rollmesh.cli.main"]
WITHIN_S = 30.0
NOTICED_WITHIN_S = 2.0
SLOW_TO_MISS = {"beat_s": 0.2, "missed_beats": 100}
"""Beats alone would take 20 s to tell that a worker is gone."""


def rollmesh(*words: str) -> "subprocess.CompletedProcess[str]":
    argv = [*ROLLMESH, *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=WITHIN_S, check=False)


def told(*words: str) -> dict[str, Any]:
    done = rollmesh("status", "--json", *words)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = msgspec.json.decode(done.stdout)
    return told


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(byte_token) as engine:
        yield engine


@pytest.fixture
async def mesh(tmp_path: Path, engine: ScriptedEngine) -> AsyncIterator[LaunchedMesh]:
    sections = {"router": SLOW_TO_MISS, "worker": {"num_workers": 2}}
    mesh = LaunchedMesh(tmp_path, engine.url, env="echo", env_settings=TURNS, **sections)
    yield mesh
    await engine.release()
    mesh.close()


@pytest.fixture
async def client(mesh: LaunchedMesh) -> AsyncIterator[RolloutClient]:
    await serving(mesh)
    client = RolloutClient(mesh.router().address, JournalConfig(), mesh.folder / "client")
    client.start()
    yield client
    client.close()


async def serving(mesh: LaunchedMesh) -> None:
    """Both workers have reported."""
    await asyncio.to_thread(mesh.until_ready, "worker-0", "worker-1")


def ask(client: RolloutClient) -> None:
    task = Task(id="echo-1", data={"text_seed": 1})
    client.ask(task, env="echo", num_samples=2, sampling=SamplingPolicy(), seed=7)


def find_busy(url: str) -> str:
    """The worker that runs something, once the router tells so."""
    while True:
        workers = httpx.get(f"{url}/status").json()["workers"]
        for row in workers:
            if row["in_flight"]:
                return str(row["worker_id"])


async def test_a_mesh_is_told_by_its_folder_and_by_its_router(mesh: LaunchedMesh) -> None:
    await serving(mesh)
    argv = [*ROLLMESH, "status", str(mesh.run), "--watch", "--json"]
    watch = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
    assert watch.stdout
    async for line in watch.stdout:
        standing = msgspec.json.decode(line)
        workers = (standing["router"] or {"workers": []})["workers"]
        if {row["worker_id"]: row["state"] for row in workers} == {
            "worker-0": "live",
            "worker-1": "live",
        }:
            break
    watch.send_signal(signal.SIGINT)
    await watch.communicate()
    assert watch.returncode == 0
    assert standing["run"]["phase"] == "running"
    assert {row["role"]: row["pid"] for row in standing["processes"]} == mesh.pids()
    asked = await asyncio.to_thread(told, "--router", mesh.router().http_address)
    assert asked["run"] is None
    assert [row["env"] for row in asked["router"]["workers"]] == ["echo", "echo"]


async def test_a_watch_paints_over_what_it_painted_until_ctrl_c(mesh: LaunchedMesh) -> None:
    await serving(mesh)
    ours, its = pty.openpty()
    url = mesh.router().http_address
    argv = [*ROLLMESH, "status", "--router", url, "--watch"]
    environment = {**os.environ, "TERM": "xterm"}
    watch = await asyncio.create_subprocess_exec(*argv, stdout=its, env=environment)
    os.close(its)
    painted = b""
    while painted.count(b"worker-1") < 3:
        painted += await asyncio.to_thread(os.read, ours, 65536)
    watch.send_signal(signal.SIGINT)
    assert await watch.wait() == 0
    os.close(ours)
    assert b"\x1b[1A\x1b[2K" in painted  # a line up, and clear it


async def test_a_mesh_whose_launch_is_killed_is_not_told_as_alive(mesh: LaunchedMesh) -> None:
    await serving(mesh)
    assert await asyncio.to_thread(first_running, mesh.run)
    processes = [psutil.Process(pid) for pid in mesh.pids().values()]
    mesh.process.kill()
    await asyncio.to_thread(psutil.wait_procs, processes, WITHIN_S)
    standing = await asyncio.to_thread(told, str(mesh.run))
    assert (standing["run"]["phase"], standing["processes"]) == ("silent", [])


def first_running(run: Path) -> bool:
    """Once telemetry has a line."""
    argv = [*ROLLMESH, "status", str(run), "--watch", "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as watch:
        assert watch.stdout
        found = any(msgspec.json.decode(line)["processes"] for line in watch.stdout)
        watch.terminate()
    return found


async def test_a_drained_worker_finishes_what_it_runs_and_is_not_started_again(
    mesh: LaunchedMesh, engine: ScriptedEngine, client: RolloutClient
) -> None:
    engine.hold()
    ask(client)
    await engine.until(lambda: engine.num_seen("/generate") == 2)
    busy = await asyncio.to_thread(find_busy, mesh.router().http_address)
    drained = await asyncio.to_thread(rollmesh, "drain", busy, str(mesh.run))
    assert (drained.returncode, drained.stderr) == (0, "")
    assert drained.stdout.startswith(f"{busy} takes nothing new")
    await engine.release()
    [finished] = await asyncio.to_thread(client.take, WITHIN_S)
    assert isinstance(finished, Finished)
    assert (finished.worker_id, finished.attempt) == (busy, 1)
    await asyncio.to_thread(mesh.until, "child.exited", busy, code=0)
    ask(client)
    [finished] = await asyncio.to_thread(client.take, WITHIN_S)
    assert isinstance(finished, Finished)
    assert finished.worker_id != busy
    end = await asyncio.to_thread(mesh.end)
    assert end["notes"] == [f"{busy} has left and is not started again"]


async def test_what_cannot_be_drained_is_told_in_one_line(mesh: LaunchedMesh) -> None:
    await serving(mesh)
    unknown = await asyncio.to_thread(rollmesh, "drain", "worker-7", str(mesh.run))
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1)
    assert "worker-7" in unknown.stderr
    words = ["drain", "worker-0", "--router", "tcp://127.0.0.1:9"]
    nobody = await asyncio.to_thread(rollmesh, *words)
    assert nobody.returncode == 2
    assert nobody.stderr == "rollmesh: tcp://127.0.0.1:9: no router answers there within 3 s\n"


async def test_a_killed_worker_is_noticed_at_once_and_its_group_runs_elsewhere(
    mesh: LaunchedMesh, engine: ScriptedEngine, client: RolloutClient
) -> None:
    engine.hold()
    ask(client)
    await engine.until(lambda: engine.num_seen("/generate") == 2)
    busy = await asyncio.to_thread(find_busy, mesh.router().http_address)
    killed_s = time.monotonic()
    os.kill(mesh.pids()[busy], signal.SIGKILL)
    await engine.until(lambda: engine.num_seen("/generate") == 4)
    assert time.monotonic() - killed_s < NOTICED_WITHIN_S
    await engine.release()
    [finished] = await asyncio.to_thread(client.take, WITHIN_S)
    assert isinstance(finished, Finished)
    assert (finished.worker_id != busy, finished.attempt) == (True, 2)
