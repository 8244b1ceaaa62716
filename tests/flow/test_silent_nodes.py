"""A node that falls silent is given up by launch, and its runner ends without launch."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rollmesh.core.orphans import new_mark
from rollmesh.launch.hosts.base import ChildCallbacks, ChildOrder, RunningChild
from rollmesh.launch.hosts.remote import RUNNER, CommandHost

LEASE_S = 1.0
pytestmark = pytest.mark.slow


async def test_the_processes_of_a_silent_node_are_reported_as_ended(tmp_path: Path) -> None:
    mark, started = new_mark("test"), asyncio.Event()

    def on_start(child: RunningChild) -> None:
        started.set()

    hooks = ChildCallbacks(on_start, print, print, print)
    argv = (sys.executable, "-c", "import signal; signal.pause()")
    host = CommandHost([], "node-1", "127.0.0.1", tmp_path, mark, lease_s=LEASE_S)
    order = ChildOrder(role="child", argv=argv, mark=f"{mark}/child", reports=False)
    child = host.start(order, hooks)
    ended = asyncio.create_task(child.ended())
    await asyncio.wait_for(started.wait(), 60.0)
    runner = psutil.Process(child.pid).parent()
    assert runner
    runner.send_signal(signal.SIGSTOP)
    exited = await asyncio.wait_for(ended, 60.0)
    assert exited.cause == "node-1 does not answer"
    await host.close()
    assert not runner.is_running()


def test_a_runner_ends_if_launch_is_silent() -> None:
    argv = [sys.executable, *RUNNER, "--address", "127.0.0.1", "--lease-s", str(LEASE_S)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as runner:
        assert runner.stdout
        assert b"runner" in runner.stdout.readline()
        assert runner.wait(60.0) == 0
