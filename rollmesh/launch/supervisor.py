"""The supervision machine, run on real processes.

- It decides nothing; the machine does.
- When `run` returns, no process that the run started, or that those started, is left; an orphan
  reaper ensures that if launch is killed.
- It runs on the main thread.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rollmesh.core.clock import Clock
from rollmesh.core.config import LaunchConfig
from rollmesh.core.errors import AddressError
from rollmesh.core.logs import get_logger
from rollmesh.core.orphans import new_mark, start_orphan_reaper, sweep_memory
from rollmesh.core.process import FAILED, Ready, http_address, listen, reserve
from rollmesh.launch.child import become_subreaper, kill_descendants, reap_orphans
from rollmesh.launch.folder import RunFolder
from rollmesh.launch.hosts.base import ChildCallbacks, ChildOrder, Host, RunningChild
from rollmesh.launch.hosts.local import LocalHost
from rollmesh.launch.keys import key_variables, keys_of
from rollmesh.launch.machine import (
    Action,
    ChildExited,
    ChildPending,
    ChildPlaced,
    ChildReady,
    Event,
    HeartbeatReceived,
    KillChild,
    MeshState,
    Notice,
    NotifyRouter,
    ReleaseGate,
    RunAborted,
    RunEnd,
    StartChild,
    StopRequested,
    SupervisionMachine,
    TerminateChild,
    TimePassed,
)
from rollmesh.launch.plan import ChildPlan, fill
from rollmesh.wire.fleet import AddEngine, DropEngine
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import Role
from rollmesh.wire.messages import WorkerExited
from rollmesh.wire.sockets import Dialer

log = get_logger()


class RouterNotifier:
    """Reports exits of workers and new addresses of engines to the router.

    - It never blocks. A message that is lost with a router is not repeated: the next router gets
      the engines' addresses at its start, and learns from the workers which of them run.
    - It connects on first use; a restarted router has the same address.
    """

    def __init__(self, keys: Path | None = None) -> None:
        """`keys` is the run's key folder, if it has one."""
        self._dialer: Dialer | None = None
        self._keys = keys

    def notify(self, router: str, message: WorkerExited | AddEngine | DropEngine) -> None:
        """Send the message to the router at this address."""
        if self._dialer is None:
            self._dialer = Dialer(
                router, f"launch.{os.getpid()}", keys_of(self._keys, Role.OPERATOR)
            )
        if not self._dialer.send(Packet(message)):
            log.warning("router.report_lost", report=repr(message))

    def close(self) -> None:
        """Close the connection."""
        if self._dialer:
            self._dialer.close()


TICK_S = 0.1
MAX_NOTES = 100


class MeshPlan(NamedTuple):
    """The processes to run and their listening sockets."""

    plans: list[ChildPlan]
    sockets: dict[str, socket.socket]
    """By role: the sockets that the plans ask for."""
    mark: str
    """The mark that its processes carry, and no others."""
    hosts: Mapping[str, Host] = {}
    """By role: the hosts of processes that are not started on this machine."""
    files: tuple[str, ...] = ()
    """Paths of files that every process reads, to be copied to other hosts."""


class Supervisor:
    """A running mesh."""

    def __init__(
        self,
        mesh: "MeshPlan",
        settings: LaunchConfig,
        folder: RunFolder,
        clock: Clock,
        keys: Path | None = None,
    ) -> None:
        """`keys` is the run's key folder, if it has one."""
        self.machine = SupervisionMachine(mesh.plans, settings, mesh.hosts, folder.logs)
        self.ready: dict[str, Ready] = {}
        """The last report of each child."""
        self.notes: list[str] = []
        """Lines for the user, oldest first; the last MAX_NOTES."""
        self.num_notes = 0
        """The number of all lines so far."""
        self._plans = {plan.role: plan for plan in mesh.plans}
        self._folder = folder
        self._clock = clock
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._processes: dict[str, RunningChild] = {}
        self._keys = keys
        self._notifier = RouterNotifier(keys)
        self._mark = mesh.mark
        self._num_started = 0
        self._mesh = mesh
        self._local = LocalHost(folder.logs, mesh.sockets)
        self._addresses: dict[str, str] = {}
        for role, listening in mesh.sockets.items():
            self._record_address(role, http_address(listening))

    def pids(self) -> dict[str, int]:
        """Return this machine's running processes by role, launch included."""
        children = {
            role: each.pid for role, each in self._processes.items() if each.pid and not each.host
        }
        return {"launch": os.getpid(), **children}

    def stop(self) -> None:
        """Stop the run in order; a second call kills."""
        self._events.put_nowait(StopRequested())

    def abort(self, reason: str) -> None:
        """Kill the run, as failed for this reason."""
        self._events.put_nowait(RunAborted(reason))

    def note(self, line: str) -> None:
        """Show a line to the user."""
        self.notes = [*self.notes[1 - MAX_NOTES :], line]
        self.num_notes += 1

    async def run(self) -> RunEnd:
        """Start, supervise and stop the children; return why the run ended."""
        become_subreaper()
        start_orphan_reaper(self._mark)
        sweep_memory()  # of earlier runs that were killed together with their orphan reaper
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop)
        self._folder.add_pid("launch", os.getpid(), self._clock.unix_s())
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._watch(tasks)
        finally:
            self._notifier.close()
            for host in {id(each): each for each in self._mesh.hosts.values()}.values():
                await host.close()
            kill_descendants()
            reap_orphans(own=set())
            await self._local.close()
        assert self.machine.end is not None
        return self.machine.end

    async def _watch(self, tasks: asyncio.TaskGroup) -> None:
        event: Event = TimePassed()
        while True:
            for action in self.machine.step(event, self._clock.now_s()):
                self._do(action, tasks)
            if self.machine.state is MeshState.ENDED:
                return
            event = await self._next_event()

    async def _next_event(self) -> Event:
        try:
            return await asyncio.wait_for(self._events.get(), TICK_S)
        except TimeoutError:
            return TimePassed()

    def _do(self, action: Action, tasks: asyncio.TaskGroup) -> None:
        match action:
            case StartChild(role):
                tasks.create_task(self._child(self._start(role)), name=role)
            case ReleaseGate(role):
                self._processes[role].release()
            case TerminateChild(role):
                self._processes[role].terminate()
            case KillChild(role):
                self._processes[role].kill()
            case NotifyRouter(role, pid, cause):
                self._notify_router(WorkerExited(role, pid, cause))
            case Notice(line):
                self.note(line)
                log.warning("child.died", line=line)

    def _start(self, role: str) -> RunningChild:
        plan = self._plans[role]
        again = plan.again if role in self.ready else ()
        keys = key_variables(plan, self._keys)
        key_files = [each for each in keys.values() if each]
        self._num_started += 1
        order = ChildOrder(
            role=role,
            argv=fill((*plan.argv, *again), self._addresses),
            mark=f"{self._mark}/{role}.{self._num_started}",
            folder=os.getcwd() if role in self._mesh.hosts else "",
            bind=plan.bind,
            listens=plan.listens,
            num_gpus=plan.num_gpus,
            num_cpus=plan.num_cpus,
            variables={**plan.variables, **keys},
            files=(*self._mesh.files, *key_files),
            reports=plan.reports,
            has_gate=bool(plan.gate),
            is_worker=plan.is_worker,
        )
        hooks = ChildCallbacks(self._on_start, self._on_ready, self._on_heartbeat, self._on_pending)
        host = self._mesh.hosts.get(role, self._local)
        self._processes[role] = host.start(order, hooks)
        return self._processes[role]

    async def _child(self, child: RunningChild) -> None:
        """Wait for the end of one child process and report it."""
        try:
            exited = await child.ended()
        except OSError as error:  # no process, memory, descriptor or disk space is left for it
            exited = ChildExited(child.role, FAILED, f"it could not be started: {error}")
        log.info("child.exited", child=child.role, code=exited.code, line=exited.last_line)
        self._events.put_nowait(exited)

    def _on_pending(self, child: RunningChild, why: str) -> None:
        self._events.put_nowait(ChildPending(child.role, why))

    def _on_start(self, child: RunningChild) -> None:
        log.info("child.started", child=child.role, pid=child.pid, host=child.host)
        self._folder.add_pid(child.role, child.pid, self._clock.unix_s(), child.host)
        if child.address and child.host:
            self._move(child.role, child.address)
        self._events.put_nowait(ChildPlaced(child.role))

    def _move(self, role: str, address: str) -> None:
        """Record the address of a process on another node; the router gets an engine's new one."""
        before = self._addresses.get(role, address)
        self._record_address(role, address)
        if self._plans[role].is_engine and before != address:
            self._notify_router(AddEngine(self._num_started, address, is_launched=True))
            gone = DropEngine(self._num_started, before, force=True, is_launched=True)
            self._notify_router(gone)

    def _record_address(self, role: str, address: str) -> None:
        """Fill in `{role}` and `{role:bind}` from now on."""
        self._addresses[role] = address
        self._addresses[f"{role}:bind"] = address.replace("http://", "tcp://", 1)

    def _notify_router(self, message: WorkerExited | AddEngine | DropEngine) -> None:
        if router := self.ready.get("router"):
            self._notifier.notify(router.address, message)

    def _on_ready(self, child: RunningChild, ready: Ready) -> None:
        log.info("child.ready", child=child.role, address=ready.address)
        self.ready[child.role] = ready
        self._folder.add_address(ready)
        self._addresses[child.role] = ready.address
        self._events.put_nowait(ChildReady(child.role))

    def _on_heartbeat(self, child: RunningChild) -> None:
        self._events.put_nowait(HeartbeatReceived(child.role))


def open_mesh(
    plans: list[ChildPlan],
    mark: str = "",
    hosts: Mapping[str, Host] = {},
    files: tuple[str, ...] = (),
) -> MeshPlan:
    """Open the listening sockets of this machine; raise AddressError naming the setting before
    anything starts.

    `mark` must be unique; '' makes one. `hosts` and `files` are those of MeshPlan.
    """
    mesh = MeshPlan(plans, {}, mark or new_mark("launch"), hosts, files)
    for plan in plans:
        if not plan.bind or plan.role in hosts:
            continue
        try:
            make = listen if plan.listens else reserve
            mesh.sockets[plan.role] = make(plan.bind)
        except AddressError as error:
            for each in mesh.sockets.values():
                each.close()
            raise AddressError(f"{plan.bind_key} = {error}") from None
    return mesh
