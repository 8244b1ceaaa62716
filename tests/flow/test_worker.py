"""Real router and worker processes, a scripted engine, a client: groups arrive once and are
exact.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmesh.core.ids import GroupId
from rollmesh.core.process import INTERRUPTED
from rollmesh.core.types import Outcome
from rollmesh.serve.client.client import Dropped, Finished
from rollmesh.wire.messages import (
    GroupState,
)
from tests.flow.worker_mesh import (
    PATIENCE_S,
    Mesh,
    SlowSink,
    ask,
    check_exact,
    open_mesh,
    take,
)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with open_mesh(tmp_path) as mesh:
        yield mesh


async def test_group_arrives_once_with_exact_tokens(mesh: Mesh) -> None:
    await asyncio.to_thread(mesh.worker, "worker-0")
    client = mesh.client()
    group_ids = [ask(client, num_samples=3) for _ in range(4)]
    arrivals = await take(client, num_groups=4)
    assert sorted(arrival.group_id for arrival in arrivals) == group_ids
    for finished in arrivals:
        assert isinstance(finished, Finished)
        assert [r.index for r in finished.record.rollouts] == [0, 1, 2]
        assert {r.outcome for r in finished.record.rollouts} == {Outcome.COMPLETED}
        assert {r.reward for r in finished.record.rollouts} == {1.0}
        assert finished.record.rollouts[0].num_calls == 2
        assert {tuple(r.engines) for r in finished.record.rollouts} == {(mesh.engine.url,)}
        assert finished.attempt == 1
        check_exact(finished, 2 * 3)
    seeds = [
        r.body["sampling_params"].get("sampling_seed")
        for r in mesh.engine.seen
        if r.path == "/generate"
    ]
    assert len(set(seeds)) == 3 * 2
    assert await asyncio.to_thread(client.take, 0.2) == []


async def test_group_runs_again_when_its_worker_dies(mesh: Mesh) -> None:
    doomed = await asyncio.to_thread(mesh.worker, "worker-0")
    client = mesh.client()
    mesh.engine.hold()
    group_id = ask(client)
    await mesh.engine.until(lambda: mesh.engine.num_seen("/generate") > 0)
    await asyncio.to_thread(doomed.kill)
    await asyncio.to_thread(mesh.worker, "worker-1")
    await mesh.engine.release()
    [finished] = await take(client)
    assert isinstance(finished, Finished)
    assert (finished.group_id, finished.worker_id, finished.attempt) == (group_id, "worker-1", 2)
    check_exact(finished, 2 * 3)


async def test_group_runs_on_another_worker_when_its_own_is_stopped(mesh: Mesh) -> None:
    leaving = await asyncio.to_thread(mesh.worker, "worker-0", drain_timeout_s=0.1)
    client = mesh.client()
    mesh.engine.hold()
    ask(client)
    await mesh.engine.until(lambda: mesh.engine.num_seen("/generate") > 0)
    leaving.popen.terminate()
    assert await asyncio.to_thread(leaving.popen.wait, PATIENCE_S) == INTERRUPTED
    await asyncio.to_thread(mesh.worker, "worker-1")
    await mesh.engine.release()
    [finished] = await take(client)
    assert isinstance(finished, Finished)
    assert finished.worker_id == "worker-1"


async def test_group_outlives_its_router_and_runs_once(mesh: Mesh) -> None:
    await asyncio.to_thread(mesh.worker, "worker-0")
    client = mesh.client()
    mesh.engine.hold()
    running_id, waiting_id = ask(client, num_samples=2), ask(client, env="nobody-has-it")
    await mesh.engine.until(lambda: mesh.engine.num_seen("/generate") == 2)
    # The client has received the start of its first attempt by then, and requests the group as a
    # started one.
    await mesh.until(lambda: mesh.status()["queue"]["running"] == 1)
    address = mesh.router.ready.address
    await asyncio.to_thread(mesh.router.kill)
    mesh.router = await asyncio.to_thread(mesh.start_router, address)
    # If the new router were to start the group again, it would have done so by then.
    await mesh.until(lambda: mesh.status()["queue"] == {"queued": 1, "assigned": 0, "running": 1})
    await mesh.engine.release()
    [finished] = await take(client)
    assert isinstance(finished, Finished)
    assert (finished.group_id, finished.attempt) == (running_id, 1)
    check_exact(finished, 2 * 3)
    assert mesh.engine.num_seen("/generate") == 4
    # Each process logs in one line what it recovered.
    await mesh.until(lambda: mesh.logged("router", "router.recovered"))
    [row] = mesh.logged("router", "router.recovered")
    assert {key: row[key] for key in row if key.startswith("num_") and row[key]} == {"num_kept": 1}
    [row] = mesh.logged("worker-0", "worker.reasserted")
    assert (row["num_running"], row["num_undelivered"]) == (1, 0)
    client.cancel(waiting_id, "enough")
    assert await take(client) == [Dropped(waiting_id, "cancelled: enough")]


async def test_group_that_ends_while_its_router_is_away_is_delivered_and_runs_once(
    mesh: Mesh,
) -> None:
    await asyncio.to_thread(mesh.worker, "worker-0")
    client = mesh.client()
    mesh.engine.hold()
    group_id = ask(client)
    await mesh.engine.until(lambda: mesh.engine.num_seen("/generate") == 2)
    address = mesh.router.ready.address
    await asyncio.to_thread(mesh.router.kill)
    await mesh.engine.release()
    [finished] = await take(client)
    assert isinstance(finished, Finished)
    assert (finished.group_id, finished.attempt) == (group_id, 1)
    mesh.router = await asyncio.to_thread(mesh.start_router, address)
    later = ask(client, num_samples=1)
    [finished] = await take(client)
    assert finished.group_id == later
    await mesh.until(lambda: not any(mesh.status()["queue"].values()))
    assert mesh.engine.num_seen("/generate") == 2 * 2 + 2


NUM_JUDGED = 40
JUDGES = f"""
class TheEnv(Plain):
    def __init__(self):
        self.all_here = threading.Barrier({NUM_JUDGED})

    def score(self, task, transcript):
        self.all_here.wait({PATIENCE_S / 2})
        return Score(reward=1.0)
"""


async def test_every_rollout_may_be_in_a_blocking_score_at_once(mesh: Mesh) -> None:
    env = mesh.write_env("judges", JUDGES)
    await asyncio.to_thread(mesh.worker, "worker-0", env)
    client = mesh.client()
    ask(client, num_samples=NUM_JUDGED, env=env)
    [finished] = await take(client)
    assert isinstance(finished, Finished)
    assert {r.reward for r in finished.record.rollouts} == {1.0}


async def test_result_is_sent_again_until_its_sink_acks(mesh: Mesh) -> None:
    await asyncio.to_thread(mesh.worker, "worker-0")
    sink, group_id = SlowSink(mesh.router.ready.address), GroupId("r1", 0)
    sink.ask(group_id)
    await asyncio.to_thread(sink.until, lambda: len(sink.finished) == 2)
    assert sink.finished[0] == sink.finished[1]
    assert GroupState.DONE not in {moved.state for moved in sink.moved}
    sink.ack(*sink.finished[0])
    await asyncio.to_thread(sink.until, lambda: sink.moved[-1].state is GroupState.DONE)
    assert len(sink.finished) == 2
    sink.close()
