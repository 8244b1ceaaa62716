"""The protocol between launch and its processes, and what forked children close."""

import signal
import subprocess
import sys

import pytest

from rollmesh.core.process import pid_space

ENDS_WITHIN_S = 60.0
LINGERS = """
import asyncio
from rollmesh.core.process import stop_event

async def main():
    stop = stop_event(asyncio.get_running_loop())
    print("serves", flush=True)
    await stop.wait()
    print("drains", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains_and_the_second_ends_at_once(number: signal.Signals) -> None:
    argv = [sys.executable, "-c", LINGERS]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "serves\n"
        process.send_signal(number)
        assert process.stdout.readline() == "drains\n"
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(ENDS_WITHIN_S) == 1


HELD = """
import asyncio, sys
import uvloop
from rollmesh.core.process import stop_event

async def main():
    stop_event(asyncio.get_running_loop())
    print("serves", flush=True)
    while True:  # no other task runs
        pass

run = uvloop.run if sys.argv[1] == "uvloop" else asyncio.run
run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_second_signal_ends_a_process_whose_loop_is_held(loop: str) -> None:
    argv = [sys.executable, "-c", HELD, loop]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "serves\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)  # another, since two of a kind may count as one
        try:
            assert process.wait(ENDS_WITHIN_S) == 1
        finally:
            process.kill()


PRINTS_SPACE = "from rollmesh.core.process import pid_space; print(pid_space())"
PRINT_SPACE = [sys.executable, "-c", PRINTS_SPACE]


def test_processes_that_see_each_others_pids_report_the_same_space() -> None:
    done = subprocess.run(PRINT_SPACE, capture_output=True, text=True, check=True)
    assert done.stdout == f"{pid_space()}\n" != "\n"


def test_a_container_has_its_own_pid_space() -> None:
    argv = ["unshare", "--user", "--pid", "--fork", *PRINT_SPACE]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no namespace of our own: {done.stderr.strip()}")
    space = done.stdout.strip()
    assert space.partition("/")[0] == pid_space().partition("/")[0]
    assert space != pid_space()


PROGRAM = """
import gc, os, socket, weakref
from rollmesh.core.process import close_in_children

def is_over(other):
    other.settimeout(TIMEOUT_S)
    try:
        return other.recv(1) == b""
    except TimeoutError:
        return False

def is_over_while_a_child_runs(is_registered):
    ours, other = socket.socketpair()
    if is_registered:
        close_in_children(ours)
    waiting, release = os.pipe()
    if os.fork() == 0:
        os.close(release)
        os.read(waiting, 1)
        os._exit(0)
    ours.close()
    over = is_over(other)
    os.close(release)
    os.wait()
    return over

TIMEOUT_S = 10
print(is_over_while_a_child_runs(True))
TIMEOUT_S = 0.05
print(is_over_while_a_child_runs(False))
dropped = socket.socket()
close_in_children(dropped)
seen = weakref.ref(dropped)
dropped.close()
del dropped
print(seen())
"""


def test_a_forked_child_closes_only_the_registered_sockets() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False", "None"]
