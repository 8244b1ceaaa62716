"""The worker: carries out the actions of its machine, one task per group, until it has left.

    FRESH --a limit is passed--> WORN OUT (leaves as soon as the router can spare it)
             --its memory is far past, its spawner has ended--> URGENT (drains now)

- One TaskGroup owns every group's task, and the worker holds the results until their sinks ack
  them.
- Each group that began ends for the machine, however its task ends.
- The reason of wear names the setting. A worn worker asks by its exit code for another in its
  place.
"""

import asyncio
import contextlib
import os
import socket

import msgspec

from rollmesh.core.config import Config, WorkerConfig
from rollmesh.core.descriptors import share_in_use
from rollmesh.core.errors import WireError
from rollmesh.core.heap import note_freed
from rollmesh.core.ids import GroupId
from rollmesh.core.logs import get_logger
from rollmesh.core.metrics import Inventory, rss_bytes
from rollmesh.core.process import pid_space
from rollmesh.core.text import printable
from rollmesh.engine.view import FleetView
from rollmesh.envs.calls import num_left_behind
from rollmesh.envs.isolation import current_isolation
from rollmesh.envs.spawning import ENDED, process_spawner
from rollmesh.serve.server.groups import GroupPayload, Slots, empty_payload, run_group
from rollmesh.serve.server.outbox import Forget, OutboxSettings
from rollmesh.serve.server.rollouts import WorkerContext, one_line
from rollmesh.serve.server.transport import STARTED_S, WorkerTransport, identity
from rollmesh.serve.server.worker_machine import (
    Abort,
    Action,
    Begin,
    EnginesSeen,
    Event,
    GroupRunEnded,
    Leaving,
    Left,
    StopAsked,
    Stopping,
    WorkerMachine,
    WorkerMachineSettings,
    WorkerState,
    WornOut,
)
from rollmesh.wire.fleet import AskTable, EngineFaulted, TableMessage
from rollmesh.wire.frames import Packet, decode_ask
from rollmesh.wire.keys import Keys
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked
from rollmesh.wire.messages import AnyMessage, GroupFinished
from rollmesh.wire.worker_report import WorkerReport

MAX_LEFT_BEHIND = 100
"""Calls of environment code that were given up and never ended: threads and coroutines."""
URGENT_SHARE = 1.25
"""Excess of memory at which a worker leaves without waiting."""
MAX_OPEN_SHARE, URGENT_OPEN_SHARE = 0.9, 0.97
"""Share of open files at which it does: without a free one, all that it runs fails."""


class Wear(msgspec.Struct, frozen=True):
    """Resources that a worker has gathered."""

    rss_bytes: int
    num_rollouts: int
    num_left_behind: int
    open_share: float = 0.0
    """Share of the files that it may have open."""
    has_lost_spawner: bool = False


def worn_out(settings: WorkerConfig, wear: Wear) -> str:
    """Return why the worker should be replaced; '' if it should not."""
    if wear.has_lost_spawner:
        return ENDED
    if 0 < settings.max_rss_bytes < wear.rss_bytes:
        return f"{wear.rss_bytes} bytes of memory, worker.max_rss_bytes = {settings.max_rss_bytes}"
    if 0 < settings.recycle_rollouts <= wear.num_rollouts:
        limit = settings.recycle_rollouts
        return f"{wear.num_rollouts} rollouts, worker.recycle_rollouts = {limit}"
    if wear.num_left_behind >= MAX_LEFT_BEHIND:
        return f"{wear.num_left_behind} calls of its environment never ended"
    if wear.open_share >= MAX_OPEN_SHARE:
        return f"{wear.open_share:.0%} of the files that it may hold open are (ulimit -n)"
    return ""


def is_urgent(settings: WorkerConfig, wear: Wear) -> bool:
    """Return whether it should leave without waiting for its turn."""
    is_heavy = 0 < URGENT_SHARE * settings.max_rss_bytes < wear.rss_bytes
    return is_heavy or wear.open_share >= URGENT_OPEN_SHARE or wear.has_lost_spawner


log = get_logger()

STOPPED = "the worker was stopped"


class WorkerSettings(msgspec.Struct, frozen=True):
    """Identity of the worker and addresses that it dials."""

    worker_id: str
    router: str
    config: Config
    keys: Keys | None


class Worker:
    """Runs groups; `view` is its copy of the fleet table."""

    def __init__(self, settings: WorkerSettings) -> None:
        config, worker_id = settings.config, settings.worker_id
        self.view = FleetView()
        self._worker_id = worker_id
        self._tick_s = config.router.beat_s / 2
        self._farewell_timeout_s = config.worker.farewell_timeout_s
        self._machine = WorkerMachine(
            WorkerMachineSettings(
                worker_id=worker_id,
                env=config.env,
                max_rollouts=config.worker.max_rollouts,
                max_unacked_bytes=config.worker.max_unacked_bytes,
                max_held_bytes=config.worker.max_held_bytes,
                pid=os.getpid(),
                host=socket.gethostname(),
                started_s=STARTED_S,
                pid_space=pid_space(),
                hello_s=config.router.beat_s,
                outbox=OutboxSettings(delivery_timeout_s=config.worker.delivery_timeout_s),
            )
        )
        self._slots = Slots(config.worker.max_rollouts)
        self._post = WorkerTransport(
            settings.router, identity(worker_id), settings.keys, self.receive
        )
        self._payloads: dict[GroupId, GroupPayload] = {}
        self._tasks: dict[GroupId, asyncio.Task[None]] = {}
        self._num_left_behind = 0
        """Values of the last tick: they may be counted on the loop's thread only."""
        self._left = asyncio.Event()
        self._context: WorkerContext | None = None
        self._group: asyncio.TaskGroup | None = None
        self.inventory = Inventory()
        """Memory that this process holds, to which its budget applies."""
        self.inventory.add(self._held, self._tables, self._caches)

    def report_status(self) -> WorkerReport:
        """Return the report for the heartbeats; from any thread."""
        runtime = self._context.runtime if self._context else None
        return WorkerReport(
            worker_id="",  # the heartbeat sets it, and what it measures itself
            state=self._machine.state.value,
            num_running=self._slots.num_open,
            accepting=self._machine.accepting,
            unacked_bytes=self._machine.outbox.unacked_bytes,
            num_finished=self._slots.num_finished,
            num_failed=self._slots.num_failed,
            last_error=self._slots.last_error,
            num_calls=runtime.num_calls if runtime else 0,
            num_tokens=runtime.num_tokens if runtime else 0,
            num_left_behind=self._num_left_behind,
            waits_for=self._machine.waits_for,
            held_bytes=self._machine.budget.held_bytes,
            last_place=self._slots.last_place,
            last_task_id=printable(self._slots.last_task_id),
            isolation=current_isolation().shown,
        )

    def report(self, fault: EngineFaulted) -> None:
        """Report an engine's fault to the router."""
        self._post.send(ROUTER, Packet(fault, self._machine.router))

    def receive(self, route: bytes, packet: Packet) -> None:
        """Handle a packet."""
        if isinstance(packet.message, TableMessage) and self.view.update(
            packet.message, packet.router
        ):
            self._post.send(ROUTER, Packet(AskTable(), self._machine.router))
        router = self._machine.router
        self._step(Received(route, packet.message, packet.body, packet.router))
        if router not in ("", self._machine.router):
            held = self._machine.holds()
            num_finished = sum(each.finished for each in held)
            num_running = len(held) - num_finished
            log.info("worker.reasserted", num_running=num_running, num_undelivered=num_finished)

    def begin(self, context: WorkerContext) -> None:
        """Send the hello; groups run on `stage` once `serve` is called."""
        self._context = context
        self._step(Ticked())

    async def serve(self, stop: asyncio.Event) -> Leaving:
        """Work until drained, worn out or stopped, deliver and leave; return why."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                self._post.start()
                ticker = group.create_task(self._tick())
                stopped = group.create_task(stop.wait())
                left = group.create_task(self._left.wait())
                await asyncio.wait((stopped, left), return_when=asyncio.FIRST_COMPLETED)
                await self._finish()
                await self._farewell()
                for task in (ticker, stopped, left, *self._tasks.values()):
                    task.cancel()
        finally:
            self._post.close()
        assert self._machine.leaving is not None
        return self._machine.leaving

    async def _tick(self) -> None:
        context = self._context
        assert context is not None
        while True:
            self._step(Ticked())
            self._step(EnginesSeen(self.view.any_serves()))
            self._machine.weigh(self.inventory.held_bytes())
            self._check_wear()
            context.runtime.look_for_leaks()
            self._post.check_silence()
            await asyncio.sleep(self._tick_s)

    def _check_wear(self) -> None:
        context = self._context
        assert context is not None
        self._num_left_behind = num_left_behind()
        wear = Wear(
            rss_bytes=rss_bytes(),
            num_rollouts=self._slots.num_finished,
            num_left_behind=self._num_left_behind,
            open_share=share_in_use(),
            has_lost_spawner=(spawner := process_spawner()) is not None and spawner.has_ended(),
        )
        why, urgent = worn_out(context.settings, wear), is_urgent(context.settings, wear)
        state = self._machine.state
        if why and (state is WorkerState.SERVING or (urgent and state is WorkerState.WORN)):
            log.info("worker.worn_out", reason=why, is_urgent=urgent)
            self._step(WornOut(why, urgent))

    async def _finish(self) -> None:
        """Let running groups end, for a while."""
        assert self._context is not None
        self._step(StopAsked(STOPPED))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._context.settings.drain_timeout_s):
                await self._left.wait()

    async def _farewell(self) -> None:
        self._step(Stopping(STOPPED))
        try:
            async with asyncio.timeout(self._farewell_timeout_s):
                await self._left.wait()
        except TimeoutError:
            num_held = len(self._machine.holds())
            log.warning("worker.left_undelivered", num_groups=num_held)
            self._post.send(ROUTER, Packet(self._machine.farewell(), self._machine.router))

    def _step(self, event: Event) -> None:
        assert self._context is not None
        for action in self._machine.step(event, self._context.clock.now_s()):
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        assert self._context is not None
        match action:
            case Send(route, message):
                payload = self._payload_of(message)
                body, buffers = (payload.body, payload.buffers) if payload else (b"", ())
                self._post.send(route, Packet(message, self._machine.router, body, buffers))
            case Begin():
                assert self._group is not None
                task = self._group.create_task(self._run(self._context, action))
                self._tasks[action.group_id] = task
                task.add_done_callback(lambda done: self._ended(action.group_id, done))
            case Abort(group_id, reason):
                log.info("group.aborted", group_id=str(group_id), reason=reason)
                self._tasks[group_id].cancel()
            case Forget(group_id):
                if payload := self._payloads.pop(group_id, None):
                    note_freed(payload.num_bytes)
            case Left(num_given_back):
                if num_given_back:
                    why = "their sinks are away; they run again elsewhere"
                    log.warning("worker.gave_back", num_groups=num_given_back, reason=why)
                self._left.set()

    def _held(self) -> dict[str, int]:
        return {"outbox": self._machine.outbox.unacked_bytes}

    def _tables(self) -> dict[str, int]:
        machine = self._machine
        return {
            "running_groups": len(machine.running),
            "aborting_groups": len(machine.aborting),
            "parcels": len(machine.outbox.results),
            "payloads": len(self._payloads),
            "group_tasks": len(self._tasks),
            "open_slots": self._slots.num_open,
            "left_behind": self._num_left_behind,
        }

    def _caches(self) -> dict[str, int]:
        return {"delivered_groups": self._machine.num_remembered, "sinks": self._post.num_sinks}

    def _payload_of(self, message: AnyMessage) -> GroupPayload | None:
        return self._payloads[message.group_id] if isinstance(message, GroupFinished) else None

    def _ended(self, group_id: GroupId, task: asyncio.Task[None]) -> None:
        """End a group's task; the machine knows whether its result is still wanted."""
        del self._tasks[group_id]
        if task.cancelled() and group_id in self._machine.running:
            # Not cancelled here: this worker fails, and what it ran must run elsewhere, not end
            # here.
            log.error("group.fell", group_id=str(group_id))
            return
        payload = self._payloads.setdefault(group_id, empty_payload("cancelled"))
        self._step(GroupRunEnded(group_id, payload.complete, payload.num_bytes))

    async def _run(self, context: WorkerContext, begin: Begin) -> None:
        # Do not keep the task's result: a task that was cut by a deadline waits for the collector,
        # since its TaskGroup is in a cycle with the cancellation that it has caught.
        self._payloads[begin.group_id] = await self._payload(context, begin)

    async def _payload(self, context: WorkerContext, begin: Begin) -> GroupPayload:
        try:
            return await run_group(context, self._slots, begin, decode_ask(begin.body))
        except WireError as error:
            return empty_payload(f"bad_ask: {error}")
        except Exception as error:  # door: one group must not end the worker
            log.exception("group.failed", group_id=str(begin.group_id))
            return empty_payload(f"infra_error: {one_line(error)}")
