"""The pulse of a run: of processes that are gone nothing is kept."""

import asyncio
import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollmesh.core.config import Config, LaunchConfig, RunConfig
from rollmesh.launch import sampler
from rollmesh.launch.folder import RunFolder
from rollmesh.launch.sampler import Sampler
from rollmesh.launch.supervisor import Mesh, Supervisor
from rollmesh.testing.clock import FakeClock


class Crew(Supervisor):
    """What it runs is what the test says."""

    running: dict[str, int]

    def pids(self) -> dict[str, int]:
        return self.running


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    yield children
    for child in children:
        child.kill()
        child.wait()


@pytest.mark.usefixtures("young_heap")
async def test_a_process_that_is_gone_is_measured_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[bytes]]
) -> None:
    monkeypatch.setattr(sampler, "SAMPLE_S", 0.0)
    folder = RunFolder(Config(run=RunConfig(name="demo", folder=str(tmp_path))))
    crew = Crew(Mesh([], {}, "launch.1"), LaunchConfig(), folder, FakeClock())
    pulse = Sampler(crew, folder, FakeClock())
    crew.running = {f"worker-{at}": child.pid for at, child in enumerate(children)}
    following = asyncio.create_task(pulse.follow())
    async with asyncio.timeout(60.0):
        while len(pulse.last.processes) < 3:  # noqa: ASYNC110 - told by nobody
            await asyncio.sleep(0)
        crew.running = {"launch": os.getpid()}
        while len(pulse.last.processes) != 1:  # noqa: ASYNC110 - told by nobody
            await asyncio.sleep(0)
    following.cancel()
    gone = {child.pid for child in children}
    watched = [each.pid for each in gc.get_objects() if isinstance(each, psutil.Process)]
    assert gone.isdisjoint(watched)
