"""The simulated router of one pipeline: its fleet table, of the real machine, and nothing else.

It keeps nothing over a crash.
"""

from collections.abc import Sequence

from rollmesh.engine.fleet import (
    Action,
    ContinueEngine,
    EngineProbed,
    Fleet,
    FleetSettings,
    ProbeEngine,
)
from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.testing.scheduler_sim.engine import POLICY_VERSION, SharedEngine
from rollmesh.wire.fleet import EnginePhase, JoinEngine
from rollmesh.wire.frames import Packet
from rollmesh.wire.machine import Received, Send, Ticked

TICK_S = 0.25
FLEET = FleetSettings(
    probe_s=1.0, join_probe_s=0.3, answer_s=1.0, fence_s=0.5, push_s=2.0, believes_engines=True
)


class PipelineRouter(Node):
    """One router process."""

    def __init__(
        self, pipeline_id: str, engines: Sequence[SharedEngine], kernel: Kernel, network: Network
    ) -> None:
        super().__init__(f"router-{pipeline_id}")
        self._kernel = kernel
        self._network = network
        self._engines = {engine.name: engine for engine in engines}
        self._fleet = Fleet(FLEET)
        network.attach(self, self._receive)

    def start(self) -> None:
        for url in self._engines:
            self._do(self._fleet.step(Received(b"", JoinEngine(0, url)), self._now_s()))
        self._tick()

    def restart(self) -> None:
        super().restart()
        self._fleet = Fleet(FLEET)
        self.start()

    def num_serving(self) -> int:
        """Engines that rollouts are sent to, and that answer."""
        ready = [row for row in self._fleet.table().engines if row.phase is EnginePhase.READY]
        return sum(self._engines[row.url].can_serve for row in ready) if self.alive else 0

    def _now_s(self) -> float:
        return self._kernel.now_s(self)

    def _tick(self) -> None:
        self._do(self._fleet.step(Ticked(), self._now_s()))
        self._kernel.after(TICK_S, self._tick, self)

    def _receive(self, source: str, packet: Packet) -> None:
        event = Received(source.encode(), packet.message)
        self._do(self._fleet.step(event, self._now_s()))

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send() if action.route:
                    packet = Packet(action.message, f"{self.name}.{self.num_crashes}")
                    self._network.send(self, action.route.decode(), packet)
                case ProbeEngine(url, serial) | ContinueEngine(url, serial):
                    self._probe(self._engines[url], serial)
                case _:
                    pass

    def _probe(self, engine: SharedEngine, serial: int) -> None:
        is_there = engine.alive and not engine.is_hung
        probed = EngineProbed(
            url=engine.name,
            serial=serial,
            ok=is_there,
            incarnation=engine.incarnation,
            policy_version=POLICY_VERSION,
            num_running=0,
            detail="" if is_there else "does not answer",
        )
        num_crashes = self.num_crashes
        self._network.answer(
            self, num_crashes, lambda: self._do(self._fleet.step(probed, self._now_s()))
        )
