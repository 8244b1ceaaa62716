"""The simulated publisher: the Publisher machine, its calls to engines, and a crash now and then.

A new life publishes the newest weights again under a fresh version, as a restarted trainer would.
Driven by the kernel: ticks, the router's answers, the engines' answers.
"""

from rollmesh.testing.mesh_sim.client import SimClient
from rollmesh.testing.mesh_sim.engine import SimEngine
from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.trainer.fencing import FenceAsked, FenceTold, Fencing
from rollmesh.trainer.publisher import (
    Action,
    CallEngine,
    EngineCalled,
    Event,
    Probe,
    PublishAsked,
    PublishEnded,
    Publisher,
    PublisherSettings,
    UpdatePhase,
)
from rollmesh.wire.frames import Packet
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked

TICK_S = 0.1
SETTINGS = PublisherSettings(lease_s=1.5, repeat_s=0.2, read_s=0.3, retry_s=0.3)


class SimPublisher(Node):
    """One publisher, in the trainer's process but mortal on its own."""

    def __init__(
        self,
        kernel: Kernel,
        network: Network,
        engines: dict[str, SimEngine],
        client: SimClient,
    ) -> None:
        super().__init__("publisher")
        self._kernel = kernel
        self._network = network
        self._engines = engines
        self._client = client
        self._publisher = Publisher(SETTINGS)
        self._fencing = Fencing()
        self._step = 0
        self._is_publishing = False
        self.num_published = 0
        network.attach(self, self._receive)

    def start(self) -> None:
        self._tick()

    def crash(self) -> None:
        super().crash()
        self._network.transitions.forget("publisher")

    def restart(self) -> None:
        super().restart()
        self._publisher, self._fencing = Publisher(SETTINGS), Fencing()
        self._is_publishing = False
        if self._step and self._step not in self._client.to_publish:
            self._client.to_publish.insert(0, self._step)
        self.start()

    def _tick(self) -> None:
        if self._client.to_publish and not self._is_publishing:
            self._publish(self._client.to_publish.pop(0))
        if self._network.strikes("lie", TICK_S):
            engine = self._kernel.rng.choice(list(self._engines.values()))
            self._fence(FenceAsked(engine.name, engine.policy_version, "lies"))
        self._give(Ticked())
        self._fence(Ticked())
        self._kernel.after(TICK_S, self._tick, self)

    def _publish(self, step: int) -> None:
        steps = self._client.step_of_version
        policy_version = max(steps) + 1
        steps[policy_version] = step
        self._step, self._is_publishing = step, True
        self._give(PublishAsked(policy_version, f"v{policy_version}", probe_of(policy_version)))

    def _receive(self, source: str, packet: Packet) -> None:
        assert source == "router"
        received = Received(ROUTER, packet.message, packet.body, packet.router)
        self._give(received)
        self._fence(received)

    def _fence(self, event: FenceAsked | Received | Ticked) -> None:
        for action in self._fencing.step(event, self._kernel.now_s(self)):
            match action:
                case Send():
                    self._network.send(self, "router", Packet(action.message))
                case FenceTold(_, error):
                    self._network.num["not_fenced" if error else "fenced"] += 1

    def _give(self, event: Event) -> None:
        actions: list[Action] = self._publisher.step(event, self._kernel.now_s(self))
        self._network.transitions.watch("publisher", self._publisher.phases())
        for action in actions:
            match action:
                case Send():
                    self._network.send(self, "router", Packet(action.message))
                case CallEngine():
                    self._call(action)
                case PublishEnded():
                    self.num_published += 1
                    self._is_publishing = False
                    self._client.published(self._step)

    def _call(self, call: CallEngine) -> None:
        engine, life = self._engines[call.url], self.life

        def arrive() -> None:
            ok = engine.alive and not self._network.strikes("call_error")
            if ok:
                carry_out(engine, call)
            logprobs = probe_of(engine.policy_version).logprobs
            called = EngineCalled(call.url, call.serial, ok, "" if ok else "no answer", logprobs)
            self._network.answer(self, life, lambda: self._give(called))

        self._kernel.after(self._kernel.rng.uniform(0.001, 0.05), arrive)


def carry_out(engine: SimEngine, call: CallEngine) -> None:
    """What the engine does when asked."""
    match call.phase:
        case UpdatePhase.PAUSING:
            engine.pause()
        case UpdatePhase.LOADING:
            engine.policy_version = call.target.policy_version
        case UpdatePhase.RESUMING | UpdatePhase.UNDOING:
            engine.resume()


def probe_of(policy_version: int) -> Probe:
    """Scores that tell every version from the next."""
    return Probe((1, 2), (-float(policy_version),))
