"""The router process: one synchronous loop that polls, receives, steps the machines and sends.

- A turn never blocks on a peer, an engine or an HTTP reader. A full queue refuses a send. The HTTP
  server and the probes of engines run in a side thread. Bodies pass through unopened. No message
  ends the loop.
- Every message carries the router's incarnation, by which peers notice a restart.
- The kernel reports the end of local workers by pidfds, at most MAX_PIDS, one look late, so that
  launch, which knows the cause, reports first. A pid of another pid namespace is not watched.
"""

import asyncio
import collections
import gc
import os
import select
import socket
import typing
from pathlib import Path

import msgspec

from rollmesh.core.addresses import advertised
from rollmesh.core.clock import Clock, SystemClock
from rollmesh.core.config import Config
from rollmesh.core.errors import AddressError
from rollmesh.core.heap import Heap, note_freed
from rollmesh.core.ids import new_id
from rollmesh.core.logs import Occasional, get_logger, setup
from rollmesh.core.metrics import Exposition, Source
from rollmesh.core.process import Ready, Stop, announce, http_address, listen, pid_space
from rollmesh.core.run_state import make_folder_mark
from rollmesh.core.types import UNVERSIONED
from rollmesh.engine.backend import BackendFactory, backend_factory
from rollmesh.engine.fleet import Action as FleetAction
from rollmesh.engine.fleet import (
    ContinueEngine,
    EngineProbed,
    Fleet,
    FleetSettings,
    ProbeEngine,
    PublishTable,
)
from rollmesh.engine.fleet import Event as FleetEvent
from rollmesh.engine.fleet_loop import ANSWER_MARGIN_S, PROBE_SHORTAGE_WAIT_S, probe_engine
from rollmesh.engine.http import HttpClient
from rollmesh.engine.roster import ChangesFile
from rollmesh.runtime.heap_trimmer import HeapTrimmer
from rollmesh.serve.router.group_scheduler import GroupScheduler
from rollmesh.serve.router.status import RouterStatus, figures_of, status_of
from rollmesh.serve.router.workers import WorkerHealth
from rollmesh.serve.status_app import SnapshotCell, StatusApp
from rollmesh.wire.fleet import (
    AddEngine,
    AskTable,
    DropEngine,
    EngineFaulted,
    EnginesListed,
    FleetAsk,
    JoinEngine,
    ListEngines,
    PublisherLeft,
    SleepEngine,
)
from rollmesh.wire.frames import Packet
from rollmesh.wire.keys import Role, read_keys
from rollmesh.wire.machine import GroupNewsBatcher, Received, Send, Ticked
from rollmesh.wire.members import ROUTER, Access
from rollmesh.wire.messages import (
    AddressesAnswered,
    AnyMessage,
    AskAddresses,
    AskMesh,
    EnvFailed,
    GroupMoved,
    MeshAnswered,
    WorkerExited,
    WorkerHello,
    WorkerLeft,
)
from rollmesh.wire.sockets import Hub, WakeSignal, wait

MAX_PIDS = 512
CAUSE = "its process is gone"


class LocalPids:
    """Watches the processes of workers on this machine."""

    def __init__(self, space: str) -> None:
        """`space` is the pid namespace of this process, which workers name in their hello; ''
        watches none.
        """
        self._space = space
        self._poll = select.poll()
        self._worker_of: dict[int, tuple[str, int]] = {}
        """Worker id and pid, by pidfd."""
        self._ended: list[WorkerExited] = []

    def watch(self, hello: WorkerHello) -> None:
        """Report when this worker's process ends, if it runs in this pid namespace."""
        worker = (hello.worker_id, hello.pid)
        is_known = worker in self._worker_of.values()
        is_ours = bool(self._space) and hello.pid_space == self._space
        if not is_ours or is_known or len(self._worker_of) >= MAX_PIDS:
            return
        try:
            pidfd = os.pidfd_open(hello.pid)
        except (OSError, OverflowError):  # not here, no pid at all, or a kernel without pidfds
            return
        self._worker_of[pidfd] = worker
        self._poll.register(pidfd, select.POLLIN)

    def take_ended(self) -> list[WorkerExited]:
        """Return the ends seen at the last look, and look again."""
        ended, self._ended = self._ended, []
        for pidfd, _ in self._poll.poll(0):
            worker_id, pid = self._unwatch(pidfd)
            self._ended.append(WorkerExited(worker_id, pid, CAUSE))
        return ended

    def forget(self, exited: WorkerExited) -> None:
        """Drop an end that was reported by a process that knows its cause."""
        worker = (exited.worker_id, exited.pid)
        self._ended = [each for each in self._ended if (each.worker_id, each.pid) != worker]
        for pidfd in [each for each, known in self._worker_of.items() if known == worker]:
            self._unwatch(pidfd)

    def close(self) -> None:
        """Stop watching all processes."""
        for pidfd in self._worker_of:
            os.close(pidfd)
        self._worker_of.clear()

    def _unwatch(self, pidfd: int) -> tuple[str, int]:
        self._poll.unregister(pidfd)
        os.close(pidfd)
        return self._worker_of.pop(pidfd)


log = get_logger()


class SideThread:
    """Serves HTTP and probes engines beside the router's loop."""

    def __init__(
        self,
        listening: socket.socket,
        board: SnapshotCell[RouterStatus],
        bell: WakeSignal,
        probe_timeout_s: float,
        figures: Source | None = None,
        connect: BackendFactory | None = None,
    ) -> None:
        """Serve on `listening` from `start` on, with `figures` of the snapshot; AddressError if
        that needs a token.
        """
        exposition = Exposition("router")
        if figures:
            exposition.add(figures)
        setting = "router.http_bind"
        self._face = StatusApp(listening, board, exposition, setting=setting, until=self._probe)
        self._bell = bell
        self._connect = connect
        self._probe_timeout_s = probe_timeout_s
        self._answers: collections.deque[EngineProbed] = collections.deque()
        self._asks: asyncio.Queue[ProbeEngine | ContinueEngine | None] = asyncio.Queue()

    def start(self) -> None:
        """Return when the HTTP server serves."""
        self._face.start()

    def probe(self, ask: ProbeEngine | ContinueEngine) -> None:
        """Run a probe; its answer will be in `take_answers`, and the loop is woken."""
        self._face.call(self._asks.put_nowait, ask)

    def take_answers(self) -> list[EngineProbed]:
        """Return the answers since the last call."""
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def close(self) -> None:
        """Return when the thread has ended."""
        self._face.call(self._asks.put_nowait, None)
        self._face.close()

    async def _probe(self) -> None:
        http = HttpClient(shortage_wait_s=PROBE_SHORTAGE_WAIT_S)
        async with http, asyncio.TaskGroup() as probes:
            running: set[asyncio.Task[None]] = set()
            while ask := await self._asks.get():
                probe = probes.create_task(self._answer(ask, http))
                running.add(probe)
                probe.add_done_callback(running.discard)
            for probe in running:  # the router does not wait for an engine that hangs
                probe.cancel()

    async def _answer(self, ask: ProbeEngine | ContinueEngine, http: HttpClient) -> None:
        try:
            answer = await probe_engine(ask, http, self._probe_timeout_s, self._connect)
        except Exception as error:  # door: an engine's answer must not end the thread
            log.exception("probe.failed", engine=ask.url)
            answer = EngineProbed(url=ask.url, serial=ask.serial, ok=False, detail=repr(error))
        self._answers.append(answer)
        self._bell.ring()


STATUS_SHARE = 0.05
"""Limit on the loop's time for snapshots; one of 10,000 workers takes 20 ms."""
GC_THRESHOLDS = (10_000, 100, 50)
"""The scheduler's state has no cycles, and a collection of it stops the loop for 150 ms when a
million rollouts wait.
"""
_OF_THE_FLEET = frozenset(
    {*typing.get_args(FleetAsk), AddEngine, AskTable, DropEngine, EngineFaulted, PublisherLeft}
)
_OF_WORKERS = frozenset({WorkerHello, WorkerLeft, WorkerExited, EnvFailed})


class Engines(msgspec.Struct, frozen=True):
    """Engines that the router is started with."""

    urls: tuple[str, ...]
    """URLs; empty: those of the settings."""
    have_fixed_weights: bool
    """No publisher reports here: the version that an engine reports counts."""
    least_version: int = UNVERSIONED
    """Older weights are not used: they are those of a run before it was resumed."""
    are_asleep: bool = False
    """Engines sleep until they are woken: a restarted router does not know who owns which GPUs."""
    changes: Path | None = None
    """File that keeps which engines the operator added and removed; None keeps nothing."""


def run(config: Config, engines: Engines, listen_fd: int | None, ready_fd: int | None) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends the process at once.

    Raises AddressError if an address is taken, or can be reached by others without keys, and
    ConfigError if `engines.changes` is not readable.
    """
    connect = backend_factory(config.engine.backend)
    setup("router", config.run_folder() if ready_fd is not None else None)
    Heap().settle()
    bell, clock = WakeSignal(), SystemClock()
    changes_file = ChangesFile(engines.changes)
    changes = changes_file.read()
    listening = listen(config.router.http_bind, listen_fd)
    board = SnapshotCell("router", clock, figures_of)
    keeper = HeapTrimmer(clock)
    side = SideThread(
        listening, board, bell, config.engine.probe_timeout_s, keeper.figures, connect
    )
    hub = open_hub(config.router.bind)
    fleet = Fleet(
        FleetSettings(
            believes_engines=engines.have_fixed_weights,
            answer_s=config.engine.probe_timeout_s + ANSWER_MARGIN_S,
            least_version=engines.least_version,
            allow_hosts=config.engine.allow_hosts,
        ),
        changes,
    )
    host = config.network.advertise
    address = advertised(hub.address, config.router.advertise or host)
    status_url = http_address(listening, host)
    loop = RouterLoop(config, fleet, hub, side, board, clock, address, status_url, changes_file)
    stop = Stop(bell.ring)
    for url in engines.urls or config.engine.urls:
        loop.join_engine(url, is_asleep=engines.are_asleep)
    loop.turn()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    side.start()
    keeper.start()
    announce(ready_fd, Ready("router", os.getpid(), address, status_url))
    log.info("router.started", bound=hub.address, address=address, http_address=status_url)
    try:
        while not stop.is_asked:
            wait([hub], bell, loop.idle_s())
            loop.turn()
    finally:
        keeper.close()
        side.close()
        loop.close()
        hub.close()
        log.info("router.stopped")


def open_hub(bind: str) -> Hub:
    """Open the router's Hub; AddressError names the setting."""
    try:
        keys = read_keys(role=Role.HUB)
        access = Access(keys, ROUTER) if keys else None
        return Hub(bind, keys, access=access)
    except AddressError as error:
        raise AddressError(f"router.bind = {error}") from None


class RouterLoop:
    """The router's loop and the state of a turn."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        hub: Hub,
        side: SideThread,
        board: SnapshotCell[RouterStatus],
        clock: Clock,
        address: str,
        status_url: str,
        changes: ChangesFile,
    ) -> None:
        """`address` and `status_url` are reported to peers."""
        self.incarnation = new_id("i")
        self._model = config.model
        self._changes = changes
        self._address = address
        self._status_url = status_url
        self._run_folder = config.run_folder().absolute()
        self._tick_s = config.router.beat_s / 2
        self._hub = hub
        self._side = side
        self._board = board
        self._clock = clock
        self._group_scheduler = GroupScheduler(config.router, clock.now_s())
        self._fleet = fleet
        self._num_received = 0
        self._num_failed = 0
        self._failures = Occasional()
        self._pids = LocalPids(pid_space())
        self._away: dict[str, str] = {}
        self._news = GroupNewsBatcher()
        self._next_tick_s = self._next_status_s = clock.now_s()
        self._num_body_bytes = 0
        """Bytes of requests at the last snapshot."""

    def join_engine(self, url: str, *, is_asleep: bool = False) -> None:
        """Add an engine that the router was started with."""
        ask = SleepEngine(0, url, 0.0) if is_asleep else JoinEngine(0, url)
        self._step_fleet(Received(b"", ask))

    def turn(self) -> None:
        """Take what has arrived, then tick if it is time."""
        for route, packet in self._hub.receive():
            self._take(route, packet)
        for answer in self._side.take_answers():
            self._step_fleet(answer)
        now_s = self._clock.now_s()
        if now_s >= self._news.due_s:
            for outgoing in self._news.take():
                self._hub.send(outgoing.route, Packet(outgoing.message, self.incarnation))
        if now_s >= self._fleet.due_s:
            self._step_fleet(Ticked())
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + self._tick_s
            for exited in self._pids.take_ended():
                self._on_packet(b"", Packet(exited))
            self._step_fleet(Ticked())
            self._group_scheduler.blocked_reasons.see_engines(self._fleet.why_none_serves())
            self._send(self._group_scheduler.step(Ticked(), now_s))
            self._log_takeover(now_s)
            self._log_losses()
            for each in self._group_scheduler.clients.take_forgotten():
                log.warning("client.forgotten", **msgspec.structs.asdict(each))
            if now_s >= self._next_status_s:
                self._hang_status()

    def idle_s(self) -> float:
        """Return for how long nothing needs a turn if nothing arrives."""
        due_s = min(self._news.due_s, self._fleet.due_s, self._next_tick_s)
        return max(0.0, due_s - self._clock.now_s())

    def close(self) -> None:
        """Stop watching processes."""
        self._pids.close()

    def _take(self, route: bytes, packet: Packet) -> None:
        """Handle a message; an exception that it causes is counted and logged in powers of two."""
        self._num_received += 1
        try:
            self._on_packet(route, packet)
        except Exception:  # door: one peer's message must not end the mesh
            self._num_failed += 1
            kind = type(packet.message).__name__
            if number := self._failures.number(kind):
                log.exception("packet.failed", kind=kind, number=number)

    def _on_packet(self, route: bytes, packet: Packet) -> None:
        message = packet.message
        event = Received(route, message, packet.body, packet.router)
        if type(message) in _OF_THE_FLEET:
            self._step_fleet(event)
            return
        if isinstance(message, AskAddresses):
            answer = AddressesAnswered(message.ask_id, self._address, self._status_url)
            self._send([Send(route, answer)])
            return
        if isinstance(message, AskMesh):
            self._send([Send(route, self._describe_mesh(message.ask_id))])
            return
        if isinstance(message, ListEngines):
            self._send([Send(route, self._list_engines(message.ask_id))])
            return
        if isinstance(message, WorkerHello):
            self._log_new(message)
        self._send(self._group_scheduler.step(event, self._clock.now_s()))
        if type(message) in _OF_WORKERS:
            self._note_worker(route, message)

    def _describe_mesh(self, ask_id: int) -> MeshAnswered:
        urls = tuple(each.url for each in self._fleet.table().engines)
        mark = make_folder_mark(self._run_folder)
        return MeshAnswered(ask_id, urls, str(self._run_folder), mark, self._clock.unix_s())

    def _note_worker(self, route: bytes, message: AnyMessage) -> None:
        """Handle what a worker's arrival or end means outside of the scheduler."""
        match message:
            case WorkerHello():
                self._send([Send(route, self._fleet.table())])
                self._pids.watch(message)
            case WorkerLeft(worker_id, reason):
                log.info("worker.left", worker_id=worker_id, reason=reason)
            case WorkerExited(worker_id, _, cause):
                self._pids.forget(message)
                log.warning("worker.exited", worker_id=worker_id, why=cause)
            case EnvFailed(worker_id, env, error):
                log.error("env.failed", worker_id=worker_id, env=env, why=error)

    def _log_new(self, hello: WorkerHello) -> None:
        """Answer a hello, which is repeated until then: a router that was away gets hundreds."""
        known = self._group_scheduler.membership.workers.get(hello.worker_id)
        if hello.loads_for_s > 0:
            log.info("worker.loading", worker_id=hello.worker_id, env=hello.env, pid=hello.pid)
        elif known is None or known.hello.pid != hello.pid:
            log.info("worker.joined", worker_id=hello.worker_id, env=hello.env, pid=hello.pid)

    def _list_engines(self, ask_id: int) -> EnginesListed:
        table = self._fleet.table()
        return EnginesListed(
            ask_id,
            table.engines,
            self._fleet.origins(),
            self._changes.is_kept,
            table.has_publisher,
            self._model.path,
            self._model.max_context_tokens,
        )

    def _step_fleet(self, event: FleetEvent) -> None:
        actions = self._fleet.step(event, self._clock.now_s())
        self._changes.keep(self._fleet.changes)  # before the operator gets an answer
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: FleetAction) -> None:
        if isinstance(action, PublishTable):
            packet = Packet(action.message, self.incarnation)
            self._hub.send_all(self._group_scheduler.worker_routes(), packet)
        elif isinstance(action, Send):
            self._send([action])
        else:
            self._side.probe(action)

    def _send(self, sends: list[Send]) -> None:
        for send in sends:
            if not send.route:  # an engine joined at the start
                continue
            if isinstance(send.message, GroupMoved):
                self._news.add(send.route, send.message, self._clock.now_s())
                continue
            self._hub.send(send.route, Packet(send.message, self.incarnation, send.body))

    def _log_takeover(self, now_s: float) -> None:
        """Log where work was found that an earlier router had assigned."""
        if found := self._group_scheduler.table.takeover.take_counts(now_s):
            log.info("router.recovered", **found)

    def _log_losses(self) -> None:
        states = {
            worker.worker_id: worker.state.value
            for worker in self._group_scheduler.membership.workers
        }
        away = {name: state for name, state in states.items() if state != WorkerHealth.LIVE.value}
        for worker_id, state in away.items() - self._away.items():
            log.warning(f"worker.{state}", worker_id=worker_id)
        for worker_id in (self._away.keys() - away.keys()) & states.keys():
            log.info("worker.returned", worker_id=worker_id)
        self._away = away

    def _hang_status(self) -> None:
        now_s = self._clock.now_s()
        counts = {
            "received": self._num_received,
            "packets_failed": self._num_failed,
            "malformed": self._hub.num_malformed,
            "refused": self._hub.num_refused,
            "unsent": self._hub.num_unsent,
        }
        status = status_of(self.incarnation, self._group_scheduler, self._fleet.table(), counts)
        status = msgspec.structs.replace(status, address=self._address, status_url=self._status_url)
        self._board.publish(status)
        before, self._num_body_bytes = (
            self._num_body_bytes,
            self._group_scheduler.table.num_body_bytes,
        )
        note_freed(max(0, before - self._num_body_bytes))
        spent_s = self._clock.now_s() - now_s
        self._next_status_s = now_s + spent_s / STATUS_SHARE
