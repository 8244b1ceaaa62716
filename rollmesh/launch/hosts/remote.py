"""Hosts on other nodes: launch's side of the connection to a runner.

    RemoteChild --RunnerRequest--> RunnerConnection --Transport--> runner (hosts/runner.py)

- A transport carries lines. CommandTransport starts the runner by a command, such as
  `srun --nodelist=NODE ...`, `ssh NODE ...` or `ip netns exec NODE ...`.
- When a connection ends, so do the runner and its children: each is reported as killed, and the
  next start opens a new connection.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rollmesh.core.child_process import kill_and_wait, open_output, spawn_options
from rollmesh.core.logs import get_logger
from rollmesh.core.orphans import MARK_VARIABLE
from rollmesh.launch.child import last_line
from rollmesh.launch.hosts.base import ChildCallbacks, ChildOrder
from rollmesh.launch.hosts.runner import (
    MAX_LINE_BYTES,
    SHARED_FILE,
    PingRequest,
    ProcessBeat,
    ProcessEnded,
    ProcessReady,
    ProcessStarted,
    ReleaseOrder,
    RunnerEvent,
    RunnerRequest,
    RunnerStarted,
    SignalOrder,
    StartOrder,
)
from rollmesh.launch.machine import ChildExited

log = get_logger()

CLOSE_S = 5.0
"""Time for a runner to end its children once its connection has ended."""
NUM_PINGS = 6
"""Pings within the time after which a silent node is given up."""
START_TIMEOUT_S = 60.0
"""Time for a command to start a runner."""
KILL_S = 15.0
"""Time for a runner to report the end of a child that was killed."""
RUNNER = ("-m", "rollmesh.launch.hosts.runner")


class Transport(Protocol):
    """A two-way stream of lines to a runner."""

    def send(self, line: bytes) -> None:
        """Send a line in the background."""

    async def receive(self) -> bytes:
        """Return the next line; b"" once the connection has ended."""

    def why_ended(self) -> str:
        """Return why it has ended, in a line."""

    async def close(self) -> None:
        """End the connection, and the runner with it."""


class RunnerConnection:
    """A connection to one runner, and the children that run there."""

    def __init__(
        self, transport: Transport, node: str, logs: Path, log_token: str, lease_s: float = 0.0
    ) -> None:
        """`node` is the name of the node for users, which is given up after `lease_s` of silence
        (0: never); the other arguments are those of StartOrder.
        """
        self.node = node
        self.is_open = True
        self._transport = transport
        self._logs = logs
        self._log_token = log_token
        self._children: dict[str, RemoteChild] = {}
        self._first = asyncio.Event()
        """The runner has written its first line, or the connection has ended."""
        self._task = asyncio.create_task(self._receive(), name=f"runner {node}")
        self._closing: asyncio.Task[None] | None = None
        self._last_line_s = asyncio.get_running_loop().time()
        self._pinging: asyncio.Task[None] | None = None
        if lease_s:
            self._pinging = asyncio.create_task(self._ping(lease_s), name=f"ping {node}")

    async def wait_started(self, timeout_s: float) -> None:
        """Return when the runner runs; ConnectionError if it ends first or not in time."""
        try:
            await asyncio.wait_for(self._first.wait(), timeout_s)
        except TimeoutError:
            await self.close()
            raise ConnectionError(f"no runner on {self.node} within {timeout_s:g} s") from None
        if not self.is_open:
            raise ConnectionError(self._why_ended())

    def start(self, child: "RemoteChild") -> None:
        """Start a child; OSError if one of its files cannot be read."""
        order = child.order
        contents = {path: Path(path).read_bytes() for path in order.files}
        self._children[child.role] = child
        self.send(StartOrder(order, contents, sys.executable, str(self._logs), self._log_token))

    def send(self, request: RunnerRequest) -> None:
        """Send a request in the background."""
        if self.is_open:
            self._transport.send(msgspec.json.encode(request) + b"\n")

    async def close(self) -> None:
        """End the runner and its children."""
        await self._transport.close()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def give_up(self) -> None:
        """End the connection: its node does not answer."""
        if self._closing is None:
            self._end_all(f"{self.node} does not answer")
            self._closing = asyncio.create_task(self.close(), name=f"close {self.node}")

    async def _receive(self) -> None:
        try:
            while line := await self._transport.receive():
                self._last_line_s = asyncio.get_running_loop().time()
                self._handle(line)
        finally:
            self._end_all(self._why_ended())

    async def _ping(self, lease_s: float) -> None:
        """Give up the node after `lease_s` of silence, in which launch was not suspended itself."""
        loop, interval_s = asyncio.get_running_loop(), lease_s / NUM_PINGS
        await self._first.wait()
        while self.is_open:
            self.send(PingRequest())
            pinged_s = loop.time()
            await asyncio.sleep(interval_s)
            if loop.time() - pinged_s > 2 * interval_s:
                self._last_line_s = loop.time()
            elif loop.time() - self._last_line_s > lease_s:
                self.give_up()

    def _why_ended(self) -> str:
        return f"the runner on {self.node} ended: {self._transport.why_ended()}"

    def _end_all(self, why: str) -> None:
        self.is_open = False
        if self._pinging:
            self._pinging.cancel()
        self._first.set()
        for child in [*self._children.values()]:
            self._end(ChildExited(child.role, -signal.SIGKILL, why, child.pid, why))

    def _handle(self, line: bytes) -> None:
        try:
            event = msgspec.json.decode(line, type=RunnerEvent)
        except msgspec.MsgspecError:  # a banner of ssh or srun
            log.warning("runner.line_ignored", node=self.node, line=line[:200])
            return
        match event:
            case RunnerStarted(host, pid):
                log.info("runner.started", node=self.node, host=host, pid=pid)
                self._first.set()
            case ProcessEnded(exited, output):
                if output:
                    with open_output(self._logs / f"{exited.role}.out") as file:
                        file.write(output)
                self._end(exited)
            case ProcessStarted(role) | ProcessReady(role) | ProcessBeat(role) if (
                role in self._children
            ):
                self._children[role].handle(event)

    def _end(self, exited: ChildExited) -> None:
        if child := self._children.pop(exited.role, None):
            child.on_exit(exited)


Connect = Callable[["RemoteChild"], Awaitable[RunnerConnection]]
"""Return the connection on which a child is to run; it calls `child.pend` while it waits."""


class RemoteChild:
    """A RunningChild on another node."""

    def __init__(self, order: ChildOrder, hooks: ChildCallbacks, connect: Connect) -> None:
        self.order = order
        self.role = order.role
        self.host = ""
        self.pid = 0
        self.address = ""
        self._hooks = hooks
        self._connect = connect
        self._connection: RunnerConnection | None = None
        self._is_released = False
        self._kill_timer: asyncio.TimerHandle | None = None
        self._exited: asyncio.Future[ChildExited] = asyncio.get_running_loop().create_future()

    async def ended(self) -> ChildExited:
        """See RunningChild."""
        connecting = asyncio.ensure_future(self._connect(self))
        first: set[asyncio.Future[Any]] = {connecting, self._exited}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if self._exited.done():  # stopped before it had a place
                return self._exited.result()
            connection = self._connection = connecting.result()
            self.host = connection.node
            connection.start(self)
            if self._is_released:
                connection.send(ReleaseOrder(self.role))
            if not connection.is_open:
                why = f"the runner on {connection.node} ended"
                return ChildExited(self.role, -signal.SIGKILL, why, 0, why)
            return await self._exited
        finally:
            connecting.cancel()

    def pend(self, why: str) -> None:
        """Report that no node has a place for it."""
        self._hooks.pending(self, why)

    def handle(self, event: ProcessStarted | ProcessReady | ProcessBeat) -> None:
        """Handle an event of the runner."""
        match event:
            case ProcessStarted(_, pid, address):
                self.pid, self.address = pid, address
                self._hooks.started(self)
            case ProcessReady(_, ready):
                self._hooks.ready(self, ready)
            case ProcessBeat():
                self._hooks.heartbeat(self)

    def on_exit(self, exited: ChildExited) -> None:
        """Record its end."""
        self.pid = 0
        if self._kill_timer:
            self._kill_timer.cancel()
        if not self._exited.done():
            self._exited.set_result(exited)

    def release(self) -> None:
        """See RunningChild."""
        self._is_released = True
        if self._connection:
            self._connection.send(ReleaseOrder(self.role))

    def terminate(self) -> None:
        """See RunningChild."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """See RunningChild; a node that does not report the end in time is given up."""
        self._signal(signal.SIGKILL)
        if self._connection and not self._kill_timer:
            loop = asyncio.get_running_loop()
            self._kill_timer = loop.call_later(KILL_S, self._connection.give_up)

    def _signal(self, number: signal.Signals) -> None:
        if self._connection:
            self._connection.send(SignalOrder(self.role, number is signal.SIGKILL))
        else:
            self.on_exit(ChildExited(self.role, -number, cause="stopped before it had a place"))


class CommandTransport:
    """A runner that was started by a command."""

    def __init__(self, process: asyncio.subprocess.Process, output: Path) -> None:
        """`output` has what it writes to stderr."""
        self._process = process
        self._output = output

    def send(self, line: bytes) -> None:
        assert self._process.stdin
        with contextlib.suppress(ConnectionError, RuntimeError):  # `receive` reports the end
            self._process.stdin.write(line)

    async def receive(self) -> bytes:
        assert self._process.stdout
        return await self._process.stdout.readline()

    def why_ended(self) -> str:
        return last_line(self._output) or "its connection was closed"

    async def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), CLOSE_S)
        except TimeoutError:
            await kill_and_wait(self._process, CLOSE_S)


class CommandHost:
    """A node on which a command starts a runner; all children there share it."""

    def __init__(
        self,
        command: Sequence[str],
        node: str,
        address: str,
        logs: Path,
        mark: str,
        start_timeout_s: float = START_TIMEOUT_S,
        lease_s: float = 0.0,
        runner: Sequence[str] = RUNNER,
    ) -> None:
        """`command` is put before `python -m ...`; `node` is the node's name, and `address` its
        address for the other nodes; `mark` is that of the mesh. The runner must start within
        `start_timeout_s`; after `lease_s` of silence both sides end the connection (0: never).
        `runner` are the interpreter's arguments.
        """
        self._argv = [*command, sys.executable, *runner, "--address", address]
        if lease_s:
            self._argv += ["--lease-s", str(lease_s)]
        self._lease_s = lease_s
        self._node = node
        self._logs = logs
        self._mark = mark
        self._start_timeout_s = start_timeout_s
        self._connection: RunnerConnection | None = None
        self._connecting = asyncio.Lock()

    def start(self, order: ChildOrder, hooks: ChildCallbacks) -> RemoteChild:
        return RemoteChild(order, hooks, self.connect)

    async def close(self) -> None:
        async with self._connecting:
            if self._connection:
                await self._connection.close()

    async def connect(self, child: RemoteChild) -> RunnerConnection:
        """Return the connection to the node's runner; OSError if it cannot be started."""
        del child
        # A child that is stopped meanwhile leaves no half-started runner behind.
        return await asyncio.shield(self._connected())

    async def _connected(self) -> RunnerConnection:
        async with self._connecting:
            if self._connection is None or not self._connection.is_open:
                if self._connection:
                    await self._connection.close()
                self._connection = await self._open()
                await self._connection.wait_started(self._start_timeout_s)
            return self._connection

    async def _open(self) -> RunnerConnection:
        output = self._logs / f"runner-{self._node}.out"
        with open_output(output) as stderr:
            process = await asyncio.create_subprocess_exec(
                *self._argv,
                limit=MAX_LINE_BYTES,
                **spawn_options(
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=stderr,
                    environment={**os.environ, MARK_VARIABLE: self._mark},
                ),
            )
        transport = CommandTransport(process, output)
        token = share_logs(self._logs)
        return RunnerConnection(transport, self._node, self._logs, token, self._lease_s)


def share_logs(logs: Path) -> str:
    """Return the content of SHARED_FILE in the log folder, which is made if it is missing."""
    path = logs / SHARED_FILE
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text()
