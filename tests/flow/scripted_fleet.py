"""A scheduler on this machine, and scripted pipelines that share its four slots.

The pipelines' messages arrive in one stream of lines. Every started process is ended, also after an
error.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec
import psutil

from rollmesh.core.ids import new_id
from rollmesh.scheduler.admission.transport import ask_scheduler
from rollmesh.scheduler.service.explain import FleetExplanation
from rollmesh.testing.pipeline import Ended, StepDone
from rollmesh.wire.scheduling import ReadScheduler
from tests.ports import free_ports

ENDS_WITHIN_S = 60.0
HEAD = """
bind = "tcp://127.0.0.1:{}"
http_bind = "127.0.0.1:{}"
journal = "{}"

[fair]
quantum_s = 2.0
hold_s = 0.5
switch_s = 0.5

[service]
resize_deadline_s = 8.0
turn_s = 2.0
slack_s = 2.0
settle_s = 1.0

[[nodes]]
name = "here"
gpus = 4
"""
PIPELINE = """
[pipelines.{}]
clusters.actor_train = {}
generation = [0, 1, 2, 3]
"""


class ScriptedFleet:
    """`rollmesh scheduler up`, and the pipelines that were started on it."""

    def __init__(self, folder: Path, trains_on: dict[str, list[int]]) -> None:
        ports = free_ports(2)
        self.address = f"tcp://127.0.0.1:{ports[0]}"
        self._tokens = folder / "scheduler" / "tokens"
        file = folder / "scheduler.toml"
        pipelines = [PIPELINE.format(*each) for each in trains_on.items()]
        file.write_text(HEAD.format(*ports, folder / "scheduler") + "".join(pipelines))
        reading, self._writing = os.pipe()
        self._lines = os.fdopen(reading, "rb")
        self._processes: list[subprocess.Popen[bytes]] = []
        args = ("scheduler", "up", "--no-keys", str(file))
        command = [sys.executable, "-m", "rollmesh.cli.main", *args]
        self._up = self._start(command, subprocess.PIPE)
        assert self._up.stdout
        self._up.stdout.readline()  # all pipelines are registered by then

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes; clean up after killed ones."""
        for process in reversed(self._processes):
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        assert self._up.stdout
        self._up.stdout.close()
        self._lines.close()

    def begin(self, pipeline: str, *args: str) -> subprocess.Popen[bytes]:
        """Start one pipeline with these options."""
        command = [sys.executable, "-m", "rollmesh.testing.pipeline", "--pipeline", pipeline]
        share = ("--scheduler", self.address, "--pipeline-token", str(self._tokens / pipeline))
        return self._start([*command, *share, *args], self._writing)

    def lines(self) -> Iterator[StepDone | Ended]:
        """Yield the pipelines' lines until all have ended; start them before."""
        os.close(self._writing)
        for line in self._lines:
            yield msgspec.json.decode(line, type=StepDone | Ended)

    def kill_scheduler(self) -> None:
        """Kill the scheduler (-9) once it serves; its parent restarts it."""
        self.view()
        for child in psutil.Process(self._up.pid).children():
            if "serve" in child.cmdline():
                os.kill(child.pid, signal.SIGKILL)

    def view(self) -> FleetExplanation:
        """The scheduler's explanation of the fleet."""
        answer = ask_scheduler(
            self.address, ReadScheduler(new_id("read")), patience_s=ENDS_WITHIN_S
        )
        return msgspec.json.decode(answer.body, type=FleetExplanation)

    def _start(self, command: list[str], stdout: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command, stdout=stdout, start_new_session=True)
        self._processes.append(process)
        return process
