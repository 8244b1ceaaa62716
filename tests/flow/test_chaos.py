"""Rollouts on a mesh whose processes are killed and stopped at random all end exactly once.

The simulator tests the state machines; this tests the processes around them. Three workers, the
router and two clients are killed (-9) or stopped for a while, in an order that a seed determines.
Launch restarts the workers and the router, the test restarts the clients. One client's groups
survive it; the other's are cancelled and requested again.
"""

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from rollmesh.testing.engine import ScriptedEngine
from tests.flow.chaos_client import GROUP_SIZE, check_journal
from tests.flow.launched_mesh import LaunchedMesh
from tests.flow.worker_mesh import byte_token

HERE = Path(__file__).parent
STORM = """
import asyncio, random
from rollmesh.envs.echo import EchoEnv

class Storm(EchoEnv):
    async def run(self, task, agent):
        await asyncio.sleep(random.uniform(0.1, 0.5))
        return await super().run(task, agent)
"""
SECTIONS = {
    "env": "storm:Storm",
    "env_settings": {"num_turns": 2, "prompt_chars": 20, "turn_chars": 10, "max_tokens": 3},
    "router": {"beat_s": 0.2, "missed_beats": 5, "client_grace_s": 2.0},
    "worker": {"num_workers": 3, "max_rollouts": 16},
    "launch": {"max_restarts": 1000},
}
CLIENTS = {"client-0": "keep", "client-1": "leave"}
FAULTS: tuple[str, ...] = (
    ("kill worker",) * 4 + ("stop worker",) * 3 + ("kill router", "stop router")
)
FAULTS += ("kill client",) * 2 + ("stop client",)
LONGEST_STOP_S = 2.5
LONGEST_LULL_S = 2.0
"""Longest pause between two faults if no group ends meanwhile."""


class Client:
    """A client process, restarted after each kill."""

    def __init__(self, mesh: LaunchedMesh, name: str, num_tasks: int) -> None:
        self.folder = mesh.folder / name
        self.ends: Counter[str] = Counter()
        self._args = [mesh.router().address, str(self.folder), str(num_tasks), CLIENTS[name]]
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """0 when the client is done."""
        running = self._process and self._process.returncode is None
        return self._process.pid if self._process and running else 0

    async def run(self, ended: asyncio.Condition) -> None:
        """Run until every task has ended; notify `ended` of each."""
        while True:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(HERE / "chaos_client.py"),
                *self._args,
                stdout=asyncio.subprocess.PIPE,
            )
            self.ends.clear()
            try:
                await self._listen(self._process, ended)
                code = await self._process.wait()
            finally:
                if self.pid:
                    send(self.pid, signal.SIGKILL)
            if code != -signal.SIGKILL:
                assert code == 0
                return

    async def _listen(self, process: asyncio.subprocess.Process, ended: asyncio.Condition) -> None:
        assert process.stdout
        async for line in process.stdout:
            how = line.decode().strip().partition(" ")[2]
            async with ended:
                self.ends[how.partition(":")[0]] += 1
                ended.notify_all()


class FaultInjector:
    """Kills and stops random processes while rollouts end."""

    def __init__(self, mesh: LaunchedMesh, clients: dict[str, Client], seed: int) -> None:
        self.faults: list[str] = []
        self.ended = asyncio.Condition()
        self._mesh = mesh
        self._clients = clients
        self._random = random.Random(seed)

    async def inject(self, num_faults: int, num_between: int) -> None:
        """Inject a fault whenever `num_between` groups have ended, or after a pause."""
        async with asyncio.TaskGroup() as stops:
            for what in self._random.choices(FAULTS, k=num_faults):
                await self._wait_for_ends(num_between)
                how, role = what.split()
                if found := self._find(role):
                    name, pid = self._random.choice(found)
                    self.faults.append(f"{how} {name}")
                    if how == "kill":
                        send(pid, signal.SIGKILL)
                    else:
                        send(pid, signal.SIGSTOP)
                        stops.create_task(self._resume(pid))

    async def _resume(self, pid: int) -> None:
        try:
            async with asyncio.timeout(self._random.uniform(0.2, LONGEST_STOP_S)):
                await asyncio.Event().wait()
        except TimeoutError:
            send(pid, signal.SIGCONT)

    async def _wait_for_ends(self, number: int) -> None:
        try:
            async with asyncio.timeout(LONGEST_LULL_S), self.ended:
                for _ in range(number):
                    await self.ended.wait()
        except TimeoutError:
            return

    def _find(self, role: str) -> list[tuple[str, int]]:
        """Names and pids of running processes with that role."""
        if role == "client":
            return [(name, each.pid) for name, each in self._clients.items() if each.pid]
        pids = self._mesh.pids().items()
        return [(name, pid) for name, pid in pids if name.startswith(role) and is_alive(pid)]


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[LaunchedMesh]:
    (tmp_path / "storm.py").write_text(STORM)
    async with ScriptedEngine(byte_token) as engine:
        mesh = LaunchedMesh(tmp_path, engine.url, **SECTIONS)
        try:
            roles = ("router", "worker-0", "worker-1", "worker-2")
            await asyncio.to_thread(mesh.until_ready, *roles)
            yield mesh
        finally:
            mesh.close()


async def run_under_faults(
    mesh: LaunchedMesh, seed: int, num_rollouts: int, num_faults: int
) -> None:
    """Run the rollouts under faults; check that all end exactly once and no process is left."""
    num_groups = num_rollouts // GROUP_SIZE
    num_tasks = num_groups // len(CLIENTS)
    clients = {name: Client(mesh, name, num_tasks) for name in CLIENTS}
    injector = FaultInjector(mesh, clients, seed)
    async with asyncio.TaskGroup() as tasks:
        for each in clients.values():
            tasks.create_task(each.run(injector.ended))
        tasks.create_task(injector.inject(num_faults, num_groups // (num_faults + 2)))
    sys.stdout.write(f"seed {seed}: {', '.join(injector.faults)}\n")
    for name, client in clients.items():
        sys.stdout.write(f"{name}: {dict(client.ends)}\n")
        assert client.ends.total() == num_tasks
        assert client.ends["finished"] > num_tasks // 2
        check_journal(client.folder)
    pids = list(mesh.pids().values())
    end = await asyncio.to_thread(mesh.end)
    assert end["end"] == {"code": 130, "reason": "stopped"}
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
async def test_every_rollout_ends_once_whatever_is_killed_or_stopped(
    mesh: LaunchedMesh, seed: int
) -> None:
    await run_under_faults(mesh, seed, num_rollouts=500, num_faults=10)


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [2, 3])
async def test_thousands_of_rollouts_end_once_under_many_faults(
    mesh: LaunchedMesh, seed: int
) -> None:
    await run_under_faults(mesh, seed, num_rollouts=2500, num_faults=60)
