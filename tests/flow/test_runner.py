"""A runner on another node: files that travel to it, logs that travel back, and its own end."""

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from rollmesh.core.orphans import memory_prefix, new_mark
from rollmesh.launch.hosts.base import ChildCallbacks, ChildOrder, RunningChild
from rollmesh.launch.hosts.remote import CommandHost
from rollmesh.launch.hosts.runner import SHARED_FILE

WITHIN_S = 60.0
SHOW = "import os, sys; print(os.environ['KEY_FILE'], open(os.environ['KEY_FILE']).read())"
WAIT = "import signal; signal.pause()"
PASS_THE_GATE = "import os, sys; os.read(int(sys.argv[sys.argv.index('--go-fd') + 1]), 1)"


class Node:
    """A node that a command reaches, and a child on it."""

    def __init__(self, folder: Path) -> None:
        self.logs = folder / "logs"
        self.logs.mkdir()
        self.key = folder / "worker.json"
        self.key.write_text("the secret of the worker")
        self.mark = new_mark("launch")
        self.host = CommandHost(["env"], "node-1", "127.0.0.1", self.logs, self.mark)
        self.started = asyncio.Event()

    def start(self, role: str, program: str, *, has_gate: bool = False) -> RunningChild:
        order = ChildOrder(
            role=role,
            argv=(sys.executable, "-c", program),
            mark=f"{self.mark}/{role}",
            variables={"KEY_FILE": str(self.key)},
            files=(str(self.key),),
            reports=False,
            has_gate=has_gate,
        )
        nothing = lambda *_: None  # noqa: E731 - a callback that ignores its arguments
        hooks = ChildCallbacks(lambda _: self.started.set(), nothing, nothing, nothing)
        return self.host.start(order, hooks)

    def output(self, role: str) -> str:
        return (self.logs / f"{role}.out").read_text()


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    yield node
    await node.host.close()
    assert copies() == []


def copies() -> list[Path]:
    """The copies of key files on this machine."""
    return [*Path("/dev/shm").glob(f"{memory_prefix()}*-worker.json")]


async def test_a_child_reads_a_private_copy_of_its_files(node: Node) -> None:
    exited = await node.start("worker", SHOW).ended()
    assert exited.code == 0
    path, content = node.output("worker").split(maxsplit=1)
    assert path != str(node.key)
    assert content.strip() == node.key.read_text()
    [copy] = copies()
    assert (str(copy), stat.S_IMODE(copy.stat().st_mode)) == (path, 0o600)


async def test_the_end_of_the_output_comes_back_where_the_log_folder_is_not_shared(
    node: Node,
) -> None:
    await node.start("first", SHOW).ended()
    (node.logs / SHARED_FILE).unlink()
    await node.start("worker", SHOW).ended()
    assert node.output("worker").endswith(f"{node.key.read_text()}\n")


async def test_a_killed_runner_takes_its_children_and_copies_along_and_a_new_one_starts(
    node: Node,
) -> None:
    child = node.start("worker", WAIT)
    ending = asyncio.create_task(child.ended())
    await asyncio.wait_for(node.started.wait(), WITHIN_S)
    process = psutil.Process(child.pid)
    os.kill(process.ppid(), signal.SIGKILL)
    exited = await asyncio.wait_for(ending, WITHIN_S)
    assert exited.code == -signal.SIGKILL
    assert exited.cause.startswith("the runner on node-1 ended")
    await asyncio.to_thread(process.wait, WITHIN_S)
    assert (await node.start("worker", "print('again')").ended()).code == 0
    assert node.output("worker") == "again\n"


async def test_a_child_that_is_stopped_before_its_runner_starts_ends_at_once(node: Node) -> None:
    child = node.start("worker", WAIT)
    child.terminate()
    exited = await asyncio.wait_for(child.ended(), WITHIN_S)
    assert (exited.code, exited.cause) == (-signal.SIGTERM, "stopped before it had a place")


async def test_a_gate_that_is_open_before_the_child_starts_is_passed(node: Node) -> None:
    child = node.start("trainer", PASS_THE_GATE, has_gate=True)
    child.release()
    exited = await asyncio.wait_for(child.ended(), WITHIN_S)
    assert exited.code == 0


async def test_a_file_that_cannot_be_read_is_named(node: Node) -> None:
    node.key.unlink()
    with pytest.raises(FileNotFoundError, match=str(node.key)):
        await node.start("worker", WAIT).ended()


async def test_a_program_that_does_not_exist_is_reported(node: Node) -> None:
    order = ChildOrder(role="worker", argv=("/no/such/program",), mark="m", reports=False)
    nothing = lambda *_: None  # noqa: E731 - a callback that ignores its arguments
    exited = await node.host.start(order, ChildCallbacks(*[nothing] * 4)).ended()
    assert exited.last_line.startswith("it could not be started: [Errno 2]")
