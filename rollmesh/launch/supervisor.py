"""Runs the supervision machine against real processes.

Owns the children's tasks, the listening sockets and the addresses that children learn from each
other. Invariants: it decides nothing, the machine does; when `run` returns, no process that the
run started, or that those started, is left; a warden sees to that should we be killed first. Driven
by `run`, on the main thread.
"""

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import NamedTuple

from rollmesh.core.clock import Clock
from rollmesh.core.config import LaunchConfig
from rollmesh.core.errors import AddressError
from rollmesh.core.logs import get_logger
from rollmesh.core.process import FAILED, Ready, http_address, listen
from rollmesh.core.warden import guard, new_mark, sweep_memory
from rollmesh.launch.child import ChildProcess, Hooks
from rollmesh.launch.folder import RunFolder
from rollmesh.launch.herald import Herald
from rollmesh.launch.keys import key_variables
from rollmesh.launch.machine import (
    Aborted,
    Action,
    Beaten,
    End,
    Event,
    Exited,
    Kill,
    MeshState,
    Note,
    Release,
    Reported,
    Start,
    StopAsked,
    Supervision,
    Tell,
    TellRouter,
    Ticked,
)
from rollmesh.launch.plan import ChildPlan, fill
from rollmesh.launch.reaper import become_subreaper, bury_orphans, kill_descendants
from rollmesh.wire.messages import WorkerExited

log = get_logger()

TICK_S = 0.1
MAX_NOTES = 100


class Mesh(NamedTuple):
    """What is to run."""

    plans: list[ChildPlan]
    sockets: dict[str, socket.socket]
    """By role: the sockets that the plans ask for."""
    mark: str
    """What its processes carry, and no others."""


class Supervisor:
    """A running mesh."""

    def __init__(
        self,
        mesh: "Mesh",
        settings: LaunchConfig,
        folder: RunFolder,
        clock: Clock,
        keys: Path | None = None,
    ) -> None:
        """`keys` is the run's key folder, if it has one."""
        self.machine = Supervision(mesh.plans, settings)
        self.ready: dict[str, Ready] = {}
        """What each child reported last."""
        self.notes: list[str] = []
        """For people, oldest first; the last MAX_NOTES."""
        self.num_notes = 0
        """All that there were."""
        self._plans = {plan.role: plan for plan in mesh.plans}
        self._folder = folder
        self._clock = clock
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._processes: dict[str, ChildProcess] = {}
        self._keys = keys
        self._herald = Herald(keys)
        self._mark = mesh.mark
        self._num_started = 0
        self._sockets = mesh.sockets
        self._addresses = {role: http_address(each) for role, each in self._sockets.items()}

    def pids(self) -> dict[str, int]:
        """The processes that run now, by role, launch included."""
        children = {role: each.pid for role, each in self._processes.items() if each.pid}
        return {"launch": os.getpid(), **children}

    def stop(self) -> None:
        """End the run in order; asked again, at once."""
        self._events.put_nowait(StopAsked())

    def abort(self, reason: str) -> None:
        """End the run at once, as failed for this reason."""
        self._events.put_nowait(Aborted(reason))

    def note(self, line: str) -> None:
        """Something that people should know."""
        self.notes = [*self.notes[1 - MAX_NOTES :], line]
        self.num_notes += 1

    async def run(self) -> End:
        """Start, watch, stop; why it ended."""
        become_subreaper()
        guard(self._mark)
        sweep_memory()  # of earlier runs that were killed together with their warden
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop)
        self._folder.add_pid("launch", os.getpid(), self._clock.unix_s())
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._watch(tasks)
        finally:
            self._herald.close()
            kill_descendants()
            bury_orphans(own=set())
            for each in self._sockets.values():
                each.close()
        assert self.machine.end is not None
        return self.machine.end

    async def _watch(self, tasks: asyncio.TaskGroup) -> None:
        event: Event = Ticked()
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
            return Ticked()

    def _do(self, action: Action, tasks: asyncio.TaskGroup) -> None:
        match action:
            case Start(role):
                plan = self._plans[role]
                again = plan.again if role in self.ready else ()
                argv = fill((*plan.argv, *again), self._addresses)
                self._num_started += 1
                mark = f"{self._mark}/{role}.{self._num_started}"
                self._processes[role] = ChildProcess(
                    plan, argv, self._folder.logs, mark, key_variables(plan, self._keys)
                )
                tasks.create_task(self._child(plan), name=role)
            case Release(role):
                self._processes[role].release()
            case Tell(role):
                self._processes[role].tell()
            case Kill(role):
                self._processes[role].kill()
            case TellRouter(role, pid, cause):
                if router := self.ready.get("router"):
                    self._herald.tell(router.address, WorkerExited(role, pid, cause))
            case Note(line):
                self.note(line)
                log.warning("child.died", line=line)

    async def _child(self, plan: ChildPlan) -> None:
        """The life of one process."""
        process = self._processes[plan.role]
        hooks = Hooks(self._on_start, self._on_ready, self._on_beat)
        try:
            exited = await process.run(self._sockets.get(plan.role), hooks)
        except OSError as error:  # no process, memory, descriptor or disk is left for it
            exited = Exited(plan.role, FAILED, f"it could not be started: {error}")
        log.info("child.exited", child=plan.role, code=exited.code, line=exited.last_line)
        self._events.put_nowait(exited)

    def _on_start(self, process: ChildProcess) -> None:
        log.info("child.started", child=process.role, pid=process.pid)
        self._folder.add_pid(process.role, process.pid, self._clock.unix_s())

    def _on_ready(self, process: ChildProcess, ready: Ready) -> None:
        log.info("child.ready", child=process.role, address=ready.address)
        self.ready[process.role] = ready
        self._folder.add_address(ready)
        self._addresses[process.role] = ready.address
        self._events.put_nowait(Reported(process.role))

    def _on_beat(self, process: ChildProcess) -> None:
        self._events.put_nowait(Beaten(process.role))


def open_mesh(plans: list[ChildPlan], mark: str = "") -> Mesh:
    """Listen where the plans want it; AddressError naming the setting, before anything starts.

    `mark` is nobody's yet; '' makes one."""
    mesh = Mesh(plans, {}, mark or new_mark("launch"))
    for plan in plans:
        if not plan.bind:
            continue
        try:
            mesh.sockets[plan.role] = listen(plan.bind)
        except AddressError as error:
            for each in mesh.sockets.values():
                each.close()
            raise AddressError(f"{plan.bind_key} = {error}") from None
    return mesh
