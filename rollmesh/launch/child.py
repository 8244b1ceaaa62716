"""One process of the mesh, from its start to its end.

- It leads a session of its own, so that the terminal's Ctrl-C reaches launch alone.
- It dies with launch, and everything it started dies with it.
- Its output goes to `logs/<role>.out`, whose last line says why it ended.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from rollmesh.core.handed import SECRETS_VARIABLE, open_pipe, secrets_in, without_secrets
from rollmesh.core.logs import get_logger
from rollmesh.core.printable import printable
from rollmesh.core.process import BEAT_VARIABLE, LAUNCHER_VARIABLE, Ready
from rollmesh.core.warden import MARK_VARIABLE, kill_marked
from rollmesh.launch.causes import cause_of, num_oom_kills
from rollmesh.launch.machine import Exited
from rollmesh.launch.plan import ChildPlan
from rollmesh.launch.reaper import signal_group

log = get_logger()

LAST_BYTES = 4096
"""Of the output, where its last line is looked for."""


class Hooks(NamedTuple):
    """Callbacks for the events of a child."""

    started: "Callable[[ChildProcess], None]"
    ready: "Callable[[ChildProcess, Ready], None]"
    beaten: "Callable[[ChildProcess], None]"
    """A heartbeat came."""


class Pipe(NamedTuple):
    """A pipe; the child is passed one end by number."""

    reading: BinaryIO
    writing: BinaryIO

    def close(self) -> None:
        """Close both ends; again does nothing."""
        self.reading.close()
        self.writing.close()


def new_pipe() -> Pipe:
    """An unbuffered pipe; its ends reach only the processes that they are passed to."""
    reading, writing = os.pipe()
    return Pipe(os.fdopen(reading, "rb", 0), os.fdopen(writing, "wb", 0))


class BeatReader(asyncio.Protocol):
    """The reading end of a child's heartbeats."""

    def __init__(self, on_beat: Callable[[], None]) -> None:
        self._on_beat = on_beat

    def data_received(self, data: bytes) -> None:
        """One or more heartbeats came."""
        self._on_beat()


class ChildProcess:
    """A process that keeps to the protocol of core/process.py."""

    def __init__(
        self,
        plan: ChildPlan,
        argv: list[str],
        log_folder: Path,
        mark: str,
        variables: Mapping[str, str] = {},
    ) -> None:
        """`argv` is the plan's, with the addresses filled in; `mark` is no other process's;
        `variables` are set in its environment."""
        self.role = plan.role
        self.pid = 0
        """0 before the start and after the end."""
        self._plan = plan
        self._argv = argv
        self._mark = mark
        self._variables = variables
        self._output = log_folder / f"{plan.role}.out"
        self._report = new_pipe()
        self._gate = new_pipe()
        """While our end is open, the child waits."""
        self._beats = new_pipe()
        self._early_signal = 0
        """What it is sent as soon as it has a pid."""

    async def run(self, listening: socket.socket | None, hooks: Hooks) -> Exited:
        """Start it, say so, pass its report on, and return when it and its own have ended."""
        num_oom_kills_before = num_oom_kills()
        try:
            process = await self._start(listening)
            self._report.writing.close()
            self._beats.writing.close()
            self.pid = process.pid
            hooks.started(self)
            if self._early_signal:
                signal_group(self.pid, self._early_signal)
            async with asyncio.TaskGroup() as tasks:
                report = tasks.create_task(self._pass_report(hooks), name=self.role)
                beats, _ = await asyncio.get_running_loop().connect_read_pipe(
                    lambda: BeatReader(lambda: hooks.beaten(self)), self._beats.reading
                )
                code = await process.wait()
                self.pid = 0
                beats.close()
                report.cancel()
        finally:
            self._report.close()
            self._gate.close()
            self._beats.close()
        told = last_line(self._output)
        may_be_oom = num_oom_kills() > num_oom_kills_before
        cause = cause_of(code, told, may_be_oom=may_be_oom)
        num_left = await asyncio.to_thread(kill_marked, self._mark)
        if num_left:
            log.info("leftovers.killed", child=self.role, num_processes=num_left)
        return Exited(self.role, code, told, process.pid, cause)

    def release(self) -> None:
        """Let it go on from its gate."""
        self._gate.writing.close()

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

    async def _start(self, listening: socket.socket | None) -> asyncio.subprocess.Process:
        passed: dict[str, int] = {}
        if self._plan.reports:
            passed["--ready-fd"] = self._report.writing.fileno()
        if self._plan.gate:
            passed["--go-fd"] = self._gate.reading.fileno()
        if listening is not None:
            passed["--listen-fd"] = listening.fileno()
        words = [word for name, number in passed.items() for word in (name, str(number))]
        self._output.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            environment, secrets = self._environment(stack)
            output = stack.enter_context(self._output.open("ab"))
            return await asyncio.create_subprocess_exec(
                *self._argv,
                *words,
                pass_fds=(*passed.values(), self._beats.writing.fileno(), *secrets),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=environment,
            )

    def _environment(self, stack: ExitStack) -> tuple[dict[str, str], tuple[int, ...]]:
        """The child's environment, and the descriptor of its secrets if it takes them so."""
        environment = {
            **os.environ,
            **self._variables,
            LAUNCHER_VARIABLE: str(os.getpid()),
            MARK_VARIABLE: self._mark,
            BEAT_VARIABLE: str(self._beats.writing.fileno()),
        }
        if not self._plan.is_worker:
            return environment, ()
        # Agents run beside a worker, so it keeps no secret in its environment.
        reading = open_pipe(secrets_in(environment))
        stack.callback(os.close, reading)
        return {**without_secrets(environment), SECRETS_VARIABLE: str(reading)}, (reading,)

    async def _pass_report(self, hooks: Hooks) -> None:
        """Hand on the one line that the child writes when it serves, if it ever does."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._report.reading
        )
        try:
            line = await reader.readline()
        finally:
            transport.close()
        if line:
            hooks.ready(self, msgspec.json.decode(line, type=Ready))


def last_line(path: Path) -> str:
    """Return the last line that is not blank, its control characters escaped; '' without one."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - LAST_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:  # the run folder may be removed under us
        return ""
    return next((printable(line.strip()) for line in reversed(lines) if line.strip()), "")
