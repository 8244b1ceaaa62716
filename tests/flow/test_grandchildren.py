"""Processes that an agent's program started end with its worker and with launch, wherever they
moved.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from rollmesh.core.config import JournalConfig
from rollmesh.serve.client.client import RolloutClient
from rollmesh.testing.engine import ScriptedEngine
from tests.flow.launched_mesh import LaunchedMesh
from tests.flow.worker_mesh import ENV_HEAD, ask, byte_token, look_until, open_mesh

ENDS_WITHIN_S = 60.0
DAEMON = """
import os, signal, sys
os.fork() and os._exit(0)
os.setsid()
os.fork() and os._exit(0)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
signal.pause()
"""
AGENT = f"""
import os, signal, subprocess, sys
subprocess.run([sys.executable, "-c", {DAEMON!r}, sys.argv[1]])
with open(sys.argv[1], "a") as file:
    file.write(f"{{os.getpid()}}\\n")
signal.pause()
"""
ENV = "agents:TheEnv"
SOURCE = f"""
from rollmesh.envs.harness import HarnessEnv

class TheEnv(HarnessEnv):
    def __init__(self):
        super().__init__(argv=[sys.executable, "-c", {AGENT!r}, str(Path("pids").absolute())])

    def tasks(self, split, seed):
        yield Task(id="t")

    def score(self, task, transcript):
        return Score(reward=1.0)
"""
ALONE = {"num_workers": 1, "isolation": "none"}
"""Without a pid namespace, so that programs see the host's pids."""
NUM_PROCESSES = 4
"""Two rollouts, each with its program and a daemon."""


async def begun(folder: Path) -> list[psutil.Process]:
    """All processes of the agents, once they have started."""
    pids = folder / "pids"

    def are_there() -> bool:
        return pids.exists() and len(pids.read_text().split()) == NUM_PROCESSES

    await asyncio.to_thread(look_until, are_there)
    return [psutil.Process(int(pid)) for pid in pids.read_text().split()]


async def are_gone(processes: list[psutil.Process]) -> None:
    gone, left = await asyncio.to_thread(psutil.wait_procs, processes, ENDS_WITHIN_S)
    assert (len(gone), left) == (NUM_PROCESSES, [])


async def test_agents_daemons_end_with_a_worker_that_was_started_by_hand(tmp_path: Path) -> None:
    async with open_mesh(tmp_path) as mesh:
        mesh.write_env("agents", SOURCE)
        worker = await asyncio.to_thread(mesh.worker, "worker-0", ENV, isolation="none")
        ask(mesh.client(), env=ENV)
        processes = await begun(tmp_path)
        worker.kill()
        await are_gone(processes)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[LaunchedMesh]:
    (tmp_path / "agents.py").write_text(ENV_HEAD + SOURCE)
    async with ScriptedEngine(byte_token) as engine:
        mesh = LaunchedMesh(tmp_path, engine.url, env=ENV, worker=ALONE)
        try:
            await asyncio.to_thread(mesh.until_ready, "worker-0")
            yield mesh
        finally:
            mesh.close()


@pytest.mark.parametrize("role", ["worker-0", "launch"])
async def test_agents_daemons_end_when_a_process_above_them_is_killed(
    mesh: LaunchedMesh, role: str
) -> None:
    client = RolloutClient(mesh.router().address, JournalConfig(), mesh.folder / "client")
    client.start()
    ask(client, env=ENV)
    processes = await begun(mesh.folder)
    os.kill(mesh.pids()[role], signal.SIGKILL)
    await are_gone(processes)
    client.close()
