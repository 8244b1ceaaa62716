"""Kill what a process left behind: every process that carries its mark, and unowned shared memory.

- A mark is a path in the environment, such as `a1/worker-0.2`. Child processes inherit it, and may
  lengthen it for their own children.
- Processes are found by their environment in /proc (Linux), whether or not they left their group,
  session or parent, and killed through a pidfd, so a reused pid is safe.
- A process that clears its environment, or that another daemon starts (a container), is missed.
- A file in shared memory is removed if no process holds its lock.
- Run as a program, `orphans.py PID MARK` waits until PID, its parent, has ended, then does both:
  after kill -9 no other process can. It imports little: 11 MB, most of it shared.
"""

import errno
import fcntl
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

MARK_VARIABLE = "ROLLMESH_MARK"
KILL_TIMEOUT_S = 5.0
"""Processes that still fork, or cannot die, after this time are left."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.1
"""Pauses between a kill and the next search."""
READ_BYTES = 2**16
SHARED_MEMORY = "/dev/shm"
"""Linux's folder for files in memory."""


def new_mark(name: str) -> str:
    """Return a new mark, below our own."""
    mark = f"{name}.{os.urandom(4).hex()}"
    return f"{outer}/{mark}" if (outer := os.environ.get(MARK_VARIABLE)) else mark


def mark_self(name: str) -> str:
    """Return our own mark; a process without one executes itself again with one.

    A fork without exec (a multiprocessing pool) shows its parent's initial environment in /proc, so
    a mark that is set later would not be visible there.
    """
    stem = f"{name}-{os.getpid()}."
    mark = os.environ.get(MARK_VARIABLE, "")
    if mark.rpartition("/")[2].startswith(stem):
        return mark
    environment = {**os.environ, MARK_VARIABLE: new_mark(stem.removesuffix("."))}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


_reapers: list["subprocess.Popen[bytes]"] = []
"""They exit after us, so nothing waits for them."""


def start_orphan_reaper(mark: str) -> int:
    """Start an orphan reaper, which kills all processes with `mark` after we have ended, however
    that happens; return its pid.
    """
    argv = [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark]
    # Its own session and no mark: neither Ctrl-C nor another reaper may end it.
    nowhere = subprocess.DEVNULL
    reaper = subprocess.Popen(
        argv, env={}, start_new_session=True, stdin=nowhere, stdout=nowhere, stderr=nowhere
    )
    _reapers.append(reaper)
    return reaper.pid


def kill_marked(mark: str, holds: Callable[[int], bool] | None = None) -> int:
    """SIGKILL all processes that carry `mark` or a longer one, until none is left; return how many
    there were.

    If `holds` is given, only processes whose pid it accepts are killed.
    """
    killed: set[int] = set()
    pause_s, until_s = FIRST_PAUSE_S, time.monotonic() + KILL_TIMEOUT_S
    while time.monotonic() < until_s:
        try:
            if not _kill_once(mark, killed, holds):
                break
        except OSError:  # no descriptor is free for the search; others may be closed soon
            pass
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    return len(killed)


def memory_prefix() -> str:
    """Return the prefix of our user's files in shared memory."""
    return f"rollmesh-{os.getuid()}-"


def sweep_memory(folder: str = SHARED_MEMORY) -> int:
    """Remove files in `folder` whose owners were killed; return how many there were."""
    try:
        names = [name for name in os.listdir(folder) if name.startswith(memory_prefix())]
    except OSError:
        return 0
    return sum(_is_swept(os.path.join(folder, name)) for name in names)


def _is_swept(path: str) -> bool:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except OSError:  # another process has just removed it
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except OSError:  # its owner runs
        return False
    finally:
        os.close(descriptor)
    return True


def _kill_once(mark: str, killed: set[int], holds: Callable[[int], bool] | None) -> bool:
    """Kill those that are found; return whether there were any."""
    is_any = False
    for pid, fd in _open_marked(mark):
        if holds is not None and not holds(pid):
            os.close(fd)
            continue
        is_any = True
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            killed.add(pid)
        except ProcessLookupError:  # it ended after it was found
            pass
        finally:
            os.close(fd)
    return is_any


def _open_marked(mark: str) -> Iterator[tuple[int, int]]:
    """Yield pid and pidfd of each other process that carries `mark`; OSError if no descriptor is
    left.
    """
    if not os.path.isdir("/proc/self"):
        return
    # The end of each rollout scans every process of the machine, so the first check is cheap.
    word = f"{MARK_VARIABLE}={mark}".encode()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid() or not _carries(name, word):
            continue
        try:
            fd = os.pidfd_open(int(name))
        except OSError as error:
            _raise_if_none_left(error)
            continue
        is_marked = False
        try:
            is_marked = _carries(name, word)  # check again: the pid may have been reused
        finally:
            if not is_marked:
                os.close(fd)
        if is_marked:
            yield int(name), fd


def _carries(pid: str, word: bytes) -> bool:
    """Return whether its environment has this mark, or a longer one; False if it is gone or of
    another user.
    """
    try:
        fd = os.open(f"/proc/{pid}/environ", os.O_RDONLY)
    except OSError as error:
        _raise_if_none_left(error)
        return False
    try:
        environment = b"".join(iter(lambda: os.read(fd, READ_BYTES), b""))
    except OSError:
        return False
    finally:
        os.close(fd)
    if word not in environment:
        return False
    return any(each == word or each.startswith(word + b"/") for each in environment.split(b"\0"))


def _raise_if_none_left(error: OSError) -> None:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        raise error


def _main(pid: int, mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if not hasattr(os, "pidfd_open"):  # not Linux: PDEATHSIG does not exist either
        return
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        fd = -1
    if fd >= 0 and os.getppid() == pid:
        ended = select.poll()
        ended.register(fd, select.POLLIN)
        ended.poll()
    kill_marked(mark)
    sweep_memory()


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
