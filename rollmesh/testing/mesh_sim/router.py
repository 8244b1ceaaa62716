"""The simulated router process: group scheduler and fleet behind one name, as in serve/router.

It keeps nothing over a crash but the operator's changes: a restart is a new incarnation with the
engines of its argv.
"""

import collections
import typing

from rollmesh.core.config import RouterConfig
from rollmesh.core.ids import GroupId
from rollmesh.engine.fleet import Action as FleetAction
from rollmesh.engine.fleet import (
    ContinueEngine,
    EngineProbed,
    FleetSettings,
    ProbeEngine,
    PublishTable,
)
from rollmesh.engine.roster import FleetChanges
from rollmesh.serve.router.groups import MAX_UNBEGUN
from rollmesh.serve.router.status import entries
from rollmesh.testing.mesh_sim.engine import SimEngine
from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.wire.fleet import (
    AddEngine,
    AskTable,
    DropEngine,
    EngineFaulted,
    EnginePhase,
    FenceEngine,
    FleetAsk,
    FleetChanged,
    JoinEngine,
)
from rollmesh.wire.frames import Packet
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.messages import (
    AnyMessage,
    AskRefused,
    GroupMoved,
    GroupReturned,
    GroupStarted,
    GroupState,
    RunGroup,
    WorkerHello,
    WorkerLeft,
)

TICK_S = 0.1
MAX_ATTEMPTS = (1000, 3)
"""Limit on attempts in every other seed, in which bad luck then ends groups with that reason."""
MAX_QUEUED = (5, 10_000, 10_000)
"""Queue length of every third seed, often full."""
CLIENT_GRACE_S = 3.0
OF_THE_FLEET = frozenset(
    {*typing.get_args(FleetAsk), AddEngine, AskTable, DropEngine, EngineFaulted}
)
FLEET = FleetSettings(probe_s=0.5, join_probe_s=0.1, answer_s=1.0, fence_s=0.3, push_s=0.5)


class SimRouter(Node):
    """One router process."""

    def __init__(self, kernel: Kernel, network: Network, engines: dict[str, SimEngine]) -> None:
        super().__init__("router")
        self._kernel = kernel
        self._network = network
        self._engines = engines
        self._settings = RouterConfig(
            beat_s=0.2,
            missed_beats=4,
            max_attempts=MAX_ATTEMPTS[kernel.seed % 2],
            client_grace_s=CLIENT_GRACE_S,
            max_lag_s=1.5,
            max_queued_groups=MAX_QUEUED[kernel.seed % 3],
        )
        self._excuses: collections.Counter[GroupId] = collections.Counter()
        """Counts of all incarnations."""
        self._begun: dict[GroupId, set[int]] = collections.defaultdict(set)
        """Attempts that a worker confirmed to a router of any incarnation."""
        self._unconfirmed: set[tuple[GroupId, int]] = set()
        """Attempts that this incarnation sent to a worker, until one confirms them; an earlier one
        may have sent another attempt with the same number.
        """
        self._unbegun: dict[GroupId, set[int]] = collections.defaultdict(set)
        """Attempts that ended before they were confirmed; their client knows of the excuse."""
        self._given: dict[str, dict[GroupId, None]] = collections.defaultdict(dict)
        """Everything that each worker was asked to run."""
        self._changes = FleetChanges()
        """The file that keeps the operator's changes."""
        self._begin_life()
        network.attach(self, self._receive)

    @property
    def incarnation(self) -> str:
        return f"router.{self.num_crashes}"

    def start(self) -> None:
        for url in self._engines:
            self._do_fleet(self.fleet.step(Received(b"", JoinEngine(0, url)), self._now_s()))
        self._tick()

    def restart(self) -> None:
        super().restart()
        self._network.transitions.forget("group")
        self._network.transitions.forget("worker")
        self._network.transitions.forget("fleet")
        self._begin_life()
        self.start()

    def held(self) -> int:
        """Return everything that should be gone at rest."""
        return (
            sum(entries(self.group_scheduler).values()) + self.group_scheduler.table.num_body_bytes
        )

    def _begin_life(self) -> None:
        self._num_groups = 0
        self.group_scheduler = self._network.machines.group_scheduler(
            self._settings, self._kernel.now_s(self)
        )
        self.fleet = self._network.machines.fleet(FLEET, self._changes)
        self._unconfirmed.clear()

    def _now_s(self) -> float:
        return self._kernel.now_s(self)

    def _tick(self) -> None:
        self._do(self.group_scheduler.step(Ticked(), self._now_s()))
        states = {each.worker_id: each.state for each in self.group_scheduler.membership.workers}
        self._network.transitions.watch("worker", states)
        self._check_seats()
        self._do_fleet(self.fleet.step(Ticked(), self._now_s()))
        self._kernel.after(TICK_S, self._tick, self)

    def _receive(self, source: str, packet: Packet) -> None:
        event = Received(source.encode(), packet.message, packet.body, packet.router)
        self._note_excuses(packet.message)
        if type(packet.message) in OF_THE_FLEET:
            before = self.fleet.table()
            self._do_fleet(self.fleet.step(event, self._now_s()))
            if isinstance(packet.message, FenceEngine):
                self._check_fence(packet.message, before)
            return
        self._do(self.group_scheduler.step(event, self._now_s()))
        if isinstance(packet.message, WorkerHello):
            self._send(Send(event.route, self.fleet.table()))

    def _check_fence(self, ask: FenceEngine, before: FleetChanged) -> None:
        """Assert that `ask` fenced its engine only beside another READY one.

        The others are taken from the table before the step. The step also fences engines whose
        probes are overdue, which happens in the same step after the router was frozen.
        """
        ready = {row.url for row in before.engines if row.phase is EnginePhase.READY}
        is_fenced = any(
            row.url == ask.url and row.phase is EnginePhase.FENCED and row.detail == ask.detail
            for row in self.fleet.table().engines
        )
        assert not is_fenced or ready != {ask.url}, "the last engine was fenced"

    def _check_seats(self) -> None:
        """Assert that a group and its worker refer to each other only."""
        seated = {g: w.worker_id for w in self.group_scheduler.membership.workers for g in w.groups}
        groups = self.group_scheduler.table.groups.values()
        assert seated == {g.group_id: g.worker_id for g in groups if g.worker_id}
        assert sum(len(w.groups) for w in self.group_scheduler.membership.workers) == len(seated)

    def _note_excuses(self, message: AnyMessage) -> None:
        """Return the groups whose attempts may be excused after this message."""
        if isinstance(message, GroupReturned):
            self._excuses[message.group_id] += 1
        elif isinstance(message, GroupStarted | WorkerHello):
            held = message.holds if isinstance(message, WorkerHello) else (message,)
            for each in held:
                self._begun[each.group_id].add(each.attempt)
                self._unconfirmed.discard((each.group_id, each.attempt))
        elif isinstance(message, WorkerLeft):
            # Also of those that run elsewhere by now: its end may be known already.
            self._excuses.update(self._given[message.worker_id].keys())

    def _do(self, sends: list[Send]) -> None:
        groups = self.group_scheduler.table.groups
        if sends or len(groups) != self._num_groups:
            self._num_groups = len(groups)
            states = {group_id: group.state for group_id, group in groups.items()}
            self._network.transitions.watch("group", states)
        for send in sends:
            self._send(send)

    def _do_fleet(self, actions: list[FleetAction]) -> None:
        self._changes = self.fleet.changes
        if not actions:
            return
        table = self.fleet.table()
        phases = {row.url: row.phase for row in table.engines}
        self._network.transitions.watch("fleet", phases)
        for action in actions:
            match action:
                case Send():
                    if action.route:
                        self._send(action)
                case PublishTable(message):
                    for route in self.group_scheduler.worker_routes():
                        self._send(Send(route, message))
                case ProbeEngine(url, serial):
                    self._probe(url, serial, resume=False)
                case ContinueEngine(url, serial):
                    self._probe(url, serial, resume=True)

    def _probe(self, url: str, serial: int, *, resume: bool) -> None:
        engine, num_crashes = self._engines[url], self.num_crashes

        def arrive() -> None:
            ok = engine.alive and not self._network.strikes("call_error")
            if ok and resume:
                engine.resume()
            probed = EngineProbed(
                url=url,
                serial=serial,
                ok=ok,
                incarnation=engine.incarnation if ok else "",
                policy_version=engine.policy_version if ok else -1,
                num_running=len(engine.running) if ok else 0,
                detail="" if ok else "does not answer",
            )
            self._network.answer(self, num_crashes, lambda: self._probed(probed))

        self._kernel.after(self._kernel.rng.uniform(0.001, 0.02), arrive)

    def _probed(self, probed: EngineProbed) -> None:
        self._do_fleet(self.fleet.step(probed, self._now_s()))

    def _send(self, send: Send) -> None:
        message = send.message
        if isinstance(message, AskRefused):
            self._network.num["refused"] += 1
        elif isinstance(message, GroupMoved) and message.state is GroupState.QUEUED:
            is_begun = message.attempt in self._begun[message.group_id]
            if not is_begun or (message.group_id, message.attempt) in self._unconfirmed:
                self._unbegun[message.group_id].add(message.attempt)
        elif isinstance(message, RunGroup):
            # A copy of it may run in the next process of that worker; that is no further attempt.
            num_unbegun = min(len(self._unbegun[message.group_id]), MAX_UNBEGUN)
            most = self._settings.max_attempts + self._excuses[message.group_id] + num_unbegun
            self._given[send.route.decode()][message.group_id] = None
            self._unconfirmed.add((message.group_id, message.attempt))
            assert message.attempt <= most, f"{message.group_id}: attempt {message.attempt}"
        packet = Packet(send.message, self.incarnation, send.body)
        self._network.send(self, send.route.decode(), packet)
