"""Find processes that tests leave behind, by a mark in their environment.

Children inherit the mark through any number of forks, so that an orphan is found as well.
tests/conftest.py sets it at the start and checks at the end of the run.
"""

import os
import secrets

import psutil

MARK_VARIABLE = "ROLLMESH_TEST_RUN"
# Python's own helper of multiprocessing; it lives as long as the process that uses shared memory.
TOLERATED = "multiprocessing.resource_tracker"
GRACE_S = 2.0


def mark_this_run() -> str:
    """Put a fresh mark into our environment and return it."""
    mark = secrets.token_hex(8)
    os.environ[MARK_VARIABLE] = mark
    return mark


def end_leftovers(mark: str, grace_s: float = GRACE_S) -> list[str]:
    """Kill every other live process that carries `mark`; one line for each.

    A process that is ending by itself gets `grace_s` and is not named.
    """
    _, alive = psutil.wait_procs(_carriers(mark), timeout=grace_s)
    lines = []
    for process in alive:
        try:
            lines.append(f"pid {process.pid}: {' '.join(process.cmdline())[:200]}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return lines


def _carriers(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK_VARIABLE) == mark:
                found.append(process)
        except psutil.Error:
            continue  # gone, a zombie, or another user's
    return [process for process in found if not _is_tolerated(process)]


def _is_tolerated(process: psutil.Process) -> bool:
    try:
        return TOLERATED in " ".join(process.cmdline())
    except psutil.Error:
        return True
