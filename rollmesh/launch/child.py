"""One process of the mesh, from its start to its end.

Owns the process, its report pipe and the file of its output. Invariants: it leads a session of its
own, so that the terminal's Ctrl-C reaches launch alone; it dies with launch; what it prints goes to
`logs/<role>.out`, whose last line says why it ended. Driven by the supervisor, one task per child.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from rollmesh.core.process import LAUNCHER_VARIABLE, Ready
from rollmesh.launch.machine import Exited
from rollmesh.launch.reaper import signal_group

LAST_BYTES = 4096
"""Of the output, where its last line is looked for."""


class Hooks(NamedTuple):
    """Whom a child's task tells."""

    started: "Callable[[ChildProcess], None]"
    ready: "Callable[[ChildProcess, Ready], None] | None"
    """None for a child that makes no report."""


class ChildProcess:
    """A process that keeps to the protocol of core/process.py."""

    def __init__(self, role: str, argv: list[str], log_folder: Path) -> None:
        self.role = role
        self.pid = 0
        """0 before the start and after the end."""
        self._early_signal = 0
        """What it is sent as soon as it has a pid."""
        self._argv = argv
        self._output = log_folder / f"{role}.out"

    async def run(self, listening: socket.socket | None, hooks: "Hooks") -> Exited:
        """Start it, say so, pass its report on, and return when it has ended."""
        self._output.parent.mkdir(parents=True, exist_ok=True)
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as pipe, self._output.open("ab") as output:
            try:
                process = await self._start(listening, writing if hooks.ready else None, output)
            finally:
                os.close(writing)
            self.pid = process.pid
            hooks.started(self)
            if self._early_signal:
                signal_group(self.pid, self._early_signal)
            async with asyncio.TaskGroup() as tasks:
                report = tasks.create_task(self._pass_report(pipe, hooks), name=self.role)
                code = await process.wait()
                self.pid = 0
                report.cancel()
        return Exited(self.role, code, last_line(self._output))

    async def _start(
        self, listening: socket.socket | None, ready_fd: int | None, output: BinaryIO
    ) -> asyncio.subprocess.Process:
        argv, passed = list(self._argv), []
        if ready_fd is not None:
            argv += ["--ready-fd", str(ready_fd)]
            passed.append(ready_fd)
        if listening is not None:
            argv += ["--listen-fd", str(listening.fileno())]
            passed.append(listening.fileno())
        return await asyncio.create_subprocess_exec(
            *argv,
            pass_fds=passed,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, LAUNCHER_VARIABLE: str(os.getpid())},
        )

    async def _pass_report(self, pipe: BinaryIO, hooks: "Hooks") -> None:
        """Hand on the one line that the child writes when it serves, if it ever does."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            line = await reader.readline()
        finally:
            transport.close()
        if line and hooks.ready:
            hooks.ready(self, msgspec.json.decode(line, type=Ready))

    def tell(self) -> None:
        """Ask it to stop."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and its process group."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.pid:
            signal_group(self.pid, number)
        else:
            self._early_signal = number


def last_line(path: Path) -> str:
    """The last line that is not blank; '' if there is none."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - LAST_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
