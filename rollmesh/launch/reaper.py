"""Leaves no process behind: what our children started and did not end becomes ours, and is ended.

Owns the subreaper bit (Linux: orphans are re-parented to us, prctl(2) PR_SET_CHILD_SUBREAPER).
Invariant: processes are ended by pid, found as our descendants, never by name. Driven by the
supervisor: at its start, on every sample, and at its end.
"""

import ctypes
import os
import signal
import sys

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Adopt the orphans among our descendants; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def bury_orphans(own: set[int]) -> None:
    """Reap adopted processes that ended; those in `own` have somebody who waits for them."""
    for child in psutil.Process().children():
        if child.pid not in own and child.status() == psutil.STATUS_ZOMBIE:
            os.waitpid(child.pid, os.WNOHANG)


def kill_descendants() -> int:
    """SIGKILL everything that descends from us, until nothing does; how many there were."""
    killed: set[int] = set()
    while left := living_descendants():
        for process in left:
            killed.add(process.pid)
            kill(process.pid)
        psutil.wait_procs(left, timeout=0.5)
    return len(killed)


def living_descendants() -> list[psutil.Process]:
    """Our children and theirs, without those that only wait to be reaped."""
    living = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
        except psutil.NoSuchProcess:
            continue
    return living


def kill(pid: int) -> None:
    """SIGKILL, if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def signal_group(pid: int, number: int) -> None:
    """A signal to the process group that `pid` leads, if it is still there."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return
