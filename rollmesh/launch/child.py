"""One process of the mesh, from its start to its exit, and the cleanup of what it leaves behind.

- A child leads its own session, so that the terminal's Ctrl-C reaches launch alone.
- It dies with launch, and everything it started dies with it: launch is a subreaper (Linux:
  prctl(2) PR_SET_CHILD_SUBREAPER) and ends its descendants by pid, never by name.
- Its output goes to `logs/<role>.out`, whose last line says why it ended.
- "Out of memory" is reported only where the kernel counted an OOM kill (memory.events of cgroup v2,
  else /proc/vmstat) or Python raised MemoryError.
"""

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import psutil

from rollmesh.core.child_process import (
    describe_exit,
    launched_environment,
    open_output,
    spawn_options,
)
from rollmesh.core.logs import get_logger
from rollmesh.core.orphans import MARK_VARIABLE, kill_marked
from rollmesh.core.process import BEAT_VARIABLE, Ready, http_address
from rollmesh.core.secret_files import (
    SECRETS_VARIABLE,
    open_secrets_pipe,
    secrets_in,
    without_secrets,
)
from rollmesh.core.text import printable
from rollmesh.launch.hosts.base import ChildCallbacks, ChildOrder
from rollmesh.launch.machine import OUT_OF_MEMORY, ChildExited


def num_oom_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many processes the kernel has killed for lack of memory, in our cgroup or else on
    the machine.
    """
    for file in (*_events_files(proc, cgroups), proc / "vmstat"):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def exit_cause(code: int, last_line: str, *, may_be_oom: bool) -> str:
    """Return the cause of an exit; `code` is negative for a signal, as in Popen.returncode."""
    if last_line.startswith("MemoryError") or (code == -signal.SIGKILL and may_be_oom):
        return OUT_OF_MEMORY
    return describe_exit(code)


def _events_files(proc: Path, cgroups: Path) -> list[Path]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    # cgroup v2 has one line, `0::/path`; v1 has no memory.events file.
    paths = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    return [cgroups / path / "memory.events" for path in paths]


_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Adopt the orphans among our descendants (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(own: set[int]) -> None:
    """Reap adopted processes that ended; those in `own` have an owner that waits for them."""
    for child in psutil.Process().children():
        if child.pid not in own and child.status() == psutil.STATUS_ZOMBIE:
            os.waitpid(child.pid, os.WNOHANG)


def kill_descendants() -> int:
    """SIGKILL all our descendants until none is left; return how many there were."""
    killed: set[int] = set()
    while left := living_descendants():
        for process in left:
            killed.add(process.pid)
            kill(process.pid)
        psutil.wait_procs(left, timeout=0.5)
    return len(killed)


def living_descendants() -> list[psutil.Process]:
    """Return our descendants, except zombies."""
    living = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
        except psutil.NoSuchProcess:
            continue
    return living


def kill(pid: int) -> None:
    """SIGKILL the process if it still exists."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def signal_group(pid: int, number: int) -> None:
    """Send a signal to the process group that `pid` leads, if it still exists."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


log = get_logger()

LAST_BYTES = 4096
"""Size of the tail of the output in which the last line is searched."""


class Pipe(NamedTuple):
    """A pipe; the child is passed one end by number."""

    reading: BinaryIO
    writing: BinaryIO

    def close(self) -> None:
        """Close both ends; a second call does nothing."""
        self.reading.close()
        self.writing.close()


def new_pipe() -> Pipe:
    """Return an unbuffered pipe; only processes that are passed its ends inherit them."""
    reading, writing = os.pipe()
    return Pipe(os.fdopen(reading, "rb", 0), os.fdopen(writing, "wb", 0))


class HeartbeatReader(asyncio.Protocol):
    """The reading end of a child's heartbeats."""

    def __init__(self, on_beat: Callable[[], None]) -> None:
        self._on_beat = on_beat

    def data_received(self, data: bytes) -> None:
        """Handle one or more heartbeats."""
        self._on_beat()


class ChildProcess:
    """A RunningChild of this process, which follows the protocol of core/process.py."""

    def __init__(
        self,
        order: ChildOrder,
        output: Path,
        listening: socket.socket | None,
        hooks: ChildCallbacks,
    ) -> None:
        """Its output is appended to the file `output`; it serves on the socket, if there is one."""
        self.role = order.role
        self.host = ""
        self.pid = 0
        self.address = http_address(listening) if listening else ""
        self._order = order
        self._output = output
        self._listening = listening
        self._hooks = hooks
        self._report = new_pipe()
        self._gate = new_pipe()
        """While our end is open, the child waits."""
        self._beats = new_pipe()
        self._early_signal = 0
        """A signal to send as soon as the process exists."""

    async def ended(self) -> ChildExited:
        """Start the process, forward its report, and return when it and its descendants have
        ended; OSError if it cannot be started.
        """
        num_oom_kills_before, hooks = num_oom_kills(), self._hooks
        try:
            process = await self._start()
            self._report.writing.close()
            self._beats.writing.close()
            self.pid = process.pid
            hooks.started(self)
            if self._early_signal:
                signal_group(self.pid, self._early_signal)
            async with asyncio.TaskGroup() as tasks:
                report = tasks.create_task(self._pass_report(), name=self.role)
                beats, _ = await asyncio.get_running_loop().connect_read_pipe(
                    lambda: HeartbeatReader(lambda: hooks.heartbeat(self)), self._beats.reading
                )
                code = await process.wait()
                self.pid = 0
                beats.close()
                report.cancel()
        finally:
            self._report.close()
            self._gate.close()
            self._beats.close()
        last = last_line(self._output)
        may_be_oom = num_oom_kills() > num_oom_kills_before
        cause = exit_cause(code, last, may_be_oom=may_be_oom)
        num_left = await asyncio.to_thread(kill_marked, self._order.mark)
        if num_left:
            log.info("leftovers.killed", child=self.role, num_processes=num_left)
        return ChildExited(self.role, code, last, process.pid, cause)

    def release(self) -> None:
        """Open its gate."""
        self._gate.writing.close()

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill its process group."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.pid:
            signal_group(self.pid, number)
        else:
            self._early_signal = number

    async def _start(self) -> asyncio.subprocess.Process:
        passed: dict[str, int] = {}
        if self._order.reports:
            passed["--ready-fd"] = self._report.writing.fileno()
        if self._order.has_gate:
            passed["--go-fd"] = self._gate.reading.fileno()
        if self._listening is not None:
            passed["--listen-fd"] = self._listening.fileno()
        options = [word for name, number in passed.items() for word in (name, str(number))]
        with ExitStack() as stack:
            environment, secrets = self._environment(stack)
            output = stack.enter_context(open_output(self._output))
            return await asyncio.create_subprocess_exec(
                *self._order.argv,
                *options,
                **spawn_options(
                    pass_fds=(*passed.values(), self._beats.writing.fileno(), *secrets),
                    stdout=output,
                    stderr=output,
                    environment=environment,
                    folder=Path(self._order.folder) if self._order.folder else None,
                ),
            )

    def _environment(self, stack: ExitStack) -> tuple[dict[str, str], tuple[int, ...]]:
        """Return the child's environment, and the descriptor of its secrets if it reads them from
        one.
        """
        environment = {
            **launched_environment(self._order.variables),
            MARK_VARIABLE: self._order.mark,
            BEAT_VARIABLE: str(self._beats.writing.fileno()),
        }
        if not self._order.is_worker:
            return environment, ()
        # Agents run beside a worker, so its environment contains no secrets.
        reading = open_secrets_pipe(secrets_in(environment))
        stack.callback(os.close, reading)
        return {**without_secrets(environment), SECRETS_VARIABLE: str(reading)}, (reading,)

    async def _pass_report(self) -> None:
        """Forward the one line that the child writes when it is ready, if it ever does."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._report.reading
        )
        try:
            line = await reader.readline()
        finally:
            transport.close()
        if line:
            self._hooks.ready(self, msgspec.json.decode(line, type=Ready))


def last_line(path: Path) -> str:
    """Return the last line that is not blank, with control characters escaped; '' if there is
    none.
    """
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - LAST_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:  # the run folder may be removed during the run
        return ""
    return next((printable(line.strip()) for line in reversed(lines) if line.strip()), "")
