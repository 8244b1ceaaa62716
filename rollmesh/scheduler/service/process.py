"""Scheduler process: one loop that receives, steps the machine, journals, and sends, and its status
for HTTP and Prometheus.

- Nothing of a step is sent before its rows are on disk. While they cannot be written, nothing more
  is received.
- A turn waits only for the disk. Whatever arrives, the loop continues.
- Machine time starts at wall-clock time and never runs back, also across restarts. SIGTERM ends the
  process at once.
- The thread that owns the machine makes status snapshots. They never change, so that any thread may
  read them.

    GET /explain/PIPELINE     why it waits, and until when, as JSON; as text with ?text
"""

import os
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
from aiohttp import web

from rollmesh.core.addresses import advertised
from rollmesh.core.clock import Clock, SystemClock
from rollmesh.core.errors import AddressError, ConfigError, JournalError
from rollmesh.core.ids import new_id
from rollmesh.core.logs import Occasional, get_logger, setup
from rollmesh.core.metrics import Exposition, Figure
from rollmesh.core.process import Ready, Stop, announce, http_address, listen
from rollmesh.core.secret_files import hash_token
from rollmesh.scheduler.planning.planner import SchedulingPolicy
from rollmesh.scheduler.service.explain import FleetExplanation, explain_fleet, select_pipeline
from rollmesh.scheduler.service.journal import SqliteJournal
from rollmesh.scheduler.service.scheduler import FleetScheduler
from rollmesh.scheduler.service.state import Action, Event, LogLine, SchedulerSettings, WriteRows
from rollmesh.serve.status_app import SnapshotCell, StatusApp
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import Role, read_scheduler_keys
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.members import SCHEDULER, Access
from rollmesh.wire.scheduling import JoinNode, TicketState
from rollmesh.wire.sockets import Hub, WakeSignal, wait

QUANTILES = (0.5, 0.9, 0.99)


class ServiceStatus(msgspec.Struct, frozen=True, rename={"num_incarnations": "num_lives"}):
    """Answer of GET /status."""

    fleet: FleetExplanation
    counts: dict[str, int]
    """Events of this incarnation: asks, grants, evictions, resizes, pipeline.quarantined..."""
    num_incarnations: int
    """Scheduler processes with this journal so far, including this one."""
    num_waiting: int
    """Queued requests."""
    wait_s: dict[str, float]
    """Quantiles of the time from request to grant, over the newest grants."""


def status_of(scheduler: FleetScheduler, counts: dict[str, int]) -> ServiceStatus:
    """Make a snapshot; `counts` are those of the socket and the journal."""
    state = scheduler.state
    waits_s = sorted(state.waits_s)
    queued = (each.state is TicketState.QUEUED for each in state.tickets.values())
    return ServiceStatus(
        fleet=explain_fleet(state.fleet, scheduler.explain_context()),
        counts={**state.counts, **counts},
        num_incarnations=state.numbers.num_incarnations,
        num_waiting=sum(queued),
        wait_s={f"{q:g}": waits_s[int(q * (len(waits_s) - 1))] for q in QUANTILES if waits_s},
    )


def figures_of(status: ServiceStatus) -> Iterator[Figure]:
    """Metrics of a snapshot for Prometheus."""
    fleet = status.fleet
    yield Figure("scheduler_gpus_free", fleet.num_free, "Free GPUs on nodes that are up.")
    yield Figure("scheduler_asks_waiting", status.num_waiting, "Queued requests.")
    for quantile, wait_s in status.wait_s.items():
        labels = {"quantile": quantile}
        yield Figure("scheduler_wait_seconds", wait_s, "Time from request to grant.", labels)
    for event, number in status.counts.items():
        yield Figure("scheduler_events_total", number, "Events by name.", {"event": event})
    phases = Counter(node.phase.value for node in fleet.nodes)
    for phase, number in phases.items():
        yield Figure("scheduler_nodes", number, "Nodes by phase.", {"phase": phase})
    for pipeline in fleet.pipelines:
        labels = {"pipeline": pipeline.pipeline_id}
        workers = Counter(worker.phase.value for worker in pipeline.workers)
        for phase, number in workers.items():
            named = {**labels, "phase": phase}
            yield Figure("scheduler_workers", number, "Generation workers by phase.", named)
        is_out = pipeline.phase.value == "quarantined"
        yield Figure(
            "scheduler_quarantined", is_out, "Whether the pipeline is quarantined.", labels
        )
        longest_s = max((wait.for_s for wait in pipeline.waits), default=0.0)
        yield Figure(
            "scheduler_waiting_seconds", longest_s, "Longest current wait of the pipeline.", labels
        )
        credit_s = pipeline.credit_gpu_s
        yield Figure(
            "scheduler_credit_gpu_seconds",
            credit_s,
            "GPU seconds of generation owed to the pipeline.",
            labels,
        )


def snapshots_of(clock: Clock) -> SnapshotCell[ServiceStatus]:
    """Where the service's loop leaves its snapshots."""
    return SnapshotCell("scheduler", clock, figures_of)


def status_app_of(listening: socket.socket, snapshots: SnapshotCell[ServiceStatus]) -> StatusApp:
    """HTTP server of the snapshots; AddressError if others can reach it and there is no token."""

    async def explain(request: web.Request) -> web.Response:
        status = snapshots.newest()
        if status is None:
            return web.Response(status=503, text="the scheduler is starting\n")
        selected = select_pipeline(status.fleet, request.match_info["pipeline"])
        if selected.error:
            return web.Response(status=404, text=f"{selected.error}\n")
        if "text" in request.query:
            lines = [line for each in selected.pipelines for line in each.lines]
            return web.Response(text="\n".join([*lines, ""]))
        return web.Response(body=msgspec.json.encode(selected), content_type="application/json")

    routes = [web.get("/explain/{pipeline}", explain)]
    exposition = Exposition("scheduler")
    return StatusApp(listening, snapshots, exposition, setting="http_bind", routes=routes)


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
    address, status_url = advertised(hub.address), http_address(listening)
    announce(ask.ready_fd, Ready("scheduler", os.getpid(), address, status_url))
    log.info("scheduler.started", address=address, http_address=status_url)
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
