"""The service's process is restarted whenever it has ended, whatever fails around it."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollmesh.scheduler.nodes.supervisor import ServiceSupervisor

PROMPT_S = 60.0
SERVES = """
import json, os, signal, sys
told = {"role": "scheduler", "pid": os.getpid(), "address": os.getcwd(), "http_address": ""}
with os.fdopen(int(sys.argv[-1]), "w") as pipe:
    print(json.dumps(told), file=pipe)
signal.pause()
"""
"""Its address is its working directory, for a test to see."""
ENDS = """
import pathlib, sys
tries = pathlib.Path("tries")
tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
if len(tries.read_text()) < 3:
    sys.exit("rollmesh: the address is taken")
"""


class Tended:
    """The supervised process, and its faults."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.fault: Exception | None = None
        self.turned = threading.Event()
        self.pid: Callable[[], int] = lambda: 0
        self.pids: list[int] = []

    def __call__(self, address: str) -> None:
        self.addresses.append(address)
        self.pids.append(self.pid())
        self.turned.set()
        if self.fault:
            raise self.fault

    def wait(self) -> None:
        """Wait until it is supervised again."""
        self.turned.clear()
        assert self.turned.wait(PROMPT_S)


@contextmanager
def kept(program: str, folder: Path, tended: Tended) -> Iterator[ServiceSupervisor]:
    supervisor = ServiceSupervisor([sys.executable, "-c", program], folder, tended, check_s=0.05)
    tended.pid = lambda: supervisor.ready.pid if supervisor.ready else 0
    stop = threading.Event()
    thread = threading.Thread(target=supervisor.run, args=(stop,))
    thread.start()
    try:
        yield supervisor
    finally:
        stop.set()
        thread.join(PROMPT_S)
    assert not thread.is_alive()


def test_a_process_that_is_killed_is_started_again_in_its_folder(tmp_path: Path) -> None:
    tended = Tended()
    with kept(SERVES, tmp_path, tended) as supervisor:
        assert supervisor.serves.wait(PROMPT_S)
        tended.wait()
        first = tended.pids[-1]
        os.kill(first, signal.SIGKILL)
        while tended.pids[-1] in (0, first):
            tended.wait()
    assert set(tended.addresses) == {str(tmp_path)}
    with pytest.raises(ProcessLookupError):
        os.kill(tended.pids[-1], 0)  # it ends with its supervisor


def test_a_fault_of_what_is_tended_is_one_warning_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tended = Tended()
    tended.fault = RuntimeError("ray.nodes() is not to be had\nby a long way")
    with kept(SERVES, tmp_path, tended) as supervisor:
        for _ in range(3):
            tended.wait()
        first = tended.pids[-1]
        os.kill(first, signal.SIGKILL)
        while tended.pids[-1] in (0, first):
            tended.wait()
        assert supervisor.last_line == ""
        tended.fault = None
        tended.wait()
        tended.wait()
        tended.fault = OSError("another")
        tended.wait()
        tended.wait()
    result = [line for line in caplog.messages if "supervisor.failed" in line]
    assert [("RuntimeError" in line, "OSError" in line) for line in result] == [
        (True, False),
        (False, True),
    ]


def test_a_service_that_fails_to_start_reports_why_and_is_restarted(tmp_path: Path) -> None:
    tended = Tended()
    with kept(ENDS + SERVES, tmp_path, tended) as supervisor:
        assert supervisor.serves.wait(PROMPT_S)
        assert supervisor.last_line == "rollmesh: the address is taken"
        tended.wait()
    assert (tmp_path / "tries").read_text() == "xxx"


def test_a_program_that_is_not_there_ends_nothing(tmp_path: Path) -> None:
    tended = Tended()
    folder = tmp_path / "comes late"
    with kept(SERVES, folder, tended):
        folder.mkdir()
        tended.wait()
    assert set(tended.addresses) == {str(folder)}
