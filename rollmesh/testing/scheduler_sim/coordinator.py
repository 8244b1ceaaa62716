"""The simulated coordinator process: the real machine, its calls to engines, and their timeouts.

- Each call is answered once, by its engine or by the timeout.
"""

from collections.abc import Sequence

import msgspec

from rollmesh.serve.coordinator.machine import Coordinator
from rollmesh.serve.coordinator.worker import (
    SCHEDULER,
    CoordinatorAction,
    CoordinatorEvent,
    CoordinatorSettings,
    EngineOp,
    EngineOpDone,
    EngineSnapshot,
    RunEngineOp,
)
from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.testing.scheduler_sim.engine import POLICY_VERSION, SharedEngine
from rollmesh.testing.scheduler_sim.trainer import token_of
from rollmesh.wire.frames import Packet
from rollmesh.wire.machine import ROUTER, Received, Ticked
from rollmesh.wire.scheduling import signed

TICK_S = 0.2
CLOCK_S = 1e6
HOUR_S = 3600.0
CALL_S = 3.0
"""Timeout of an engine's call."""


class SimCoordinator(Node):
    """One coordinator process."""

    def __init__(
        self,
        pipeline_id: str,
        engines: Sequence[SharedEngine],
        kernel: Kernel,
        network: Network,
        machine: type[Coordinator] = Coordinator,
    ) -> None:
        super().__init__(f"coordinator-{pipeline_id}")
        self._router = f"router-{pipeline_id}"
        self._token = token_of(pipeline_id)
        self._engines = {engine.name: engine for engine in engines}
        self._settings = CoordinatorSettings(
            pipeline_id=pipeline_id, urls=tuple(self._engines), drain_s=0.5, settle_s=4.0
        )
        self._kernel = kernel
        self._network = network
        self._machine_kind = machine
        self._clock_s = CLOCK_S
        """Its clock at time zero."""
        self.machine = self._new()
        network.attach(self, self._receive)

    def start(self) -> None:
        self._tick()

    def restart(self) -> None:
        super().restart()
        self.machine = self._new()
        self.start()

    def _new(self) -> Coordinator:
        if self._network.strikes("set_back"):
            self._clock_s -= HOUR_S
        started_s = self._clock_s + self._kernel.now_s(self)
        return self._machine_kind(msgspec.structs.replace(self._settings, started_s=started_s))

    def _tick(self) -> None:
        self._step(Ticked())
        self._kernel.after(TICK_S, self._tick, self)

    def _receive(self, source: str, packet: Packet) -> None:
        route = SCHEDULER if source == "scheduler" else ROUTER
        self._step(Received(route, packet.message, packet.body, packet.router))

    def _step(self, event: CoordinatorEvent) -> None:
        for action in self.machine.step(event, self._kernel.now_s(self)):
            self._do(action)

    def _do(self, action: CoordinatorAction) -> None:
        if isinstance(action, RunEngineOp):
            self._kernel.after(action.after_s, lambda: self._call(action), self)
            return
        target, message = self._router, action.message
        if action.route == SCHEDULER:
            target, message = "scheduler", signed(message, self._token)
        self._network.send(self, target, Packet(message, "", action.body))

    def _call(self, call: RunEngineOp) -> None:
        is_over = False

        def done(is_done: bool, seen: EngineSnapshot | None, detail: str = "") -> None:
            nonlocal is_over
            if is_over:
                return
            is_over = True
            self._step(
                EngineOpDone(
                    url=call.url,
                    serial=call.serial,
                    ok=is_done,
                    detail=detail or ("" if is_done else "cannot be reached"),
                    seen=seen if is_done and call.op is EngineOp.LOOK else None,
                    policy_version=POLICY_VERSION,
                )
            )

        self._engines[call.url].call(self, call.op, done)
        self._kernel.after(CALL_S, lambda: done(False, None, "does not answer"), self)
