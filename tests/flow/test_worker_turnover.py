"""Workers leave and join during the work: nothing is lost, runs twice or stalls."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from rollmesh.core.config import JournalConfig
from rollmesh.core.process import RECYCLED
from rollmesh.core.types import SamplingPolicy, Task
from rollmesh.serve.client.client import Finished, RolloutClient
from rollmesh.testing.engine import ScriptedEngine
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import AskDrain
from rollmesh.wire.sockets import Dialer
from tests.flow.launched_mesh import LaunchedMesh
from tests.flow.worker_mesh import ENV_HEAD, byte_token, last_reason, leaves, open_mesh, take

ENV = "restless:TheEnv"
SOURCE = """
class TheEnv(Plain):
    async def run(self, task, agent):
        with open("ran", "a") as file:
            file.write(f"{task.id}\\n")
        await asyncio.sleep(0.3)
        return Transcript()
"""
LEAKY = """
class TheEnv(Plain):
    kept = []

    async def run(self, task, agent):
        with open("ran", "a") as file:
            file.write(f"{task.id}\\n")
        self.kept.append(bytes(range(256)) * 2**14)
        await asyncio.sleep(0.1)
        return Transcript()
"""
"""Each rollout leaks 4 MiB."""
MAX_RSS_BYTES = 320 * 2**20
"""A worker starts with some 100 MiB, so that it exceeds this after a dozen groups."""
NUM_SAMPLES = 4
ROUND = 20
"""Groups that are requested at a time."""
SERVING = {"live", "worn"}


def ask_for(client: RolloutClient, numbers: range) -> None:
    for number in numbers:
        task, policy = Task(id=f"t{number}"), SamplingPolicy()
        client.ask(task, env=ENV, num_samples=NUM_SAMPLES, sampling=policy, seed=7)


def check_ran_once(folder: Path, num_groups: int) -> None:
    ran = (folder / "ran").read_text().split()
    assert sorted(ran) == sorted(f"t{each}" for each in range(num_groups) for _ in range(4))


async def test_drain_in_a_burst_loses_nothing_and_runs_nothing_twice(tmp_path: Path) -> None:
    num_groups = 32
    async with open_mesh(tmp_path) as mesh:
        mesh.write_env("restless", SOURCE)
        drained = await asyncio.to_thread(mesh.worker, "worker-0", ENV, max_rollouts=16)
        await asyncio.to_thread(mesh.worker, "worker-1", ENV, max_rollouts=16)
        client, cli = mesh.client(), Dialer(mesh.router.ready.address, "cli")
        ask_for(client, range(num_groups))
        early = await take(client, 6)
        cli.send(Packet(AskDrain(1, "worker-0", "make room")))
        arrivals = early + await take(client, num_groups - len(early))
        assert {type(each) for each in arrivals} == {Finished}
        assert await leaves(drained) == 0
        check_ran_once(tmp_path, num_groups)
        cli.close()


class Watch:
    """The number of workers that serve, polled from a thread."""

    def __init__(self, url: str) -> None:
        self.fewest = 2
        self._url = f"{url}/status"
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        with httpx.Client() as client:
            while not self._is_over.wait(0.02):
                workers = client.get(self._url).json()["workers"]
                self.fewest = min(self.fewest, sum(row["state"] in SERVING for row in workers))


@asynccontextmanager
async def launched(folder: Path, source: str, **worker: object) -> AsyncIterator[LaunchedMesh]:
    """Two workers of that environment that are restarted; `worker` are their settings."""
    (folder / "restless.py").write_text(ENV_HEAD + source)
    sections = {
        "env": ENV,
        "worker": {"num_workers": 2, "max_rollouts": 16, **worker},
        "launch": {"max_restarts": 100},
    }
    async with ScriptedEngine(byte_token) as engine:
        mesh = LaunchedMesh(folder, engine.url, **sections)
        try:
            await asyncio.to_thread(mesh.until_ready, "worker-0", "worker-1")
            yield mesh
        finally:
            mesh.close()


def recycled(mesh: LaunchedMesh) -> set[str]:
    """The workers that have left so far; each must have been recycled."""
    log = (mesh.run / "logs" / "launch.log").read_bytes().splitlines()
    events = [msgspec.json.decode(line) for line in log]
    exits = [each for each in events if each["event"] == "child.exited"]
    assert {each["code"] for each in exits} <= {RECYCLED}
    return {each["child"] for each in exits}


async def until_both_have_left(mesh: LaunchedMesh) -> int:
    """Request groups until each worker was replaced by a fresh one; check that all ran once.

    Return the smallest number of workers that served meanwhile.
    """
    client = RolloutClient(mesh.router().address, JournalConfig(), mesh.folder / "client")
    client.start()
    num_groups = 0
    with Watch(mesh.router().http_address) as watch:
        while recycled(mesh) != {"worker-0", "worker-1"}:
            ask_for(client, range(num_groups, num_groups + ROUND))
            num_groups += ROUND
            assert {type(each) for each in await take(client, ROUND)} == {Finished}
    check_ran_once(mesh.folder, num_groups)
    client.close()
    return watch.fewest


@pytest.mark.slow
async def test_workers_that_wear_out_together_recycle_one_after_the_other(tmp_path: Path) -> None:
    async with launched(tmp_path, SOURCE, recycle_rollouts=60) as mesh:
        assert await until_both_have_left(mesh) == 1


@pytest.mark.slow
async def test_workers_past_their_memory_are_replaced_by_fresh_ones(tmp_path: Path) -> None:
    async with launched(tmp_path, LEAKY, max_rss_bytes=MAX_RSS_BYTES) as mesh:
        first = mesh.pids()
        await until_both_have_left(mesh)
        await asyncio.to_thread(mesh.until_ready, "worker-0", "worker-1")
        for worker_id in ("worker-0", "worker-1"):
            assert mesh.pids()[worker_id] != first[worker_id]
            reason = last_reason(mesh.run / "logs" / f"{worker_id}.log")
            assert reason.startswith("recycled: ")
            assert reason.endswith(f"bytes of memory, worker.max_rss_bytes = {MAX_RSS_BYTES}")
