"""A simulated worker and the launcher that restarts it.

    UP --crash, killed by a task, drained, recycled--> its process ended --launch--> UP

- A crash loses everything, and an answer to an earlier incarnation is dropped.
- Heartbeats come from a node of their own, so that a held loop stops everything else.
- The launcher reports a local worker's end to the router once, and that message may be lost. It
  never dies.
"""

import collections
from typing import Protocol

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.engine.backend import Finish
from rollmesh.engine.view import FleetView, is_leased, is_lost
from rollmesh.runtime.generation.events import (
    AbortAttempt,
    AttemptSampled,
    ChooseEngine,
    EngineAttemptFailed,
    EngineChosen,
    EngineLost,
    FleetMoved,
    ReportFault,
    Sealed,
    StartAttempt,
    UpdateBegun,
    is_resumable,
)
from rollmesh.runtime.generation.generation import Action as LegAction
from rollmesh.runtime.generation.generation import GenerationMachine
from rollmesh.serve.server.outbox import Forget, OutboxSettings
from rollmesh.serve.server.worker_machine import (
    Abort,
    Begin,
    GroupRunEnded,
    Left,
    StopAsked,
    Stopping,
    WorkerMachine,
    WorkerMachineSettings,
    WornOut,
)
from rollmesh.serve.server.worker_machine import Action as DutyAction
from rollmesh.testing.mesh_sim.engine import EngineChunk, SimEngine
from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.testing.mesh_sim.requesting_client import MALFORMED
from rollmesh.testing.mesh_sim.rollouts import (
    PLAIN,
    POISON,
    EnginelessGroups,
    SimGroupTurns,
    SimRollout,
)
from rollmesh.wire.fleet import AskTable, EngineFaulted, TableMessage
from rollmesh.wire.frames import Buffer, Packet, decode_ask
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked
from rollmesh.wire.messages import AskDrain, DrainAnswered, EnvFailed, WorkerBeat, WorkerExited

TICK_S = 0.1
BEAT_S = 0.2
DRAIN_S = 0.3
FAREWELL_S = 0.3
"""Seconds that a stopped worker has to finish, and then to deliver."""


class Parent(Protocol):
    """The parent of the worker's process."""

    def ended(self, worker: "SimWorker", pid: int, cause: str) -> None:
        """The process has ended."""


class SimWorker(Node):
    """One worker process."""

    def __init__(
        self,
        name: str,
        kernel: Kernel,
        network: Network,
        engines: dict[str, SimEngine],
        parent: Parent,
        *,
        is_local: bool,
    ) -> None:
        super().__init__(name)
        self.is_local = is_local
        self._host = "here" if is_local else "there"
        self.beater = Node(f"{name}.beat")
        self.kills: dict[GroupId, int] = {}
        """How often each group has killed this worker's process."""
        self._parent = parent
        self._stalled_s = 0.0
        self.full_until_s = 0.0
        """Until then it is over its budget, as long as it has groups."""
        self._has_parcels = False
        self._kernel = kernel
        self._network = network
        self._engines = engines
        self.new_machine = network.machines.generation
        self._forget_all()
        network.attach(self, self._receive)
        network.attach(self.beater, self._receive_beside)

    def start(self) -> None:
        self._tick()
        self._beat()

    def crash(self) -> None:
        self.end("killed by signal 9")

    def end(self, cause: str) -> None:
        """End the process; its parent learns why."""
        pid = self._pid
        super().crash()
        self.beater.crash()
        self._network.transitions.forget(f"outbox@{self.name}")
        self._forget_all()
        self._parent.ended(self, pid, cause)

    def restart(self) -> None:
        super().restart()
        self.beater.restart()
        if not self.is_local and self._network.strikes("moved"):
            self._host = f"there-{self.num_crashes}"
        self._forget_all()
        if self._network.strikes("env_failed"):
            failed = EnvFailed(
                self.name, "guess", "no module named guess", self._pid, float(self._pid)
            )
            self._send("router", Packet(failed))
            self.end("exit code 2")
        else:
            self.start()

    def freeze(self, until_s: float) -> None:
        """Suspend the process: heartbeats stop too."""
        super().freeze(until_s)
        self.beater.freeze(until_s)

    def stall(self, until_s: float) -> None:
        """Hold the loop; heartbeats continue."""
        self._stalled_s = self._kernel.now_s()
        super().freeze(until_s)

    def stop(self) -> None:
        """Terminate: it has a moment for what it runs, and another to deliver."""
        self._do(self.duties.step(StopAsked("the worker was stopped"), self._kernel.now_s(self)))
        self._kernel.after(DRAIN_S, self._cut_short, self)

    def wear_out(self) -> None:
        """The worker is worn out."""
        self._do(self.duties.step(WornOut("so many rollouts"), self._kernel.now_s(self)))

    def _cut_short(self) -> None:
        self._do(self.duties.step(Stopping("the worker was stopped"), self._kernel.now_s(self)))
        if self.alive:
            self._kernel.after(FAREWELL_S, self._go, self)

    def _go(self) -> None:
        self._send("router", Packet(self.duties.farewell(), self.duties.router))
        self.end("exit code 0")

    def held(self) -> int:
        """Return everything that should be gone at rest."""
        held = len(self.groups) + len(self.payloads) + len(self.errands)
        return held + len(self.duties.holds())

    @property
    def _pid(self) -> int:
        return self.num_crashes + 1

    def _forget_all(self) -> None:
        self.view = FleetView()
        self.groups: dict[GroupId, list[SimRollout]] = {}
        self.payloads: dict[GroupId, bytes] = {}
        self.errands = EnginelessGroups(self._kernel, self, self._end_errand, self._be_killed)
        self.duties = WorkerMachine(
            WorkerMachineSettings(
                worker_id=self.name,
                env="guess",
                max_rollouts=6,
                pid=self._pid,
                started_s=float(self._pid),
                host=self._host,
                outbox=OutboxSettings(
                    resend_s=0.5, max_resend_s=2.0, delivery_timeout_s=10.0, absent_s=0.8
                ),
            )
        )

    # time and messages

    def _tick(self) -> None:
        for rollouts in list(self.groups.values()):
            for rollout in rollouts:
                rollout.tick()
        self._do(self.duties.step(Ticked(), self._kernel.now_s(self)))
        if self.alive:
            self._weigh()
            self._kernel.after(TICK_S, self._tick, self)

    def _weigh(self) -> None:
        before = self.duties.budget.state
        is_full = self._kernel.now_s() < self.full_until_s
        self.duties.weigh(self.duties.settings.max_held_bytes if is_full else 0)
        self.note("budget", before.value, self.duties.budget.state.value)

    def _beat(self) -> None:
        now_s = self._kernel.now_s()
        lag_s = now_s - self._stalled_s if self.frozen_until_s > now_s else 0.0
        beat = WorkerBeat(
            worker_id=self.name,
            num_running=self.duties.num_rollouts,
            accepting=self.duties.accepting,
            unacked_bytes=self.duties.outbox.unacked_bytes,
            waits_for=self.duties.waits_for,
            held_bytes=self.duties.budget.held_bytes,
            loop_lag_s=lag_s,
            rss_bytes=0,
            num_finished=0,
            num_calls=0,
            num_tokens=0,
            state=self.duties.state.value,
            started_s=float(self._pid),
        )
        self._network.send(self.beater, "router", Packet(beat, self.duties.router))
        self._kernel.after(BEAT_S, self._beat, self.beater)

    def _receive_beside(self, source: str, packet: Packet) -> None:
        # What comes to the beats' socket is for the loop, when it turns.
        self._kernel.after(0.0, lambda: self._receive(source, packet), self)

    def _receive(self, source: str, packet: Packet) -> None:
        if isinstance(packet.message, TableMessage):
            if self.view.update(packet.message, packet.router):
                self._network.send(self, "router", Packet(AskTable(), self.duties.router))
            self._tell_of_fleet()
        route = ROUTER if source == "router" else source.encode()
        event = Received(route, packet.message, packet.body, packet.router)
        self._do(self.duties.step(event, self._kernel.now_s(self)))

    def _tell_of_fleet(self) -> None:
        for rollout in [each for group in self.groups.values() for each in group]:
            machine = rollout.machine
            row = self.view.find(machine.attempt_url) if machine.attempt_url else None
            if machine.attempt_url and (row is None or is_lost(row, machine.attempt_incarnation)):
                rollout.step(EngineLost(machine.attempt_url))
            is_updating = row is not None and is_leased(row)
            paused = self.view.is_paused(rollout.machine.min_policy_version)
            rollout.step(FleetMoved(is_updating if machine.attempt_url and row else paused))
            if row and is_updating:
                rollout.step(UpdateBegun(row.url))

    def _do(self, actions: list[DutyAction]) -> None:
        self._watch()
        for action in actions:
            match action:
                case Send(route, message):
                    target = "router" if route == ROUTER else route.decode()
                    self._send(target, Packet(message, self.duties.router, self._body(action)))
                case Begin():
                    self._begin(action)
                case Abort():
                    self._abort(action)
                case Forget(group_id):
                    self.groups.pop(group_id, None)
                    self.payloads.pop(group_id, None)
                case Left(num_given_back):
                    if num_given_back:
                        self._network.num["given_back"] += num_given_back
                    self.end("exit code 75")

    def _begin(self, begin: Begin) -> None:
        group_id, body = begin.group_id, bytes(begin.body)
        if body in (PLAIN, POISON):
            self.errands.begin(group_id, body)
            return
        indices = range(begin.num_samples)
        least = decode_ask(body).min_policy_version
        rollouts = [SimRollout(self._kernel, group_id, index, self, least) for index in indices]
        self.groups[group_id] = rollouts
        for rollout in rollouts:
            rollout.begin()

    def _abort(self, abort: Abort) -> None:
        if self.errands.abort(abort.group_id):
            self._tell_ended(abort.group_id, complete=False)
        for rollout in self.groups.get(abort.group_id, []):
            rollout.error = abort.reason
            rollout.step(Sealed(abort.reason))

    def _end_errand(self, group_id: GroupId) -> None:
        self._tell_ended(group_id, complete=True)

    def _be_killed(self, group_id: GroupId) -> None:
        self._network.num["killed"] += 1
        self.kills[group_id] = self.kills.get(group_id, 0) + 1
        self.end("killed by signal 11")

    def _tell_ended(self, group_id: GroupId, *, complete: bool, payload: bytes = b"done") -> None:
        payload = MALFORMED if self._network.spoils_a_result() else payload
        self.payloads[group_id] = payload
        ended = GroupRunEnded(group_id, complete, len(payload))
        self._do(self.duties.step(ended, self._kernel.now_s(self)))

    def _body(self, send: Send) -> Buffer:
        group_id = getattr(send.message, "group_id", None)
        is_parcel = send.route != ROUTER
        return self.payloads[group_id] if is_parcel and group_id in self.payloads else send.body

    def _send(self, target: str, packet: Packet) -> None:
        self._network.send(self, target, packet)

    def _watch(self) -> None:
        parcels = self.duties.outbox.results.items()
        if not parcels and not self._has_parcels:
            return
        self._has_parcels = bool(parcels)
        states = {group_id: parcel.state for group_id, parcel in parcels}
        self._network.transitions.watch(f"outbox@{self.name}", states)

    # what rollouts need

    def now_s(self) -> float:
        return self._kernel.now_s(self)

    def strikes(self, fault: str) -> bool:
        return self._network.strikes(fault)

    def note(self, machine: str, before: str, after: str) -> None:
        self._network.transitions.note(machine, before, after)

    def rollout_over(self, rollout: SimRollout) -> None:
        siblings = self.groups.get(rollout.group_id)
        if siblings is None or not all(each.is_over for each in siblings):
            return
        error = next((each.error for each in siblings if each.error), "")
        turns = () if error else tuple(turn for each in siblings for turn in each.turns)
        failed = tuple(each.index for each in siblings if each.has_failed)
        payload = msgspec.msgpack.encode(SimGroupTurns(turns, error, failed))
        del self.groups[rollout.group_id]
        self._tell_ended(rollout.group_id, complete=not error, payload=payload)

    def carry_out(self, rollout: SimRollout, machine: GenerationMachine, action: LegAction) -> None:
        match action:
            case ChooseEngine(min_policy_version):
                row = self.view.choose(rollout.session_key, min_policy_version)
                if row:
                    chosen = EngineChosen(row.url, row.incarnation, row.policy_version)
                    self._kernel.after(0.0, lambda: self._tell(rollout, machine, chosen), self)
            case StartAttempt():
                self._start_attempt(rollout, machine, action)
            case AbortAttempt(_, rid, url):
                self._engines[url].abort(rid)
            case ReportFault(url, incarnation, detail):
                fault = EngineFaulted(url, incarnation, detail)
                self._send("router", Packet(fault, self.duties.router))

    def _start_attempt(
        self, rollout: SimRollout, machine: GenerationMachine, attempt: StartAttempt
    ) -> None:
        def answer(chunk: EngineChunk) -> None:
            finish = Finish(chunk.finish) if chunk.finish else None  # type: ignore[arg-type]
            sampled = AttemptSampled(
                attempt.attempt,
                chunk.token_ids,
                [0.0] * len(chunk.token_ids),
                chunk.policy_version,
                finish,
            )
            self._tell(rollout, machine, sampled)

        def hang_up() -> None:
            self._tell(
                rollout, machine, EngineAttemptFailed(attempt.attempt, "the connection broke")
            )

        is_bound = not is_resumable(machine.request.params)
        request = (machine.context(), attempt.max_new_tokens, is_bound, rollout.is_slow)
        self._engines[attempt.url].generate(self, attempt.rid, request, answer, hang_up)

    def _tell(
        self,
        rollout: SimRollout,
        machine: GenerationMachine,
        event: EngineChosen | AttemptSampled | EngineAttemptFailed,
    ) -> None:
        if rollout.machine is machine:
            rollout.step(event)
        else:
            machine.step(event, self._kernel.now_s(self))


SAY_DRAIN_S = 0.5
SAY_DRAINS = 3
"""Limit on repetitions of an AskDrain."""


class SimLaunch(Node):
    """Restarts workers, and sends drains."""

    def __init__(self, kernel: Kernel, network: Network) -> None:
        super().__init__("launch")
        self.num_ends: collections.Counter[str] = collections.Counter()
        """Processes that ended, by worker."""
        self._kernel = kernel
        self._network = network
        self._drains: dict[int, str] = {}
        self._num_drains = 0
        network.attach(self, self._receive)

    def ended(self, worker: SimWorker, pid: int, cause: str) -> None:
        """A worker's process has ended; another one is started."""
        self.num_ends[worker.name] += 1
        if worker.is_local:
            exited = WorkerExited(worker.name, pid, cause)
            self._network.send(self, "router", Packet(exited))
        self.raise_in(self._kernel.rng.uniform(0.1, 2.0), worker)

    def raise_in(self, delay_s: float, worker: SimWorker) -> None:
        """Start its process at that time unless it runs."""

        def rise() -> None:
            if not worker.alive:
                worker.restart()

        self._kernel.after(delay_s, rise)

    def drain(self, worker: SimWorker) -> None:
        """Send the request of `rollmesh drain`."""
        self._num_drains += 1
        self._drains[self._num_drains] = worker.name
        self._say_drain(self._num_drains, SAY_DRAINS)

    def _say_drain(self, ask_id: int, num_left: int) -> None:
        worker_id = self._drains.get(ask_id)
        if worker_id is None or not num_left:
            self._drains.pop(ask_id, None)
            return
        self._network.send(self, "router", Packet(AskDrain(ask_id, worker_id, "why not")))
        self._kernel.after(SAY_DRAIN_S, lambda: self._say_drain(ask_id, num_left - 1))

    def _receive(self, source: str, packet: Packet) -> None:
        assert source == "router"
        assert isinstance(packet.message, DrainAnswered)
        self._drains.pop(packet.message.ask_id, None)
