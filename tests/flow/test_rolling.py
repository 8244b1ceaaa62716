"""Workers are restarted in turn, and what takes longer than they live comes to its end."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmesh.core.process import INTERRUPTED
from rollmesh.serve.client.client import Finished
from tests.flow.worker_mesh import Mesh, ask, leaves, open_mesh, take

NUM_RESTARTS = 3
"""As many as a group has attempts."""


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with open_mesh(tmp_path) as mesh:
        yield mesh


async def test_restarts_of_its_only_worker_cost_a_long_group_no_attempt(mesh: Mesh) -> None:
    client = mesh.client()
    mesh.engine.hold()
    group_id = ask(client)
    for _ in range(NUM_RESTARTS):
        worker = await asyncio.to_thread(mesh.worker, "worker-0", drain_timeout_s=0.1)
        await mesh.engine.until(lambda: mesh.engine.num_live == 2)
        worker.popen.terminate()
        assert await leaves(worker) == INTERRUPTED
        await mesh.engine.until(lambda: mesh.engine.num_live == 0)
    await asyncio.to_thread(mesh.worker, "worker-0")
    await mesh.engine.release()
    [finished] = await take(client)
    assert isinstance(finished, Finished)
    assert (finished.group_id, finished.attempt) == (group_id, NUM_RESTARTS + 1)
