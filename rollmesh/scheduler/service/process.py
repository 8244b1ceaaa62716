"""Scheduler process: one loop that receives, steps the machine, journals, and sends.

- Nothing of a step is sent before its rows are on disk. While they cannot be written, nothing more
  is received.
- A turn waits only for the disk. Whatever arrives, the loop continues.
- Machine time starts at wall-clock time and never runs back, also across restarts. SIGTERM ends the
  process at once.
"""

import os
from pathlib import Path

import msgspec

from rollmesh.core.clock import Clock, SystemClock
from rollmesh.core.errors import AddressError, ConfigError, JournalError
from rollmesh.core.ids import new_id
from rollmesh.core.logs import Occasional, get_logger, setup
from rollmesh.core.process import Ready, Stop, announce, http_address, listen
from rollmesh.core.secret_files import hash_token
from rollmesh.scheduler.planning.planner import SchedulingPolicy
from rollmesh.scheduler.service.journal import SqliteJournal
from rollmesh.scheduler.service.records import Action, Event, LogLine, WriteRows
from rollmesh.scheduler.service.scheduler import FleetScheduler
from rollmesh.scheduler.service.state import SchedulerSettings
from rollmesh.scheduler.service.status import ServiceStatus, snapshots_of, status_app_of, status_of
from rollmesh.serve.status_app import SnapshotCell
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import Role, read_scheduler_keys
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.members import SCHEDULER, Access
from rollmesh.wire.scheduling import JoinNode
from rollmesh.wire.sockets import Hub, WakeSignal, wait

log = get_logger()

STATUS_S = 1.0
STATUS_SHARE = 0.05
"""Upper bound on the share of the loop's time spent on snapshots."""
RETRY_S = 0.5
"""Between attempts to write rows."""


class ServiceOptions(msgspec.Struct, frozen=True, kw_only=True):
    bind: str
    http_bind: str
    journal: Path
    policy: SchedulingPolicy
    settings: SchedulerSettings = SchedulerSettings()
    nodes: tuple[JoinNode, ...] = ()
    """Nodes without an agent."""
    listen_fd: int | None = None
    ready_fd: int | None = None
    operator_token: str = ""
    """Token of the admission process; '': any peer may register pipelines."""


def run(ask: ServiceOptions) -> None:
    """Serve until SIGTERM or SIGINT.

    AddressError if an address is taken or is reachable by others without keys; ConfigError if
    another process has the journal or a node has changed.
    """
    setup("scheduler", ask.journal if ask.ready_fd is not None else None)
    clock, bell = SystemClock(), WakeSignal()
    journal = SqliteJournal(ask.journal)
    try:
        listening = listen(ask.http_bind, ask.listen_fd)
    except AddressError as error:
        raise AddressError(f"http_bind = {error}") from None
    snapshots = snapshots_of(clock)
    status_app = status_app_of(listening, snapshots)
    hub = open_hub(ask.bind)
    loop = ServiceLoop(ask, hub, journal, snapshots, clock)
    stop = Stop(bell.ring)
    loop.join(ask.nodes)
    loop.turn()
    status_app.start()
    announce(ask.ready_fd, Ready("scheduler", os.getpid(), hub.address, http_address(listening)))
    log.info("scheduler.started", address=hub.address, http_address=http_address(listening))
    try:
        while not stop.is_asked:
            wait(loop.poll_hubs(), bell, loop.idle_s())
            loop.turn()
    finally:
        status_app.close()
        hub.close()
        journal.close()
        log.info("scheduler.stopped")


def open_hub(bind: str) -> Hub:
    """Open the scheduler's Hub; AddressError names the setting."""
    try:
        keys = read_scheduler_keys(role=Role.HUB)
        access = Access(keys, SCHEDULER) if keys else None
        return Hub(bind, keys, access=access)
    except AddressError as error:
        raise AddressError(f"bind = {error}") from None


class ServiceLoop:
    """State of the loop, and one turn of it."""

    def __init__(
        self,
        ask: ServiceOptions,
        hub: Hub,
        journal: SqliteJournal,
        snapshots: SnapshotCell[ServiceStatus],
        clock: Clock,
    ) -> None:
        self.incarnation = new_id("s")
        self._settings = ask.settings
        self._hub, self._journal, self._snapshots, self._clock = hub, journal, snapshots, clock
        tables = journal.load()
        self.scheduler = FleetScheduler(
            ask.settings,
            ask.policy,
            tables,
            self.incarnation,
            hash_token(ask.operator_token),
        )
        start_s = max(clock.unix_s(), self.scheduler.state.now_s)
        self._ahead_s = start_s - clock.now_s()
        """Machine time minus clock time."""
        self._actions: list[Action] = []
        """Not carried out yet."""
        self._is_stuck = False
        self._num_failed = 0
        self._failures = Occasional()
        self._next_tick_s = self._next_status_s = clock.now_s()

    def join(self, nodes: tuple[JoinNode, ...]) -> None:
        """Add nodes without an agent; ConfigError if one has changed."""
        state = self.scheduler.state
        for node in nodes:
            known = state.node_records.get(node.name)
            if known and (len(known.node.gpus), known.node.labels) == (node.num_gpus, node.labels):
                continue
            ask = msgspec.structs.replace(node, key=f"{node.key}-{self.incarnation}")
            self._step(Received(b"", ask))
            if error := state.answers[ask.key].error:
                raise ConfigError(error)

    def turn(self) -> None:
        """Receive, tick if due, journal and send."""
        if self._is_stuck:
            self._carry_out()
            return
        arrived = list(self._hub.receive())
        for number, (route, packet) in enumerate(arrived, 1):
            event = Received(route, packet.message, packet.body, packet.router)
            self._step(event, is_last=number == len(arrived))
        now_s = self._clock.now_s()
        if now_s >= min(self._next_tick_s, self.scheduler.due_s - self._ahead_s):
            self._next_tick_s = now_s + self._settings.tick_s
            self._step(Ticked())
        self._carry_out()
        if now_s >= self._next_status_s:
            self._publish_status()

    def poll_hubs(self) -> list[Hub]:
        """Hubs to poll; none while rows cannot be written."""
        return [] if self._is_stuck else [self._hub]

    def idle_s(self) -> float:
        """Seconds until the next turn is needed if nothing arrives."""
        if self._is_stuck:
            return RETRY_S
        due_s = min(self._next_tick_s, self.scheduler.due_s - self._ahead_s)
        return max(0.0, due_s - self._clock.now_s())

    def _step(self, event: Event, is_last: bool = True) -> None:
        now_s = self._clock.now_s() + self._ahead_s
        try:
            self._actions += self.scheduler.step(event, now_s, is_last)
        except Exception:  # door: one peer's message must not end the fleet
            self._num_failed += 1
            kind = type(event.message).__name__ if isinstance(event, Received) else "tick"
            if number := self._failures.number(kind):
                log.exception("step.failed", kind=kind, number=number)

    def _carry_out(self) -> None:
        """Carry out the actions of all steps since: one transaction, then the rest."""
        rows = [row for each in self._actions if isinstance(each, WriteRows) for row in each.rows]
        try:
            if rows:
                self._journal.keep(rows)
        except JournalError as error:
            if not self._is_stuck:
                log.error(
                    "journal.stuck",
                    why=str(error),
                    fix="the scheduler pauses until it can be written",
                )
            self._is_stuck = True
            self._snapshots.set_blocked(str(error))
            return
        if self._is_stuck:
            log.info("journal.unstuck")
            self._is_stuck = False
            self._snapshots.set_blocked("")
        for action in self._actions:
            if isinstance(action, Send):
                packet = Packet(action.message, self.incarnation, action.body)
                self._hub.send(action.route, packet)
            elif isinstance(action, LogLine):
                write = log.warning if action.is_warning else log.info
                write(action.event, pipeline=action.pipeline_id, why=action.detail)
        self._actions = []

    def _publish_status(self) -> None:
        now_s = self._clock.now_s()
        counts = {
            "steps_failed": self._num_failed,
            "malformed": self._hub.num_malformed,
            "unsent": self._hub.num_unsent,
        }
        self._snapshots.publish(status_of(self.scheduler, counts))
        spent_s = self._clock.now_s() - now_s
        self._next_status_s = now_s + max(STATUS_S, spent_s / STATUS_SHARE)
