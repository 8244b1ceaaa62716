"""Workers that leave, die, wear out or are killed by their tasks, under a real supervisor."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import httpx
import msgspec
import pytest

from rollmesh.core.config import JournalConfig
from rollmesh.core.process import INTERRUPTED, RECYCLED
from rollmesh.core.types import SamplingPolicy, Task
from rollmesh.serve.client.client import Dropped, Finished, RolloutClient
from rollmesh.testing.engine import ScriptedEngine
from tests.flow.launched_mesh import LaunchedMesh
from tests.flow.worker_mesh import TURNS, byte_token

WITHIN_S = 60.0
SLOW_TO_MISS = {"beat_s": 0.2, "missed_beats": 10_000}
"""So high that heartbeats never reveal the loss of a worker."""
ENV = """
import os, signal
from rollmesh.envs.echo import EchoEnv

class Poisoned(EchoEnv):
    async def run(self, task, agent):
        if task.id == "poison":
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().run(task, agent)
"""


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with ScriptedEngine(byte_token) as engine:
        yield engine


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> dict[str, int]:
    """Settings of the section `worker`, except for the number of workers."""
    return getattr(request, "param", {})


@pytest.fixture
async def mesh(
    tmp_path: Path, engine: ScriptedEngine, settings: dict[str, int]
) -> AsyncIterator[LaunchedMesh]:
    (tmp_path / "poisoned.py").write_text(ENV)
    sections = {"router": SLOW_TO_MISS, "worker": {"num_workers": 2, **settings}}
    env = "poisoned:Poisoned"
    mesh = LaunchedMesh(tmp_path, engine.url, env=env, env_settings=TURNS, **sections)
    try:
        await asyncio.to_thread(mesh.until_ready, "worker-0", "worker-1")
        yield mesh
        await engine.release()
    finally:
        mesh.close()


@pytest.fixture
async def client(mesh: LaunchedMesh) -> AsyncIterator[RolloutClient]:
    client = RolloutClient(mesh.router().address, JournalConfig(), mesh.folder / "client")
    client.start()
    yield client
    client.close()


def ask(client: RolloutClient, task_id: str = "echo") -> None:
    task = Task(id=task_id, data={"text_seed": 1})
    env = "poisoned:Poisoned"
    client.ask(task, env=env, num_samples=2, sampling=SamplingPolicy(), seed=7)


def find_busy(url: str) -> str:
    """The worker that runs a group, once the router reports one."""
    while True:
        workers = httpx.get(f"{url}/status").json()["workers"]
        for row in workers:
            if row["in_flight"]:
                return str(row["worker_id"])


def drain(*args: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "rollmesh.cli.main", "drain", *args]
    return subprocess.run(argv, capture_output=True, text=True, timeout=WITHIN_S, check=False)


async def test_a_drained_worker_finishes_its_groups_and_is_not_restarted(
    mesh: LaunchedMesh, engine: ScriptedEngine, client: RolloutClient
) -> None:
    engine.hold()
    ask(client)
    await engine.until(lambda: engine.num_seen("/generate") == 2)
    busy = await asyncio.to_thread(find_busy, mesh.router().http_address)
    drained = await asyncio.to_thread(drain, busy, str(mesh.run))
    assert (drained.returncode, drained.stderr) == (0, "")
    assert drained.stdout.startswith(f"{busy} takes no new rollouts")
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
    assert end["notes"] == [f"{busy} was drained and is not restarted"]


async def test_a_killed_worker_is_noticed_at_once_and_its_group_runs_on_another(
    mesh: LaunchedMesh, engine: ScriptedEngine, client: RolloutClient
) -> None:
    engine.hold()
    ask(client)
    await engine.until(lambda: engine.num_seen("/generate") == 2)
    busy = await asyncio.to_thread(find_busy, mesh.router().http_address)
    os.kill(mesh.pids()[busy], signal.SIGKILL)
    await engine.until(lambda: engine.num_seen("/generate") == 4)
    await engine.release()
    [finished] = await asyncio.to_thread(client.take, WITHIN_S)
    assert isinstance(finished, Finished)
    assert (finished.worker_id != busy, finished.attempt) == (True, 2)


async def test_a_worker_that_gets_a_signal_which_launch_did_not_send_is_restarted(
    mesh: LaunchedMesh, client: RolloutClient
) -> None:
    before = mesh.pids()
    for role, number in (("worker-0", signal.SIGTERM), ("worker-1", signal.SIGINT)):
        os.kill(before[role], number)
        await asyncio.to_thread(mesh.until, "child.exited", role, code=INTERRUPTED)
        await asyncio.to_thread(mesh.until_ready, role)
    ask(client)
    [finished] = await asyncio.to_thread(client.take, WITHIN_S)
    assert isinstance(finished, Finished)
    end = await asyncio.to_thread(mesh.end)
    assert end["end"] == {"code": INTERRUPTED, "reason": "stopped"}


@pytest.mark.parametrize("settings", [{"recycle_rollouts": 2}], indirect=True)
async def test_a_worn_out_worker_has_a_successor(mesh: LaunchedMesh, client: RolloutClient) -> None:
    ask(client)
    [finished] = await asyncio.to_thread(client.take, WITHIN_S)
    assert isinstance(finished, Finished)
    worn = finished.worker_id
    before = mesh.pids()[worn]
    await asyncio.to_thread(mesh.until, "child.exited", worn, code=RECYCLED)
    await asyncio.to_thread(mesh.until_ready, worn)
    assert mesh.pids()[worn] != before
    end = await asyncio.to_thread(mesh.end)
    assert "2 rollouts, worker.recycle_rollouts = 2" in end["notes"][0]


async def test_a_task_that_kills_two_workers_is_quarantined_with_their_causes(
    mesh: LaunchedMesh, client: RolloutClient
) -> None:
    ask(client, "poison")
    [dropped] = await asyncio.to_thread(client.take, WITHIN_S)
    assert isinstance(dropped, Dropped)
    assert dropped.reason.startswith("quarantined: 2 workers ended under it (worker-")
    assert dropped.reason.count(": killed by signal 9") == 2
    ask(client)
    [finished] = await asyncio.to_thread(client.take, WITHIN_S)
    assert isinstance(finished, Finished)


CRASHES = """
import os, resource, signal
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.slow
async def test_a_crash_in_every_load_ends_the_run_with_its_cause(
    tmp_path: Path, engine: ScriptedEngine
) -> None:
    (tmp_path / "poisoned.py").write_text(CRASHES)
    sections = {"worker": {"num_workers": 1}, "launch": {"max_restarts": 3}}
    mesh = LaunchedMesh(tmp_path, engine.url, env="poisoned:Poisoned", **sections)
    try:
        await asyncio.to_thread(mesh.until_ready, "router")
        with closing(RolloutClient(mesh.router().address, JournalConfig(), tmp_path)) as client:
            client.start()
            ask(client)
            [dropped] = await asyncio.to_thread(client.take, WITHIN_S)
        env, cause = "poisoned:Poisoned", "killed by signal 11"
        assert isinstance(dropped, Dropped)
        assert dropped.reason == f"env_failed: worker-0 ended before it served {env}: {cause}"
        out, _ = await asyncio.to_thread(mesh.process.communicate, None, WITHIN_S)
        how = "worker-0 was killed by signal 11 while loading env = poisoned:Poisoned"
        end = msgspec.json.decode(out)["end"]
        assert end["reason"].startswith(f"{how}, death 4 within 60 s; see ")
        assert (end["code"], Path(end["reason"].split()[-1]).name) == (1, "worker-0.out")
    finally:
        mesh.close()
