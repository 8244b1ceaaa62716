"""Workers as real processes, and faults in them: each fault is reported by its name."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmesh.core.ids import GroupId
from rollmesh.core.process import INTERRUPTED
from rollmesh.core.types import Outcome
from rollmesh.serve.client.client import Arrival, Dropped, Finished
from rollmesh.serve.server.groups import FAILURES
from tests.flow.worker_mesh import Mesh, SlowSink, ask, ended, leaves, open_mesh, take


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with open_mesh(tmp_path) as mesh:
        yield mesh


def outcomes(arrival: Arrival) -> list[Outcome]:
    assert arrival.record is not None
    return [rollout.outcome for rollout in arrival.record.rollouts]


# cancel


async def test_cancel_reaches_the_engine(mesh: Mesh) -> None:
    await asyncio.to_thread(mesh.worker, "worker-0")
    client = mesh.client()
    mesh.engine.hold()
    group_id = ask(client, num_samples=4)
    await mesh.engine.until(lambda: mesh.engine.num_live == 4)
    client.cancel(group_id, "no longer needed")
    await mesh.engine.until(lambda: mesh.engine.num_live == 0)
    assert mesh.engine.num_seen("/abort_request") >= 4
    assert await take(client) == [Dropped(group_id, "cancelled: no longer needed")]
    await mesh.until(lambda: mesh.worker_status("worker-0").get("in_flight") == 0)


ONE_FAILS = """
class TheEnv(Plain):
    def __init__(self):
        self.chat = ChatClient()
        self.num_begun = 0

    async def run(self, task, agent):
        self.num_begun += 1
        if self.num_begun < 3:
            await self.chat.complete(agent, [{"role": "user", "content": "hi"}])
        while not Path("fail").exists():
            await asyncio.sleep(0.01)
        raise InfraError("the sandbox is gone")

    async def close(self):
        await self.chat.close()
"""


async def test_siblings_of_a_lost_group_stop_generating(mesh: Mesh) -> None:
    env = mesh.write_env("one_fails", ONE_FAILS)
    await asyncio.to_thread(mesh.worker, "worker-0", env, num_infra_retries=0)
    client = mesh.client()
    mesh.engine.hold()
    ask(client, num_samples=3, env=env)
    await mesh.engine.until(lambda: mesh.engine.num_live == 2)
    (mesh.folder / "fail").touch()
    await mesh.engine.until(lambda: mesh.engine.num_live == 0)
    [dropped] = await take(client)
    assert isinstance(dropped, Dropped)
    why = "infra_error: 1 of 3 rollouts: InfraError: the sandbox is gone (one_fails.py:"
    assert dropped.reason.startswith(why)
    assert outcomes(dropped) == [Outcome.CANCELLED, Outcome.CANCELLED, Outcome.INFRA_ERROR]
    await mesh.until(lambda: mesh.worker_status("worker-0").get("in_flight") == 0)


# deadlines


async def test_group_past_its_deadline_ends_and_generates_no_more(mesh: Mesh) -> None:
    await asyncio.to_thread(mesh.worker, "worker-0")
    sink, group_id = SlowSink(mesh.router.ready.address), GroupId("r1", 0)
    mesh.engine.hold()
    sink.ask(group_id, deadline_s=0.5)
    await mesh.engine.until(lambda: mesh.engine.num_live == 1)
    await asyncio.to_thread(sink.until, lambda: bool(sink.failed or sink.finished))
    await mesh.engine.until(lambda: mesh.engine.num_live == 0)
    assert [each.reason.split(":")[0] for each in sink.failed] in ([], ["deadline"])
    assert not any(message.complete for _, message in sink.finished)
    sink.close()


async def test_result_without_a_recipient_is_dropped_and_its_memory_freed(mesh: Mesh) -> None:
    await asyncio.to_thread(mesh.worker, "worker-0", delivery_timeout_s=0.3)
    sink, group_id = SlowSink(mesh.router.ready.address), GroupId("r1", 0)
    sink.ask(group_id)
    await asyncio.to_thread(sink.until, lambda: bool(sink.failed))
    assert sink.failed[0].group_id == group_id
    assert {message.attempt for _, message in sink.finished} == {1, 2, 3}
    await mesh.until(lambda: mesh.worker_status("worker-0").get("unacked_bytes") == 0)
    sink.close()


# stalls


HOLDS_THE_LOOP = """
class TheEnv(Plain):
    async def run(self, task, agent):
        hold_the_loop()
        return Transcript()

def hold_the_loop():
    Path("held").touch()
    while not Path("let-go").exists():
        pass
"""


async def test_busy_loop_is_named_and_slows_no_other_worker(mesh: Mesh) -> None:
    env = mesh.write_env("holds", HOLDS_THE_LOOP)
    await asyncio.to_thread(mesh.worker, "worker-0", env)
    await asyncio.to_thread(mesh.worker, "worker-1")
    client = mesh.client()
    held = ask(client, num_samples=1, env=env)
    await mesh.until((mesh.folder / "held").exists)
    for _ in range(20):
        ask(client)
    arrivals = await take(client, 20)
    assert {each.worker_id for each in arrivals if isinstance(each, Finished)} == {"worker-1"}
    await mesh.until(
        lambda: "hold_the_loop (holds.py" in mesh.worker_status("worker-0").get("stalled_in", "")
    )
    line = await asyncio.to_thread(mesh.worker_status, "worker-0")
    assert line["state"] == "live"
    (mesh.folder / "let-go").touch()
    [finished] = await take(client)
    assert isinstance(finished, Finished)
    assert (finished.group_id, finished.attempt) == (held, 1)


async def test_stopped_worker_slows_no_other_and_delivers_nothing_twice_when_it_resumes(
    mesh: Mesh,
) -> None:
    stopped = await asyncio.to_thread(mesh.worker, "worker-0")
    client = mesh.client()
    mesh.engine.hold()
    group_ids = [ask(client) for _ in range(4)]
    await mesh.engine.until(lambda: mesh.engine.num_live == 8)
    os.kill(stopped.popen.pid, signal.SIGSTOP)
    try:
        await asyncio.to_thread(mesh.worker, "worker-1")
        await mesh.engine.release()
        arrivals = await take(client, 4)
    finally:
        os.kill(stopped.popen.pid, signal.SIGCONT)
    assert sorted(each.group_id for each in arrivals) == group_ids
    assert {(each.worker_id, each.attempt) for each in arrivals if isinstance(each, Finished)} == {
        ("worker-1", 2)
    }
    await mesh.until(lambda: mesh.worker_status("worker-0").get("state") == "live")
    worker_id = ""
    while worker_id != "worker-0":  # this reason comes last if its loop was blocked recently
        later = ask(client)
        [finished] = await take(client)
        assert isinstance(finished, Finished)
        assert finished.group_id == later
        worker_id = finished.worker_id
    await mesh.until(lambda: mesh.worker_status("worker-0").get("in_flight") == 0)
    await mesh.until(lambda: mesh.worker_status("worker-0").get("unacked_bytes") == 0)


# environment code that misbehaves


ROUGH = """
async def shrug_off():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

async def exit_now():
    sys.exit(3)

class TheEnv(Plain):
    async def run(self, task, agent):
        how = task.data["how"]
        if how == "exits":
            sys.exit(3)
        if how == "exits in a task":
            self.task = asyncio.create_task(exit_now())
            await asyncio.sleep(0.05)
        if how == "swallows its cancellation":
            await shrug_off()
        if how == "leaves a task":
            self.left = asyncio.create_task(shrug_off())
        if how == "leaves a thread":
            threading.Thread(target=threading.Event().wait).start()
        if how == "prints":
            print("x" * 100_000)
        if how == "cancels itself":
            asyncio.current_task().cancel()
            await asyncio.sleep(3600)
        if how == "panics":
            raise BaseException("index out of bounds")
        if how == "stops the loop":
            asyncio.get_running_loop().stop()
        return Transcript(data={"how": how})

    def score(self, task, transcript):
        if transcript.data["how"] == "score blocks":
            threading.Event().wait()
        if transcript.data["how"] == "score exits":
            sys.exit(3)
        return Score(reward=1.0)

    async def close(self):
        await shrug_off()
"""
MISBEHAVIOUR = {
    "exits": Outcome.AGENT_ERROR,
    "exits in a task": Outcome.COMPLETED,
    "swallows its cancellation": Outcome.TRUNCATED,
    "leaves a task": Outcome.COMPLETED,
    "leaves a thread": Outcome.COMPLETED,
    "prints": Outcome.COMPLETED,
    "cancels itself": Outcome.AGENT_ERROR,
    "panics": Outcome.AGENT_ERROR,
    "stops the loop": Outcome.COMPLETED,
    "score blocks": Outcome.INFRA_ERROR,
    "score exits": Outcome.INFRA_ERROR,
}


@pytest.mark.slow
async def test_worker_outlives_environment_code_that_misbehaves(mesh: Mesh) -> None:
    env = mesh.write_env("rough", ROUGH)
    limits = {"run_timeout_s": 0.5, "score_timeout_s": 0.5}
    worker = await asyncio.to_thread(mesh.worker, "worker-0", env, **limits)
    client = mesh.client()
    asked = {ask(client, 1, env, how=how): how for how in MISBEHAVIOUR}
    arrivals = await take(client, len(asked))
    found = {asked[each.group_id]: outcomes(each)[0] for each in arrivals}
    assert found == MISBEHAVIOUR
    ask(client, 1, env, how="well")
    [finished] = await take(client)
    assert isinstance(finished, Finished)
    assert finished.record.rollouts[0].reward == 1.0
    num_failed = sum(each in FAILURES for each in MISBEHAVIOUR.values())
    await mesh.until(lambda: mesh.worker_status("worker-0").get("num_failed") == num_failed)
    line = await asyncio.to_thread(mesh.worker_status, "worker-0")
    assert (line["state"], line["pid"]) == ("live", worker.popen.pid)
    assert line["last_error"].partition(": ")[0] in FAILURES
    place = line["last_place"]
    assert Path(place["file"]).name == "rough.py"
    assert line["last_error"].endswith(f"(rough.py:{place['line']} in {place['function']})")
    assert line["last_task_id"]
    worker.popen.terminate()
    assert await leaves(worker) == INTERRUPTED


CANCELS_ALL = """
class TheEnv(Plain):
    async def run(self, task, agent):
        if task.data["how"] == "cancels all" and not Path("done").exists():
            Path("done").touch()
            for each in asyncio.all_tasks():
                each.cancel()
        while not Path("go").exists():
            await asyncio.sleep(0.01)
        return Transcript()
"""


async def test_groups_of_a_worker_whose_tasks_are_cancelled_run_elsewhere(mesh: Mesh) -> None:
    env = mesh.write_env("cancels", CANCELS_ALL)
    falling = asyncio.ensure_future(ended(mesh.worker_args("worker-0", env), mesh.folder))
    client = mesh.client()
    ask(client, env=env, how="well")
    await mesh.until(lambda: mesh.worker_status("worker-0").get("in_flight") == 2)
    ask(client, env=env, how="cancels all")
    assert (await falling)[0] == 1
    (mesh.folder / "go").touch()
    await asyncio.to_thread(mesh.worker, "worker-1", env)
    for arrival in await take(client, 2):
        assert isinstance(arrival, Finished)
        assert (arrival.worker_id, arrival.attempt) == ("worker-1", 2)
