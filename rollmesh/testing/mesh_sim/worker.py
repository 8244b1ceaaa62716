"""A simulated worker: Duties for its groups, a rollout's machine for each turn, legs to engines.

Invariant: crashing loses all of it, and an answer to an earlier life reaches nobody. Driven by the
kernel: ticks, messages, and the answers of engines.
"""

import msgspec

from rollmesh.core.ids import GroupId
from rollmesh.engine.answers import Finish
from rollmesh.engine.view import FleetView
from rollmesh.runtime.generation import Action as LegAction
from rollmesh.runtime.generation import GenerationMachine
from rollmesh.runtime.generation_events import (
    AbortLeg,
    ChooseEngine,
    EngineChosen,
    EngineLost,
    FleetMoved,
    LegFailed,
    LegSampled,
    ReportFault,
    Sealed,
    StartLeg,
)
from rollmesh.serve.server.duties import Abort, Begin, Duties, DutiesSettings, Ended
from rollmesh.serve.server.duties import Action as DutyAction
from rollmesh.serve.server.outbox import Forget, OutboxSettings
from rollmesh.testing.mesh_sim.engine import EngineChunk, SimEngine
from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.testing.mesh_sim.rollouts import SimRollout
from rollmesh.testing.mesh_sim.turns import GroupTurns
from rollmesh.wire.frames import Buffer, Packet
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked
from rollmesh.wire.messages import (
    EngineFaulted,
    EnginePhase,
    EngineRow,
    FleetChanged,
    WorkerBeat,
)

TICK_S = 0.1
BEAT_S = 0.2


class SimWorker(Node):
    """One worker process."""

    def __init__(
        self, name: str, kernel: Kernel, network: Network, engines: dict[str, SimEngine]
    ) -> None:
        super().__init__(name)
        self._kernel = kernel
        self._network = network
        self._engines = engines
        self.new_machine = network.machines.generation
        self._forget_all()
        network.attach(self, self._receive)

    def start(self) -> None:
        self._tick()
        self._beat()

    def crash(self) -> None:
        super().crash()
        self._network.transitions.forget(f"outbox@{self.name}")
        self._forget_all()

    def restart(self) -> None:
        super().restart()
        self.start()

    def held(self) -> int:
        """Everything that should be gone when nothing is left to do."""
        return len(self.groups) + len(self.payloads) + len(self.duties.holds())

    def _forget_all(self) -> None:
        self.view = FleetView()
        self.groups: dict[GroupId, list[SimRollout]] = {}
        self.payloads: dict[GroupId, bytes] = {}
        self.duties = Duties(
            DutiesSettings(
                worker_id=self.name,
                env="guess",
                max_rollouts=6,
                outbox=OutboxSettings(resend_s=0.5, max_resend_s=2.0),
            )
        )

    # time and messages

    def _tick(self) -> None:
        for rollouts in list(self.groups.values()):
            for rollout in rollouts:
                rollout.tick()
        self._do(self.duties.step(Ticked(), self._kernel.now_s()))
        self._kernel.after(TICK_S, self._tick, self)

    def _beat(self) -> None:
        beat = WorkerBeat(
            worker_id=self.name,
            num_running=self.duties.num_rollouts,
            accepting=self.duties.accepting,
            unacked_bytes=self.duties.outbox.unacked_bytes,
            loop_lag_s=0.0,
            rss_bytes=0,
            num_finished=0,
            num_calls=0,
            num_tokens=0,
        )
        self._send("router", Packet(beat, self.duties.router))
        self._kernel.after(BEAT_S, self._beat, self)

    def _receive(self, source: str, packet: Packet) -> None:
        if isinstance(packet.message, FleetChanged):
            self.view.update(packet.message, packet.router)
            self._tell_of_fleet()
        route = ROUTER if source == "router" else source.encode()
        event = Received(route, packet.message, packet.body, packet.router)
        self._do(self.duties.step(event, self._kernel.now_s()))

    def _tell_of_fleet(self) -> None:
        for rollout in [each for group in self.groups.values() for each in group]:
            machine = rollout.machine
            row = self.view.find(machine.leg_url) if machine.leg_url else None
            if machine.leg_url and is_lost(row, machine.leg_incarnation):
                rollout.step(EngineLost(machine.leg_url))
            paused = self.view.is_paused(rollout.machine.min_policy_version)
            rollout.step(FleetMoved(paused))

    def _do(self, actions: list[DutyAction]) -> None:
        self._watch()
        for action in actions:
            match action:
                case Send(route, message):
                    target = "router" if route == ROUTER else route.decode()
                    self._send(target, Packet(message, self.duties.router, self._body(action)))
                case Begin(group_id, num_samples):
                    rollouts = [
                        SimRollout(self._kernel, group_id, index, self)
                        for index in range(num_samples)
                    ]
                    self.groups[group_id] = rollouts
                    for rollout in rollouts:
                        rollout.begin()
                case Abort(group_id, reason):
                    for rollout in self.groups.get(group_id, []):
                        rollout.error = reason
                        rollout.step(Sealed(reason))
                case Forget(group_id):
                    self.groups.pop(group_id, None)
                    self.payloads.pop(group_id, None)

    def _body(self, send: Send) -> Buffer:
        group_id = getattr(send.message, "group_id", None)
        is_parcel = send.route != ROUTER
        return self.payloads[group_id] if is_parcel and group_id in self.payloads else send.body

    def _send(self, target: str, packet: Packet) -> None:
        self._network.send(self, target, packet)

    def _watch(self) -> None:
        parcels = self.duties.outbox.parcels.items()
        states = {group_id: parcel.state.value for group_id, parcel in parcels}
        self._network.transitions.watch(f"outbox@{self.name}", states)

    # what rollouts need

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
        payload = msgspec.msgpack.encode(GroupTurns(turns, error))
        self.payloads[rollout.group_id] = payload
        del self.groups[rollout.group_id]
        ended = Ended(rollout.group_id, not error, len(payload))
        self._do(self.duties.step(ended, self._kernel.now_s()))

    def carry_out(self, rollout: SimRollout, machine: GenerationMachine, action: LegAction) -> None:
        match action:
            case ChooseEngine(min_policy_version):
                row = self.view.choose(rollout.session_key, min_policy_version)
                if row:
                    chosen = EngineChosen(row.url, row.incarnation, row.policy_version)
                    self._kernel.after(0.0, lambda: self._tell(rollout, machine, chosen), self)
            case StartLeg():
                self._start_leg(rollout, machine, action)
            case AbortLeg(_, rid, url):
                self._engines[url].abort(rid)
            case ReportFault(url, incarnation, detail):
                fault = EngineFaulted(url, incarnation, detail)
                self._send("router", Packet(fault, self.duties.router))

    def _start_leg(self, rollout: SimRollout, machine: GenerationMachine, leg: StartLeg) -> None:
        def answer(chunk: EngineChunk) -> None:
            finish = Finish(chunk.finish) if chunk.finish else None  # type: ignore[arg-type]
            sampled = LegSampled(
                leg.leg,
                chunk.token_ids,
                [0.0] * len(chunk.token_ids),
                chunk.policy_version,
                finish,
            )
            self._tell(rollout, machine, sampled)

        def hang_up() -> None:
            self._tell(rollout, machine, LegFailed(leg.leg, "the connection broke"))

        request = (machine.context(), leg.max_new_tokens)
        self._engines[leg.url].generate(self, leg.rid, request, answer, hang_up)

    def _tell(
        self,
        rollout: SimRollout,
        machine: GenerationMachine,
        event: EngineChosen | LegSampled | LegFailed,
    ) -> None:
        if rollout.machine is machine:
            rollout.step(event)
        else:
            machine.step(event, self._kernel.now_s())


def is_lost(row: EngineRow | None, incarnation: str) -> bool:
    """Whether a leg that began at `incarnation` has nothing more to expect there."""
    if row is None or row.phase in (EnginePhase.FENCED, EnginePhase.GONE):
        return True
    return row.incarnation != incarnation
