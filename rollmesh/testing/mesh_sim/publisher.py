"""The simulated publisher: the Publisher machine and its calls to engines.

Each incarnation of the trainer has one with a name of its own. An earlier one may outlive its
trainer for a while and send outdated messages.
"""

from collections.abc import Callable

import msgspec

from rollmesh.core.types import UNVERSIONED
from rollmesh.testing.mesh_sim.engine import SimEngine
from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.trainer.reports.exactness import FenceRequested, FenceResult, Fencing
from rollmesh.trainer.weights.publisher import (
    Accepted,
    Action,
    Doubted,
    Event,
    PhaseResult,
    PublishEnded,
    Publisher,
    PublisherSettings,
    PublishRequested,
    RunPhase,
    Superseded,
    UpdatePhase,
)
from rollmesh.trainer.weights.verdicts import Probe
from rollmesh.wire.fleet import BeginUpdate
from rollmesh.wire.frames import Packet
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked

TICK_S = 0.1
SETTINGS = PublisherSettings(
    lease_s=1.5, drain_leases=0.8, repeat_s=0.2, read_s=0.3, retry_s=0.3, poll_s=0.03
)


class SimPublisher(Node):
    """The publisher of one incarnation of the trainer."""

    def __init__(
        self,
        name: str,
        kernel: Kernel,
        network: Network,
        engines: dict[str, SimEngine],
        on_end: Callable[[int], None],
        run: str,
    ) -> None:
        """Call `on_end` with each policy version that engines begin to sample with; publishers of
        one `run` run one after the other.
        """
        super().__init__(name)
        self._kernel = kernel
        self._network = network
        self._engines = engines
        self._on_end = on_end
        self._publisher = Publisher(msgspec.structs.replace(SETTINGS, name=run))
        self._fencing = Fencing()
        self.is_publishing = False
        self._accepted = UNVERSIONED
        """The newest version that an engine has accepted."""
        self._refused: int | None = None
        """The version of the last publication, if no engine accepted it."""
        self._drains: dict[str, tuple[float, bool]] = {}
        """When each engine's drain began, and whether its last look saw nothing running."""
        network.attach(self, self._receive)

    def start(self) -> None:
        self._tick()

    def crash(self) -> None:
        super().crash()
        self._network.transitions.forget(self._watched)

    def publish(self, policy_version: int) -> None:
        """Publish the newest weights under this name."""
        self.is_publishing = True
        self._give(PublishRequested(policy_version, f"v{policy_version}", probe_of(policy_version)))

    @property
    def _watched(self) -> str:
        return f"publisher@{self.name}"

    def _tick(self) -> None:
        if self._network.strikes("lie", TICK_S):
            engine = self._kernel.rng.choice(list(self._engines.values()))
            self._fence(FenceRequested(engine.name, engine.policy_version, "lies"))
        self._give(Ticked())
        self._fence(Ticked())
        self._kernel.after(TICK_S, self._tick, self)

    def _receive(self, source: str, packet: Packet) -> None:
        assert source == "router"
        received = Received(ROUTER, packet.message, packet.body, packet.router)
        self._give(received)
        self._fence(received)

    def _fence(self, event: FenceRequested | Received | Ticked) -> None:
        for action in self._fencing.step(event, self._kernel.now_s(self)):
            match action:
                case Send():
                    self._network.send(self, "router", Packet(action.message))
                case FenceResult(_, error):
                    self._network.num["not_fenced" if error else "fenced"] += 1

    def _give(self, event: Event) -> None:
        actions: list[Action] = self._publisher.step(event, self._kernel.now_s(self))
        self._network.transitions.watch(self._watched, self._publisher.phases())
        for action in actions:
            match action:
                case Send(message=message):
                    if isinstance(message, BeginUpdate):
                        self._note_lease(message.url)
                    self._network.send(self, "router", Packet(message))
                case RunPhase():
                    self._call(action)
                case Superseded(policy_version, by):
                    assert policy_version < by, f"{self.name} gives way to older weights"
                    self._network.num["superseded"] += 1
                case Doubted(url, why):
                    raise AssertionError(f"{url} is doubted without cause: {why}")
                case Accepted() | PublishEnded():
                    self._note(action)

    def _note(self, action: Accepted | PublishEnded) -> None:
        """Count a refused publication once it is accepted, as trainer/weights does."""
        match action:
            case Accepted(policy_version):
                self._accepted = policy_version
                if policy_version == self._refused:
                    self._on_end(policy_version)
            case PublishEnded(report):
                self.is_publishing = False
                is_refused = report.is_refused and report.policy_version != self._accepted
                self._refused = report.policy_version if is_refused else None
                self._network.num["refused"] += is_refused
                if not is_refused:
                    self._on_end(report.policy_version)

    def _note_lease(self, url: str) -> None:
        """Begin a drain; a renewed one is not a new one."""
        if self._publisher.phases()[url] is UpdatePhase.BEGINNING:
            self._drains.pop(url, None)
        else:
            self._network.num["leases_renewed"] += 1

    def _call(self, call: RunPhase) -> None:
        engine, num_crashes = self._engines[call.url], self.num_crashes
        if call.phase is UpdatePhase.PAUSING:
            self._check_drain(engine)
        elif call.phase is UpdatePhase.DRAINING:
            self._drains.setdefault(call.url, (self._kernel.now_s(self), False))
        else:
            self._drains.pop(call.url, None)

        def arrive() -> None:
            ok = engine.alive and not self._network.strikes("call_error")
            if ok:
                before = engine.policy_version
                carry_out(engine, call)
                self._network.num["older_weights"] += engine.policy_version < before
            logprobs = probe_of(engine.policy_version).logprobs
            why, num_requests = "" if ok else "no answer", engine.num_requests
            called = PhaseResult(call.url, call.serial, ok, why, logprobs, num_requests)
            if ok and call.phase is UpdatePhase.DRAINING and call.url in self._drains:
                self._drains[call.url] = (self._drains[call.url][0], not num_requests)
            self._network.answer(self, num_crashes, lambda: self._give(called))

        self._kernel.after(call.after_s + self._kernel.rng.uniform(0.001, 0.05), arrive)

    def _check_drain(self, engine: SimEngine) -> None:
        """Cut running requests only when none ran, or when they had their time."""
        begun_s, was_idle = self._drains[engine.name]
        spent_s = self._kernel.now_s(self) - begun_s
        assert was_idle or spent_s >= SETTINGS.lease_s * SETTINGS.drain_leases


def carry_out(engine: SimEngine, call: RunPhase) -> None:
    """Carry out a request at the engine."""
    match call.phase:
        case UpdatePhase.PAUSING:
            engine.pause()
        case UpdatePhase.LOADING:
            engine.policy_version = call.target.policy_version
        case UpdatePhase.RESUMING | UpdatePhase.UNDOING:
            engine.resume()


def probe_of(policy_version: int) -> Probe:
    """Return scores that differ between versions."""
    return Probe((1, 2), (-float(policy_version),))
