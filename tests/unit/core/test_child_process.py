"""A child process is started, reports that it is ready, and is stopped or killed."""

import asyncio
import os
import signal
import sys

import pytest

from rollmesh.core.child_process import (
    ManagedProcess,
    describe_exit,
    kill_and_wait,
    launched_environment,
    spawn_options,
)
from rollmesh.core.process import LAUNCHER_VARIABLE, Ready

PATIENCE_S = 60.0
REPORTS = """
import signal, sys, time
from rollmesh.core.process import Ready, announce
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
announce(int(sys.argv[3]), Ready("test", 7, "http://h:1"))
time.sleep(600)
"""


def python(code: str, *words: str) -> list[str]:
    return [sys.executable, "-c", code, *words]


def test_an_exit_is_described_by_its_code_or_signal() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "killed by signal 9"


def test_a_child_reports_that_it_is_ready() -> None:
    child = ManagedProcess(python(REPORTS, "polite"), reports=True)
    assert child.wait_ready(PATIENCE_S) == Ready("test", 7, "http://h:1")
    assert child.is_running
    child.stop(PATIENCE_S)
    assert child.wait() == -signal.SIGTERM


def test_a_child_that_ends_without_a_report_is_not_ready() -> None:
    child = ManagedProcess(python("raise SystemExit(3)"), reports=True)
    assert child.wait_ready(PATIENCE_S) is None
    assert child.wait() == 3


def test_a_child_that_ignores_sigterm_is_killed() -> None:
    child = ManagedProcess(python(REPORTS, "stubborn"), reports=True)
    assert child.wait_ready(PATIENCE_S)
    child.stop(0.1)
    assert child.wait() == -signal.SIGKILL


def test_a_child_leads_its_own_session_and_knows_its_launcher() -> None:
    code = f"""
import os
assert os.getsid(0) == os.getpid()
assert os.environ["{LAUNCHER_VARIABLE}"] == str(os.getppid())
"""
    assert ManagedProcess(python(code), environment=launched_environment()).wait() == 0


def test_a_program_that_does_not_exist_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        ManagedProcess(["/no/such/program"], reports=True)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_an_asyncio_child_is_killed_and_a_second_kill_does_nothing() -> None:
    options = spawn_options(stdin=asyncio.subprocess.PIPE)
    process = await asyncio.create_subprocess_exec(*python("input()"), **options)
    await kill_and_wait(process, PATIENCE_S)
    await kill_and_wait(process, PATIENCE_S)
    assert process.returncode == -signal.SIGKILL
