"""Every process with a mark is found and killed; others are left alone."""

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

from rollmesh.core import orphans
from rollmesh.core.orphans import MARK_VARIABLE, kill_marked, new_mark

ENDS_WITHIN_S = 60.0
SLEEPS = "import signal; print(flush=True); signal.pause()"
# Leaves its group, session and parent, as a tmux server does, and prints its pid.
DAEMON = """
import os, signal
if os.fork():
    signal.pause()
os.setsid()
if os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
signal.pause()
"""


@contextmanager
def running(code: str, mark: str) -> Iterator["subprocess.Popen[str]"]:
    environment = {**os.environ, MARK_VARIABLE: mark}
    argv = [sys.executable, "-c", code]
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process
        finally:
            process.kill()


def ends(*pids: int) -> bool:
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(left, timeout=ENDS_WITHIN_S)
    return not alive


def test_a_daemon_is_ended_with_the_process_that_started_it() -> None:
    mark = new_mark("test")
    with running(DAEMON, f"{mark}/worker") as process:
        assert process.stdout
        daemon = int(process.stdout.readline())
        assert kill_marked(mark) >= 2
        assert ends(daemon)
        assert process.wait(ENDS_WITHIN_S) == -9


def test_a_longer_mark_with_the_same_prefix_is_another_mark() -> None:
    mark = new_mark("test")
    with running(SLEEPS, f"{mark}1") as process:
        assert process.stdout
        process.stdout.readline()
        assert kill_marked(mark) == 0
        assert process.poll() is None
        assert kill_marked(f"{mark}1") == 1


def test_a_mark_is_nested_below_the_mark_of_its_creator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK_VARIABLE, "outer.1")
    assert new_mark("worker").startswith("outer.1/worker.")
    assert new_mark("worker") != new_mark("worker")


GUARDED = f"""
import os, signal, subprocess, sys
sys.path[:0] = [{os.getcwd()!r}]
from rollmesh.core.orphans import start_orphan_reaper
reaper = start_orphan_reaper(sys.argv[1])
child = subprocess.Popen(
    [sys.executable, "-c", {DAEMON!r}], stdout=subprocess.PIPE, text=True,
    start_new_session=True, env={{**os.environ, {MARK_VARIABLE!r}: sys.argv[1]}},
)
print(child.pid, child.stdout.readline().strip(), reaper, flush=True)
signal.pause()
"""


def test_kill_9_of_a_guarded_process_ends_its_descendants_and_its_reaper() -> None:
    mark = new_mark("test")
    argv = [sys.executable, "-c", GUARDED, mark]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        child, daemon, reaper = map(int, process.stdout.readline().split())
        assert all(psutil.pid_exists(pid) for pid in (child, daemon, reaper))
        process.kill()
    assert ends(child, daemon, reaper)


def test_an_orphan_reaper_does_not_wait_for_a_process_that_is_already_gone() -> None:
    argv = [sys.executable, "-I", "-S", orphans.__file__, "999999999", new_mark("test")]
    assert subprocess.run(argv, env={}, timeout=ENDS_WITHIN_S, check=False).returncode == 0


def test_a_process_that_ends_before_its_kill_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mark = new_mark("test")
    send = signal.pidfd_send_signal
    with running(SLEEPS, mark) as first, running(SLEEPS, mark) as second:
        for process in (first, second):
            assert process.stdout
            process.stdout.readline()

        def too_late_for_the_first(pidfd: int, number: int) -> None:
            first.kill()
            first.wait()
            send(pidfd, number)

        monkeypatch.setattr(signal, "pidfd_send_signal", too_late_for_the_first)
        assert kill_marked(mark) == 1
        assert second.wait(ENDS_WITHIN_S) == -9


FORKS = """
import os, signal
for _ in range(300):
    if not os.fork():
        signal.pause()
print(flush=True)
signal.pause()
"""


def two_of(taken: list[int]) -> tuple[int, int]:
    """Remove two adjacent descriptors from the list; return their range."""
    last = taken.pop()
    return taken.pop(), last + 1


@pytest.mark.parametrize("num_left", [3, 0])
def test_a_process_with_few_free_descriptors_kills_many(num_left: int) -> None:
    """Without a free descriptor, kill_marked waits until one is closed."""
    mark = new_mark("test")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with running(FORKS, mark) as process:
        assert process.stdout
        process.stdout.readline()
        highest = max(map(int, os.listdir("/proc/self/fd")))
        # At least two are taken, whichever number the listing itself had.
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, limits[1]))
        taken = []
        try:
            with suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            for _ in range(num_left):
                os.close(taken.pop())
            closer = threading.Timer(0.3, lambda: os.closerange(*two_of(taken)))
            closer.start()
            assert kill_marked(mark) == 301
            closer.join()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for each in taken:
                os.close(each)
        assert kill_marked(mark) == 0


HOLDS_MEMORY = f"""
import signal, sys
sys.path[:0] = [{os.getcwd()!r}]
from pathlib import Path
from rollmesh.core.orphans import start_orphan_reaper
from rollmesh.tensors.segment import SHARED_MEMORY, Segment
reaper = start_orphan_reaper(sys.argv[1])
segment = Segment(SHARED_MEMORY, 4096)
print(reaper, segment.path, flush=True)
signal.pause()
"""


def test_kill_9_of_a_guarded_process_leaves_no_shared_memory() -> None:
    argv = [sys.executable, "-c", HOLDS_MEMORY, new_mark("test")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        pid, path = process.stdout.readline().split()
        assert os.path.exists(path)
        process.kill()
    assert ends(int(pid))
    assert not os.path.exists(path)
