"""Client processes that are killed: other clients are unaffected, and kept groups are found
again.
"""

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import DeadlineExceeded, Overloaded
from rollmesh.core.ids import GroupId
from rollmesh.core.types import Task
from rollmesh.serve.client.async_client import AsyncRolloutClient
from rollmesh.serve.client.client import Finished
from tests.flow.worker_mesh import PATIENCE_S, TURNS, Mesh, open_mesh

GRACE_S = 0.5
PROGRAM = """
import sys
from pathlib import Path
from rollmesh.core.config import JournalConfig
from rollmesh.core.types import SamplingPolicy, Task
from rollmesh.serve.client.client import RolloutClient

router, folder, keep, num_groups = sys.argv[1:]
client = RolloutClient(router, JournalConfig(), Path(folder), keep=keep == "keep")
client.start()
for number in range(int(num_groups)):
    task = Task(id=f"victim-{number}", data={"text_seed": number})
    client.ask(task, env="echo", num_samples=2, sampling=SamplingPolicy(), seed=number)
print("asked", flush=True)
while True:
    for arrival in client.take(1.0):
        print(type(arrival).__name__, arrival.group_id.seq, flush=True)
"""


class Victim:
    """A client in its own process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def read_lines(self, num_lines: int) -> list[str]:
        """Read its next lines."""
        assert self._process.stdout
        async with asyncio.timeout(PATIENCE_S):
            lines = [await self._process.stdout.readline() for _ in range(num_lines)]
        return [line.decode().strip() for line in lines]

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        # The loop closes its pipe's transport once it has read the end of the pipe.
        assert self._process.stdout
        await self._process.stdout.read()


@asynccontextmanager
async def victim(mesh: Mesh, folder: Path, keep: str, num_groups: int) -> AsyncIterator[Victim]:
    args = [mesh.router.ready.address, str(folder), keep, str(num_groups)]
    found = Victim(
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, *args, stdout=asyncio.subprocess.PIPE
        )
    )
    try:
        yield found
    finally:
        await found.kill()


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with open_mesh(tmp_path, client_grace_s=GRACE_S) as mesh:
        await asyncio.to_thread(mesh.worker, "worker-0")
        yield mesh


def in_flight(mesh: Mesh) -> int:
    return int(mesh.worker_status("worker-0")["in_flight"])


async def test_groups_of_a_killed_client_are_cancelled_and_no_others(
    mesh: Mesh, tmp_path: Path
) -> None:
    mesh.engine.hold()
    async with AsyncRolloutClient(mesh.router.ready.address) as bystander:
        mine = asyncio.create_task(
            bystander.run_group(Task(id="b", data={"text_seed": 1}), 3, env="echo")
        )
        await mesh.engine.until(lambda: mesh.engine.num_live == 3)
        async with victim(mesh, tmp_path / "victim", "leave", num_groups=4) as doomed:
            await doomed.read_lines(1)
            await mesh.engine.until(lambda: mesh.engine.num_live == 3 + 8)
            await doomed.kill()
            async with asyncio.timeout(PATIENCE_S):
                await mesh.engine.until(lambda: mesh.engine.num_live == 3)
        await mesh.engine.release()
        async with asyncio.timeout(PATIENCE_S):
            finished = await mine
        assert finished.attempt == 1
    await mesh.until(lambda: in_flight(mesh) == 0)
    assert mesh.status()["queue"] == {"queued": 0, "assigned": 0, "running": 0}


async def test_kept_groups_of_a_killed_client_reach_its_successor_and_run_once(
    mesh: Mesh, tmp_path: Path
) -> None:
    mesh.engine.hold()
    async with victim(mesh, tmp_path / "victim", "keep", num_groups=4) as doomed:
        await doomed.read_lines(1)
        await mesh.engine.until(lambda: mesh.engine.num_live == 8)
        await doomed.kill()
    # The grace time passes: the groups of another client that is killed later end first. Then the
    # groups of the first end without a recipient.
    async with victim(mesh, tmp_path / "another", "leave", num_groups=1) as doomed:
        await doomed.read_lines(1)
        await mesh.engine.until(lambda: mesh.engine.num_live == 8 + 2)
        await doomed.kill()
        await mesh.engine.until(lambda: mesh.engine.num_live == 8)
    await mesh.engine.release()
    await mesh.until(lambda: in_flight(mesh) == 0)
    num_calls = mesh.engine.num_seen("/generate")
    async with asyncio.timeout(PATIENCE_S):
        async with AsyncRolloutClient(
            mesh.router.ready.address, tmp_path / "victim", keep=True
        ) as heir:
            assert len(heir.reopened) == 4
            arrivals = [arrival async for arrival in heir.stream()]
    assert {type(arrival) for arrival in arrivals} == {Finished}
    assert sorted(a.record.task.id for a in arrivals if a.record) == [
        f"victim-{n}" for n in range(4)
    ]
    assert {a.attempt for a in arrivals if isinstance(a, Finished)} == {1}
    assert mesh.engine.num_seen("/generate") == num_calls == 4 * 2 * 2 + 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_clients_killed_at_any_moment_do_not_affect_others(
    mesh: Mesh, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    async with AsyncRolloutClient(mesh.router.ready.address) as bystander:
        requested = await ask_all(bystander, 12)
        for number in range(3):
            num_lines = rng.randrange(4)
            async with victim(mesh, tmp_path / f"victim-{number}", "leave", 3) as doomed:
                await doomed.read_lines(num_lines)
        async with asyncio.timeout(PATIENCE_S):
            arrivals = [arrival async for arrival in bystander.stream()]
            # No message about the last victim follows it.
            await bystander.run(Task(id="b-last", data={"text_seed": 12}), env="echo")
        # Wait before the client leaves, since then the router cancels groups without a known end.
        await mesh.until(lambda: mesh.status()["num_done"] > len(requested))
    assert {arrival.group_id for arrival in arrivals} == requested
    assert {type(arrival) for arrival in arrivals} == {Finished}
    await mesh.until(lambda: not any(mesh.status()["queue"].values()) and not in_flight(mesh))
    assert mesh.status()["num_failed"] == 0


async def test_a_full_router_raises_overload_or_is_waited_for(tmp_path: Path) -> None:
    task = Task(id="t", data={"text_seed": 1})
    async with (
        asyncio.timeout(PATIENCE_S),
        open_mesh(tmp_path, max_queued_groups=1) as mesh,
        AsyncRolloutClient(mesh.router.ready.address) as client,
    ):
        first = asyncio.create_task(client.run(task, env="echo"))
        await mesh.until(lambda: mesh.status()["queue"]["queued"] == 1)
        with pytest.raises(Overloaded, match="1 groups wait") as refused:
            await client.run(task, env="echo", patience_s=0.0)
        assert refused.value.retry_after_s > 0
        patient = asyncio.create_task(client.run_group(task, 2, env="echo"))
        with pytest.raises(DeadlineExceeded):
            await client.run(task, env="echo", deadline_s=0.3)
        await asyncio.to_thread(mesh.worker, "worker-0")
        assert len((await first).record.rollouts) == 1
        assert len((await patient).record.rollouts) == 2


async def ask_all(client: AsyncRolloutClient, num_groups: int) -> set[GroupId]:
    tasks = [Task(id=f"b-{number}", data={"text_seed": number}) for number in range(num_groups)]
    return {await client.ask(task, 2, env="echo") for task in tasks}


async def test_example_client_prints_the_outcome_of_each_task(mesh: Mesh, tmp_path: Path) -> None:
    settings = tmp_path / "ask.json"
    settings.write_bytes(msgspec.json.encode({"env": "echo", "env_settings": TURNS}))
    args = [mesh.router.ready.address, str(settings), "-n", "2", "--num-tasks", "3"]
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "examples.ask", *args), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(PATIENCE_S):
        out, _ = await program.communicate()
    lines = out.decode().splitlines()
    assert program.returncode == 0
    assert len({line.split()[0] for line in lines}) == len(lines) == 3
    assert all("completed 1, completed 1" in line for line in lines)
