"""Workers as real processes: manual joins, drains, recycling."""

import asyncio
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmesh.core.process import FAILED, INTERRUPTED, RECYCLED
from rollmesh.serve.client.client import Finished
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import AskDrain
from rollmesh.wire.sockets import Dialer
from tests.flow.worker_mesh import PATIENCE_S, Mesh, ask, ended, leaves, open_mesh, take


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with open_mesh(tmp_path) as mesh:
        yield mesh


# recycling and draining


async def test_worker_that_has_run_its_number_of_groups_finishes_and_leaves(mesh: Mesh) -> None:
    worn = await asyncio.to_thread(mesh.worker, "worker-0", recycle_rollouts=4)
    client = mesh.client()
    for _ in range(2):
        ask(client, num_samples=2)
    assert {each.worker_id for each in await take(client, 2) if isinstance(each, Finished)} == {
        "worker-0"
    }
    assert await leaves(worn) == RECYCLED
    assert mesh.last_reason("worker-0") == "recycled: 4 rollouts, worker.recycle_rollouts = 4"
    await asyncio.to_thread(mesh.worker, "worker-0")
    ask(client)
    [finished] = await take(client)
    assert isinstance(finished, Finished)
    assert finished.attempt == 1


async def test_worker_past_its_memory_leaves_with_that_reason(mesh: Mesh) -> None:
    worn = await asyncio.to_thread(mesh.worker, "worker-0", max_rss_bytes=2**20)
    assert await leaves(worn) == RECYCLED
    reason = mesh.last_reason("worker-0")
    assert reason.startswith("recycled: ")
    assert reason.endswith("bytes of memory, worker.max_rss_bytes = 1048576")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["leaves", "is killed"])
async def test_worker_gets_messages_again_when_another_of_its_name_is_gone(
    mesh: Mesh, number: signal.Signals
) -> None:
    mine = await asyncio.to_thread(mesh.worker, "worker-0")
    other = await asyncio.to_thread(mesh.worker, "worker-0")
    await mesh.until(lambda: mesh.worker_status("worker-0").get("pid") == other.popen.pid)
    other.popen.send_signal(number)
    await leaves(other)
    await mesh.until(lambda: mesh.worker_status("worker-0").get("pid") == mine.popen.pid)
    client = mesh.client()
    ask(client)
    [finished] = await take(client)
    assert isinstance(finished, Finished)


LEAKY = """
import resource

class TheEnv(Plain):
    def __init__(self):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        self.taken = []

    async def run(self, task, agent):
        try:
            while task.data.get("leaks"):
                self.taken.append(os.dup(2))
        except OSError:
            pass
        return Transcript()
"""


@pytest.mark.parametrize("leaks_at", [0, 1])
async def test_worker_without_free_file_descriptors_is_recycled(mesh: Mesh, leaks_at: int) -> None:
    """The worker delivers its results, though it may not have connected to their sink before."""
    leaky = mesh.write_env("leaky", LEAKY)
    worn = await asyncio.to_thread(mesh.worker, "worker-0", leaky)
    client = mesh.client()
    for turn in range(leaks_at + 1):
        ask(client, env=leaky, leaks=turn == leaks_at)
        assert isinstance((await take(client))[0], Finished)
    assert await leaves(worn) == RECYCLED
    reason = mesh.last_reason("worker-0")
    assert re.fullmatch(r"recycled: (9.|100)% of the files that it may hold open .*", reason)


async def test_drained_worker_finishes_its_groups_and_leaves(mesh: Mesh) -> None:
    drained = await asyncio.to_thread(mesh.worker, "worker-0")
    client, cli = mesh.client(), Dialer(mesh.router.ready.address, "cli")
    mesh.engine.hold()
    running = ask(client)
    await mesh.engine.until(lambda: mesh.engine.num_live == 2)
    cli.send(Packet(AskDrain(1, "worker-0", "make room")))
    await mesh.until(lambda: mesh.worker_status("worker-0").get("state") == "draining")
    later = ask(client)
    await mesh.engine.release()
    [finished] = await take(client)
    assert isinstance(finished, Finished)
    assert (finished.group_id, finished.attempt) == (running, 1)
    assert await leaves(drained) == 0
    await asyncio.to_thread(mesh.worker, "worker-1")
    [finished] = await take(client)
    assert isinstance(finished, Finished)
    assert (finished.group_id, finished.worker_id) == (later, "worker-1")
    cli.close()


# joining


async def test_worker_that_gets_sigterm_finishes_its_groups(mesh: Mesh) -> None:
    stopped = await asyncio.to_thread(mesh.worker, "worker-0", drain_timeout_s=10 * PATIENCE_S)
    client = mesh.client()
    mesh.engine.hold()
    ask(client)
    await mesh.engine.until(lambda: mesh.engine.num_live > 0)
    stopped.popen.terminate()
    await mesh.until(lambda: mesh.worker_status("worker-0").get("state") == "draining")
    await mesh.engine.release()
    [finished] = await take(client)
    assert isinstance(finished, Finished)
    assert (finished.worker_id, finished.attempt) == ("worker-0", 1)
    assert await leaves(stopped) == INTERRUPTED
    assert mesh.last_reason("worker-0") == "stopped: the worker was stopped"


HOLDS_THE_LOOP = """
class TheEnv(Plain):
    async def run(self, task, agent):
        Path("held").touch()
        while True:
            pass
"""


@pytest.mark.parametrize("is_held", [False, True])
async def test_worker_ends_at_the_second_signal_whatever_it_runs(mesh: Mesh, is_held: bool) -> None:
    env = mesh.write_env("holds", HOLDS_THE_LOOP) if is_held else "echo"
    args = mesh.worker_args("worker-0", env, drain_timeout_s=600.0)
    argv = [sys.executable, "-m", "rollmesh.cli.main", *args]
    worker = await asyncio.create_subprocess_exec(*argv, cwd=mesh.folder)
    client = mesh.client()
    mesh.engine.hold()
    ask(client, env=env)
    if is_held:
        await mesh.until((mesh.folder / "held").exists)
    else:
        await mesh.engine.until(lambda: mesh.engine.num_live == 2)
    worker.send_signal(signal.SIGTERM)
    if not is_held:
        await mesh.until(lambda: mesh.worker_status("worker-0").get("state") == "draining")
    worker.send_signal(signal.SIGINT)  # another signal, since two of a kind may be merged into one
    async with asyncio.timeout(PATIENCE_S):
        assert await worker.wait() == FAILED
    await mesh.until(lambda: not mesh.worker_status("worker-0"))


async def test_worker_joins_without_a_settings_file_under_a_unique_name(mesh: Mesh) -> None:
    args = ["worker", "--router", mesh.router.ready.address, "--env", "echo"]
    args += ["--model-dir", str(mesh.folder / "model"), "--set", "env_settings.num_turns=1"]
    argv = [sys.executable, "-m", "rollmesh.cli.main", *args]
    worker = await asyncio.create_subprocess_exec(*argv, cwd=mesh.folder)
    client = mesh.client()
    ask(client)
    [finished] = await take(client)
    worker.terminate()
    assert await worker.wait() == 0
    assert isinstance(finished, Finished)
    assert finished.worker_id.startswith(f"{socket.gethostname()}-{worker.pid}-")


MISTAKES = [
    (["--env", "echo"], "--model-dir DIR is missing"),
    (["--model-dir", "model"], "--env ENV is missing: name the environment"),
    (["--env", "echo", "--model-dir", "nowhere"], "model.path = nowhere: no such folder"),
    (["--env", "none:Env", "--model-dir", "model"], 'env = "none:Env": module none'),
    (
        ["--env", "echo", "--model-dir", "model", "--router", "localhost:5555"],
        "localhost:5555: ",
    ),
    (
        ["--env", "echo", "--model-dir", "model", "--router", "tcp://10.1.2.3:5555"],
        "tcp://10.1.2.3:5555: connections to another machine need keys; set ROLLMESH_KEYS",
    ),
]


async def test_mistake_in_a_workers_command_line_is_a_one_line_error(mesh: Mesh) -> None:
    router = ["worker", "--router", mesh.router.ready.address]
    found = await asyncio.gather(*(ended([*router, *args], mesh.folder) for args, _ in MISTAKES))
    for (code, err), (_, message) in zip(found, MISTAKES, strict=True):
        assert (code, err.count("\n")) == (2, 1)
        assert err.startswith(f"rollmesh: {message}")


async def test_worker_waits_for_its_router_and_serves_when_it_is_there(mesh: Mesh) -> None:
    address = mesh.router.ready.address
    await asyncio.to_thread(mesh.router.kill)
    await asyncio.to_thread(mesh.worker, "worker-0")
    mesh.router = await asyncio.to_thread(mesh.start_router, address)
    client = mesh.client()
    ask(client)
    [finished] = await take(client)
    assert isinstance(finished, Finished)
