"""Workers are restarted in turn, and a group that runs longer than its worker still finishes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmesh.core.process import INTERRUPTED
from rollmesh.serve.client.client import Finished
from tests.flow.worker_mesh import Mesh, ask, leaves, open_mesh, take

NUM_RESTARTS = 3
"""The number of attempts of a group."""


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with open_mesh(tmp_path) as mesh:
        yield mesh


@pytest.mark.slow
async def test_restarts_of_the_only_worker_use_no_attempt_of_a_long_group(mesh: Mesh) -> None:
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
