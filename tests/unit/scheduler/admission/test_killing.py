"""A pipeline's processes end, with all below them, and nobody else does."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from rollmesh.core.errors import UserError
from rollmesh.core.process import LAUNCHER_VARIABLE
from rollmesh.core.warden import MARK_VARIABLE
from rollmesh.scheduler.admission.killing import WRITTEN_LATE_S, Doomed, end

SAYS_AND_WAITS = "print(__import__('os').getpid(), flush=True); input()"
PARENT = (
    "import subprocess, sys\n"
    f"child = subprocess.Popen([sys.executable, '-c', {SAYS_AND_WAITS!r}],"
    " stdin=subprocess.PIPE, start_new_session=True)\n"
    "child.wait()"
)
ENDS_ITSELF = (
    "import os, socket, time\n"
    "from rollmesh.core.errors import UserError\n"
    "from rollmesh.scheduler.admission.killing import Doomed, end\n"
    "pids, host = (int(os.environ['OTHER']), os.getpid()), socket.gethostname()\n"
    "try:\n"
    "    end([Doomed(pid, time.time(), host) for pid in pids])\n"
    "except UserError as error:\n"
    "    print(error)\n"
)
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """What starts a process that waits for ever."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(
        code: str = SAYS_AND_WAITS, *words: str, **environment: str
    ) -> "subprocess.Popen[bytes]":
        child = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
        )
        started.append(child)
        return child

    yield begin
    for child in started:
        child.kill()
        child.communicate()


def said_pid(child: "subprocess.Popen[bytes]") -> int:
    assert child.stdout is not None
    return int(child.stdout.readline())


def doomed(pid: int, started_s: float | None = None) -> Doomed:
    return Doomed(pid, time.time() if started_s is None else started_s, socket.gethostname())


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_who_is_named_ends_with_all_below_it(start: Start) -> None:
    parent, other = start(PARENT), start()
    grandchild = said_pid(parent)
    said_pid(other)
    assert end([doomed(parent.pid)]) == 2
    assert not is_alive(parent.pid)
    assert not is_alive(grandchild)
    assert is_alive(other.pid)


def test_whoever_carries_the_mark_of_the_run_ends_and_the_outer_mark_is_safe(start: Start) -> None:
    outer = f"test.{os.getpid()}/outer"
    run = f"{outer}/launch.1"
    launch = start(**{MARK_VARIABLE: outer})
    role = start(**{MARK_VARIABLE: f"{run}/router.1", LAUNCHER_VARIABLE: str(launch.pid)})
    lost = start(**{MARK_VARIABLE: f"{run}/worker.2/agent.1"})
    neighbour = start(**{MARK_VARIABLE: f"{outer}/launch.2/router.1"})
    for each in (launch, role, lost, neighbour):
        said_pid(each)
    assert end([doomed(launch.pid), doomed(role.pid)]) == 3
    assert not any(is_alive(each.pid) for each in (launch, role, lost))
    assert is_alive(neighbour.pid)


def test_a_pid_that_was_given_anew_is_let_live(start: Start) -> None:
    other = start()
    said_pid(other)
    long_ago_s = psutil.Process(other.pid).create_time() - 2 * WRITTEN_LATE_S
    assert end([doomed(other.pid, long_ago_s)]) == 0
    assert is_alive(other.pid)


def test_processes_of_another_pipeline_are_not_ended_under_this_name(start: Start) -> None:
    """The GPUs of the one that was named would be called free while it goes on."""
    run = start(SAYS_AND_WAITS, "--scheduler", "tcp://a:1", "--pipeline", "code")
    tool = start(SAYS_AND_WAITS, "--pipeline", "of-something-else")
    said_pid(run)
    said_pid(tool)
    with pytest.raises(UserError, match=rf"pid {run.pid} is of pipeline code, not of math"):
        end([doomed(run.pid)], "math")
    assert is_alive(run.pid)
    assert end([doomed(run.pid), doomed(tool.pid)], "code") == 2


def test_who_is_gone_already_is_no_fault(start: Start) -> None:
    child = start()
    said_pid(child)
    child.kill()
    child.wait()
    assert end([doomed(child.pid)]) == 0


def test_whoever_would_take_us_along_is_not_ended(start: Start) -> None:
    """A shell that has started the fleet as well, say, or the first process of a container."""
    other = start()
    said_pid(other)
    child = start(ENDS_ITSELF, OTHER=str(other.pid))
    out, _ = child.communicate()
    assert b"this admission process is among those" in out
    assert is_alive(other.pid)


def test_processes_of_another_machine_are_not_ours_to_end(start: Start) -> None:
    child = start()
    said_pid(child)
    elsewhere = Doomed(child.pid, time.time(), "another-machine")
    with pytest.raises(UserError, match=r"is on another-machine.*--dead"):
        end([elsewhere])
    assert is_alive(child.pid)
