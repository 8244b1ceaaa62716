"""The end of a local worker's process is noticed without a message from it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from rollmesh.serve.router.process import CAUSE, LocalPids
from rollmesh.wire.messages import WorkerExited, WorkerHello


@pytest.fixture
def pids() -> Iterator[LocalPids]:
    with closing(LocalPids("here")) as watched:
        yield watched


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-c", "input()"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def hello(pid: int, space: str = "here") -> WorkerHello:
    return WorkerHello("w0", "guess", 8, pid, "host", pid_space=space)


def test_an_exit_is_reported_once_and_one_check_late(
    pids: LocalPids, child: "subprocess.Popen[bytes]"
) -> None:
    pids.watch(hello(child.pid))
    pids.watch(hello(child.pid))
    assert pids.take_ended() == []
    child.kill()
    child.wait()
    sends = [pids.take_ended() for _ in range(4)]
    assert sends == [[], [WorkerExited("w0", child.pid, CAUSE)], [], []]


def test_a_zombie_process_has_ended(pids: LocalPids, child: "subprocess.Popen[bytes]") -> None:
    pids.watch(hello(child.pid))
    child.kill()
    # The child is not waited for, so it stays a zombie.
    while not (ended := pids.take_ended()):
        pass
    assert ended == [WorkerExited("w0", child.pid, CAUSE)]


@pytest.mark.parametrize("pid", [0, -1, 2**31 - 1, 2**80])
def test_a_pid_without_a_process_is_not_watched(pids: LocalPids, pid: int) -> None:
    pids.watch(hello(pid))
    assert pids.take_ended() == pids.take_ended() == []


@pytest.mark.parametrize("space", ["there", ""])
@pytest.mark.parametrize("ours", ["here", ""])
def test_a_worker_of_another_container_with_the_same_host_name_is_not_watched(
    child: "subprocess.Popen[bytes]", ours: str, space: str
) -> None:
    with closing(LocalPids(ours)) as pids:
        pids.watch(hello(child.pid, space))
        child.kill()
        child.wait()
        assert pids.take_ended() == pids.take_ended() == []


@pytest.mark.parametrize("num_looks", [0, 1])
def test_an_exit_whose_cause_was_reported_is_not_reported_again(
    pids: LocalPids, child: "subprocess.Popen[bytes]", num_looks: int
) -> None:
    pids.watch(hello(child.pid))
    child.kill()
    child.wait()
    for _ in range(num_looks):
        assert pids.take_ended() == []
    pids.forget(WorkerExited("w0", child.pid, "killed by signal 9"))
    assert [pids.take_ended() for _ in range(3)] == [[], [], []]
