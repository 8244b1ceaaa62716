"""The runner: a process on another node that starts and watches children there for launch.

    launch --RunnerRequest lines--> stdin   runner   stdout --RunnerEvent lines--> launch

- Lines are JSON. The children are those of launch/child.py: they follow the protocol of
  core/process.py, and everything that they start ends with them.
- When stdin ends, so do the children: the connection is the launcher's life sign. With --lease-s
  so does a silent connection: another node may have started the children again. Signals are
  ignored, since a cluster's manager sends them to launch too, which stops the children in order.
- Files that a child reads (its keys, the settings) arrive by content. They are 0600, in memory, and
  locked: if the runner is killed, its orphan reaper removes them.
- A child writes to the run's log folder if that is shared; otherwise the end of its output travels
  with the report of its exit.
"""

import argparse
import asyncio
import fcntl
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from pathlib import Path

import msgspec

from rollmesh.core.errors import AddressError
from rollmesh.core.orphans import (
    SHARED_MEMORY,
    mark_self,
    memory_prefix,
    start_orphan_reaper,
    sweep_memory,
)
from rollmesh.core.process import FAILED, Ready, listen, reserve
from rollmesh.launch.child import ChildProcess, become_subreaper, kill_descendants
from rollmesh.launch.hosts.base import ChildCallbacks, ChildOrder, RunningChild
from rollmesh.launch.machine import ChildExited

MAX_LINE_BYTES = 2**26
OUTPUT_BYTES = 2**16
"""The part of a child's output that is sent if its log folder is not shared."""
SHARED_FILE = ".shared"
"""In the log folder: a random text that shows a runner that it sees launch's folder."""


class StartOrder(msgspec.Struct, frozen=True, tag="start"):
    """Start a child."""

    order: ChildOrder
    contents: dict[str, bytes]
    """By path on the launcher's machine: the files of the order."""
    python: str
    """The launcher's interpreter; the runner's takes its place in the arguments."""
    logs: str
    """The run's log folder."""
    log_token: str
    """The content of SHARED_FILE there."""


class ReleaseOrder(msgspec.Struct, frozen=True, tag="release"):
    """Open a child's gate."""

    role: str


class SignalOrder(msgspec.Struct, frozen=True, tag="signal"):
    """Send SIGTERM to a child, or SIGKILL to it and all that it started."""

    role: str
    kill: bool


class PingRequest(msgspec.Struct, frozen=True, tag="ping"):
    """Launch runs; the runner answers with a RunnerAlive."""


RunnerRequest = StartOrder | ReleaseOrder | SignalOrder | PingRequest


class RunnerStarted(msgspec.Struct, frozen=True, tag="runner"):
    """The first line of a runner."""

    host: str
    pid: int


class ProcessStarted(msgspec.Struct, frozen=True, tag="started"):
    """A child's process runs."""

    role: str
    pid: int
    address: str


class ProcessReady(msgspec.Struct, frozen=True, tag="reported"):
    """A child is ready."""

    role: str
    ready: Ready


class ProcessBeat(msgspec.Struct, frozen=True, tag="beat"):
    """A child sent a heartbeat."""

    role: str


class ProcessEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A child has ended, or could not be started."""

    exited: ChildExited
    output: bytes = b""
    """The end of its output, if its log is not in the launcher's folder."""


class RunnerAlive(msgspec.Struct, frozen=True, tag="alive"):
    """The answer to a PingRequest."""


RunnerEvent = (
    RunnerAlive | RunnerStarted | ProcessStarted | ProcessReady | ProcessBeat | ProcessEnded
)


class ChildRunner:
    """The children of one runner."""

    def __init__(
        self, address: str, mark: str, writer: asyncio.StreamWriter, lease_s: float = 0.0
    ) -> None:
        """Children listen on `address`; `mark` is that of this process. They end after `lease_s`
        without a request; 0: never.
        """
        self.is_lost = False
        """Whether launch was silent for too long."""
        self._lease_s = lease_s or None
        self._address = address
        self._mark = mark
        self._writer = writer
        self._children: dict[str, ChildProcess] = {}
        self._sockets: dict[str, socket.socket] = {}
        self._copies: dict[bytes, Path] = {}
        """By content, since a restarted child reads the same files."""
        self._locks: list[int] = []
        """Open descriptors of the copies."""
        self._folder = Path(tempfile.mkdtemp(prefix="rollmesh-runner-"))
        self._num_started = 0

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Carry out requests until the connection ends, then end the children."""
        self._send(RunnerStarted(socket.gethostname(), os.getpid()))
        try:
            async with asyncio.TaskGroup() as tasks:
                while line := await self._next_line(reader):
                    self._handle(msgspec.json.decode(line, type=RunnerRequest), tasks)
                kill_descendants()
        finally:
            kill_descendants()
            self.close()

    async def _next_line(self, reader: asyncio.StreamReader) -> bytes:
        """Return the next request; b"" once the connection has ended or was silent for too long."""
        try:
            async with asyncio.timeout(self._lease_s):
                return await reader.readline()
        except TimeoutError:
            self.is_lost = True
            return b""

    def close(self) -> None:
        """Remove the copies of files."""
        for copy in self._copies.values():
            copy.unlink(missing_ok=True)
        for descriptor in self._locks:
            os.close(descriptor)
        for listening in self._sockets.values():
            listening.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _handle(self, request: RunnerRequest, tasks: asyncio.TaskGroup) -> None:
        match request:
            case StartOrder():
                self._start(request, tasks)
            case PingRequest():
                self._send(RunnerAlive())
            case ReleaseOrder(role) if role in self._children:
                self._children[role].release()
            case SignalOrder(role, kill) if role in self._children:
                if kill:
                    self._children[role].kill()
                else:
                    self._children[role].terminate()

    def _start(self, start: StartOrder, tasks: asyncio.TaskGroup) -> None:
        """Start a child; the next request may already be about it."""
        role = start.order.role
        output = self._log_folder(start) / f"{role}.out"
        hooks = ChildCallbacks(self._on_start, self._on_ready, self._on_heartbeat, _never_pending)
        try:
            listening = self._listening(start.order)
            child = ChildProcess(self._local(start), output, listening, hooks)
        except (OSError, AddressError) as error:
            self._send(ProcessEnded(_not_started(role, error)))
            return
        self._children[role] = child
        tasks.create_task(self._run_child(child, output), name=role)

    async def _run_child(self, child: ChildProcess, output: Path) -> None:
        role = child.role
        try:
            exited = await child.ended()
        except OSError as error:
            exited = _not_started(role, error)
        finally:
            del self._children[role]
        is_shared = output.parent != self._folder
        self._send(ProcessEnded(exited, b"" if is_shared else _end_of(output)))

    def _log_folder(self, start: StartOrder) -> Path:
        try:
            token = (Path(start.logs) / SHARED_FILE).read_text()
        except OSError:
            token = ""
        return Path(start.logs) if token and token == start.log_token else self._folder

    def _listening(self, order: ChildOrder) -> socket.socket | None:
        """Return the child's socket, which a restarted child gets again."""
        if order.bind and order.role not in self._sockets:
            bind = order.bind.replace("{host}", self._address)
            self._sockets[order.role] = listen(bind) if order.listens else reserve(bind)
        return self._sockets.get(order.role)

    def _local(self, start: StartOrder) -> ChildOrder:
        """Return the order with the paths and the address of this node."""
        order = start.order
        words = {path: self._copy(path, raw) for path, raw in start.contents.items()}
        words |= {start.python: sys.executable}
        self._num_started += 1
        return msgspec.structs.replace(
            order,
            argv=tuple(words.get(w, w.replace("{host}", self._address)) for w in order.argv),
            variables={name: words.get(value, value) for name, value in order.variables.items()},
            mark=f"{self._mark}/{order.role}.{self._num_started}",
            folder=order.folder if os.path.isdir(order.folder) else "",
        )

    def _copy(self, path: str, raw: bytes) -> str:
        if raw not in self._copies:
            folder = Path(SHARED_MEMORY) if os.path.isdir(SHARED_MEMORY) else self._folder
            copy = folder / f"{memory_prefix()}{secrets.token_hex(4)}-{Path(path).name}"
            descriptor = os.open(copy, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            self._locks.append(descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with open(descriptor, "wb", closefd=False) as file:
                file.write(raw)
            self._copies[raw] = copy
        return str(self._copies[raw])

    def _on_start(self, child: RunningChild) -> None:
        self._send(ProcessStarted(child.role, child.pid, child.address))

    def _on_ready(self, child: RunningChild, ready: Ready) -> None:
        self._send(ProcessReady(child.role, ready))

    def _on_heartbeat(self, child: RunningChild) -> None:
        self._send(ProcessBeat(child.role))

    def _send(self, event: RunnerEvent) -> None:
        self._writer.write(msgspec.json.encode(event) + b"\n")


def _not_started(role: str, error: Exception) -> ChildExited:
    return ChildExited(role, FAILED, f"it could not be started: {error}")


def _never_pending(child: RunningChild, why: str) -> None:
    """Do nothing: this machine always has a place."""
    del child, why


def _end_of(output: Path) -> bytes:
    try:
        with output.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - OUTPUT_BYTES))
            return file.read()
    except OSError:
        return b""


async def serve(address: str, mark: str, output: int, lease_s: float = 0.0) -> bool:
    """Run a runner on stdin and the descriptor `output`; return whether launch was lost."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, bool)
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(output, "wb", 0)
    )
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    runner = ChildRunner(address, mark, writer, lease_s)
    await runner.run(reader)
    return runner.is_lost


def main(argv: list[str] | None = None) -> bool:
    """Run a runner until its connection ends; return whether launch was lost."""
    arguments = argparse.ArgumentParser(prog="runner", allow_abbrev=False)
    arguments.add_argument("--address", required=True, help="address of this node for the others")
    arguments.add_argument(
        "--lease-s", type=float, default=0.0, help="end after so many seconds without a request"
    )
    options = arguments.parse_args(argv)
    mark = mark_self("runner")
    # Lines of libraries belong to the log, not to the connection.
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    become_subreaper()
    start_orphan_reaper(mark)
    sweep_memory()
    return asyncio.run(serve(options.address, mark, output, options.lease_s))


if __name__ == "__main__":
    main()
