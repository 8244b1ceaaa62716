"""Ends the processes of a pipeline, all of them, on this machine.

Owns no process. Invariants: a process is ended through a pidfd after a look at when it started, so
a pid that was given anew is safe; whoever carries the mark of the run is ended too, whatever its
parent; `end` returns only when all are gone, for their GPUs are somebody else's then. Driven by the
admission process.
"""

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import psutil

from rollmesh.core.errors import UserError
from rollmesh.core.process import LAUNCHER_VARIABLE
from rollmesh.core.warden import MARK_VARIABLE, kill_marked

WRITTEN_LATE_S = 2.0
"""A process is not the one that was written down if it began so much later than that says."""
GONE_MS = 10_000
SHARE_WORDS = {"--scheduler", "--pipeline"}
"""Who has both is of a run on a fleet."""


class Doomed(msgspec.Struct, frozen=True):
    """A process of the pipeline, as its run's folder names it."""

    pid: int
    started_s: float
    """Unix time."""
    host: str


def end(doomed: list[Doomed], pipeline_id: str = "") -> int:
    """SIGKILL to these, to all below them and to all who carry their run's mark; how many there
    were.

    UserError for processes of another machine or of another pipeline, where we would be among
    them, and where one does not die.
    """
    here = socket.gethostname()
    for each in doomed:
        if each.host != here:
            raise UserError(
                f"pid {each.pid} is on {each.host}, and the admission process on {here}; "
                "end it there, then say --dead"
            )
    alive = [process for each in doomed if (process := _found(each))]
    marks = {mark for process in alive if (mark := _mark_of(process, alive))}
    below = [each for process in alive for each in _below(process)]
    if os.getpid() in {each.pid for each in (*alive, *below)}:
        raise UserError(
            "this admission process is among those, or below one of them; "
            "name the pipeline's own processes by --pid"
        )
    _check_names([*alive, *below], pipeline_id)
    opened = list(_opened([*alive, *below]))
    for _, fd in opened:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    try:
        for pid, fd in opened:
            _wait_for_end(pid, fd)
    finally:
        for _, fd in opened:
            os.close(fd)
    return len(opened) + sum(kill_marked(mark) for mark in sorted(marks))


def _check_names(processes: list[psutil.Process], pipeline_id: str) -> None:
    """UserError where one of them says that it is of another pipeline than this, '' is any."""
    for process in processes:
        named = _pipeline_of(process)
        if pipeline_id and named and named != pipeline_id:
            raise UserError(
                f"pid {process.pid} is of pipeline {named}, not of {pipeline_id}; "
                "name the folder of its own run, or its own processes"
            )


def _pipeline_of(process: psutil.Process) -> str:
    """Whose it is, where its command line says so as launch's do; '' else."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return ""
    options = {word: value for word, value in pairwise(words) if word in SHARE_WORDS}
    return options["--pipeline"] if options.keys() == SHARE_WORDS else ""


def _found(each: Doomed) -> psutil.Process | None:
    """The process that was written down, None if it is gone."""
    try:
        process = psutil.Process(each.pid)
        is_dead = process.status() == psutil.STATUS_ZOMBIE
        is_same = process.create_time() < each.started_s + WRITTEN_LATE_S
        return process if is_same and not is_dead else None
    except psutil.Error:
        return None


def _mark_of(process: psutil.Process, alive: list[psutil.Process]) -> str:
    """The run's mark, which the children of its launch carry, each with a word more; '' else.

    The launch's own is that of whoever started it, who is not to die.
    """
    try:
        environment = process.environ()
    except psutil.Error:
        return ""
    is_child = environment.get(LAUNCHER_VARIABLE) in {str(each.pid) for each in alive}
    return environment.get(MARK_VARIABLE, "").rpartition("/")[0] if is_child else ""


def _below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _opened(processes: list[psutil.Process]) -> Iterator[tuple[int, int]]:
    """Pid and pidfd of those that still are who they were."""
    for pid, process in {each.pid: each for each in processes}.items():
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        if process.is_running():
            yield pid, fd
        else:
            os.close(fd)


def _wait_for_end(pid: int, fd: int) -> None:
    ended = select.poll()
    ended.register(fd, select.POLLIN)
    if not ended.poll(GONE_MS):
        raise UserError(f"pid {pid} does not die; its GPUs stay its own until it has")
