"""Several routers, as in docs/internals/scale.md: only the clients choose between them."""

import asyncio
import zlib
from contextlib import ExitStack, closing
from pathlib import Path

from rollmesh.core.config import JournalConfig
from rollmesh.core.ids import GroupId
from rollmesh.core.types import SamplingPolicy, Task
from rollmesh.serve.client.client import Finished, RolloutClient
from tests.flow.worker_mesh import Process, open_mesh, running, take

NUM_TASKS = 12


async def test_a_program_spreads_its_tasks_over_two_routers_by_their_hash(tmp_path: Path) -> None:
    async with open_mesh(tmp_path) as mesh:
        with ExitStack() as stack:
            args = ["router", *mesh.settings(), "--engine", mesh.engine.url]
            other = await asyncio.to_thread(stack.enter_context, running(tmp_path, *args))

            def client_with_worker(number: int, router: Process) -> RolloutClient:
                address = router.ready.address
                argv = ["worker", *mesh.settings(), "--router", address]
                stack.enter_context(running(tmp_path, *argv, "--worker-id", f"worker-{number}"))
                client = RolloutClient(address, JournalConfig(), tmp_path / f"client-{number}")
                stack.enter_context(closing(client))
                client.start()
                return client

            routers = enumerate([mesh.router, other])
            clients = [await asyncio.to_thread(client_with_worker, n, r) for n, r in routers]
            asked: list[dict[GroupId, str]] = [{}, {}]
            for number in range(NUM_TASKS):
                task = Task(id=f"echo-{number}", data={"text_seed": number})
                shard = zlib.crc32(task.id.encode()) % len(clients)
                group_id = clients[shard].ask(
                    task, env="echo", num_samples=2, sampling=SamplingPolicy(), seed=number
                )
                asked[shard][group_id] = task.id
            for number, client in enumerate(clients):
                arrivals = await take(client, len(asked[number]))
                finished = [each for each in arrivals if isinstance(each, Finished)]
                assert {each.group_id: each.record.task.id for each in finished} == asked[number]
                assert {each.worker_id for each in finished} == {f"worker-{number}"}
