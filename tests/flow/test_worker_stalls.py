"""Workers that stall, and others that continue: every reassigned group counts once."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmesh.serve.client.client import Finished
from tests.flow.chaos_client import GROUP_SIZE, check_journal
from tests.flow.worker_mesh import Mesh, ask, open_mesh, take

HERE = Path(__file__).parent


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with open_mesh(tmp_path, client_grace_s=600.0) as mesh:
        yield mesh


SLEEPER = """
class TheEnv(Plain):
    async def run(self, task, agent):
        await asyncio.sleep(0.2)
        return Transcript()
"""
NUM_SLOTS = 8
NUM_GROUPS = 160
NEVER_MISSED = 10_000
"""More missed heartbeats than a test lasts."""


async def test_workers_continue_beside_a_stopped_one_that_is_not_noticed(tmp_path: Path) -> None:
    async with open_mesh(tmp_path, missed_beats=NEVER_MISSED) as mesh:
        env = mesh.write_env("sleeper", SLEEPER)
        names = ("worker-0", "worker-1", "worker-2")
        workers = [
            await asyncio.to_thread(mesh.worker, name, env, max_rollouts=NUM_SLOTS)
            for name in names
        ]
        client = mesh.client()
        os.kill(workers[-1].popen.pid, signal.SIGSTOP)
        try:
            for _ in range(NUM_GROUPS):
                ask(client, 1, env)
            # Only its own groups wait for it.
            arrived = await take(client, NUM_GROUPS - NUM_SLOTS)
            assert mesh.worker_status("worker-2")["state"] == "live"
        finally:
            os.kill(workers[-1].popen.pid, signal.SIGCONT)
        num_left = NUM_GROUPS - len(arrived)
        assert len(await take(client, num_left)) == num_left


HOLDS_THE_LOCK = """
import ctypes

class TheEnv(Plain):
    async def run(self, task, agent):
        if not Path("held").exists():
            Path("held").touch()
            # As C code that holds the interpreter lock until another process opens the pipe.
            ctypes.PyDLL(None).open(b"gate", os.O_RDONLY)
        return Transcript()
"""


async def test_worker_with_a_blocked_interpreter_is_lost_and_rejoins(mesh: Mesh) -> None:
    env = mesh.write_env("locked", HOLDS_THE_LOCK)
    os.mkfifo(mesh.folder / "gate")
    await asyncio.to_thread(mesh.worker, "worker-0", env)
    client = mesh.client()
    held = ask(client, 1, env)
    await mesh.until((mesh.folder / "held").exists)
    try:
        await mesh.until(lambda: mesh.worker_status("worker-0")["state"] == "lost")
        await asyncio.to_thread(mesh.worker, "worker-1", env)
        [finished] = await take(client)
    finally:
        os.close(os.open(mesh.folder / "gate", os.O_WRONLY))
    assert isinstance(finished, Finished)
    assert (finished.group_id, finished.worker_id, finished.attempt) == (held, "worker-1", 2)
    await mesh.until(lambda: mesh.worker_status("worker-0")["state"] == "live")
    await mesh.until(lambda: mesh.worker_status("worker-0")["unacked_bytes"] == 0)
    later = {ask(client, 1, env) for _ in range(8)}
    assert {each.group_id for each in await take(client, 8)} == later


STORM = """
from rollmesh.envs.echo import EchoEnv as Storm
"""


@pytest.mark.slow
async def test_results_of_a_stopped_worker_and_of_its_successor_count_once(mesh: Mesh) -> None:
    (mesh.folder / "storm.py").write_text(STORM)
    env = "storm:Storm"
    stopped = await asyncio.to_thread(mesh.worker, "worker-0", env)
    mesh.engine.hold()
    args = [str(HERE / "chaos_client.py"), mesh.router.ready.address, "client", "4", "leave"]
    client = await asyncio.create_subprocess_exec(
        sys.executable, *args, cwd=mesh.folder, stdout=asyncio.subprocess.PIPE
    )
    await mesh.engine.until(lambda: mesh.engine.num_live == 4 * GROUP_SIZE)
    os.kill(client.pid, signal.SIGSTOP)  # it acks nothing, so all results wait for it
    await mesh.engine.release()
    await mesh.until(lambda: mesh.worker_status("worker-0")["num_finished"] == 4 * GROUP_SIZE)
    os.kill(stopped.popen.pid, signal.SIGSTOP)
    await asyncio.to_thread(mesh.worker, "worker-1", env)
    await mesh.until(lambda: mesh.worker_status("worker-1")["num_finished"] == 4 * GROUP_SIZE)
    os.kill(stopped.popen.pid, signal.SIGCONT)
    os.kill(client.pid, signal.SIGCONT)
    out, _ = await client.communicate()
    assert client.returncode == 0
    assert sorted(out.splitlines()) == [b"t%d finished" % number for number in range(4)]
    check_journal(mesh.folder / "client")
    await mesh.until(lambda: not any(row["unacked_bytes"] for row in mesh.status()["workers"]))
