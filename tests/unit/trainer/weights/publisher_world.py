"""The publisher machine with the fleet machine and model engines, on one clock; no sockets.

Messages wait in queues until `deliver`, which may drop some.
"""

import random
from typing import TypeVar

from rollmesh.core.types import UNVERSIONED
from rollmesh.engine.fleet import (
    ContinueEngine,
    EngineProbed,
    Fleet,
    FleetSettings,
    ProbeEngine,
)
from rollmesh.trainer.weights.publisher import (
    Accepted,
    Doubted,
    PhaseResult,
    PublishEnded,
    Publisher,
    PublisherSettings,
    PublishReport,
    PublishRequested,
    RunPhase,
    Superseded,
    UpdatePhase,
)
from rollmesh.trainer.weights.verdicts import Probe
from rollmesh.wire.fleet import EnginePhase, EngineRow, JoinEngine
from rollmesh.wire.machine import Received, Send, Ticked
from rollmesh.wire.messages import AnyMessage

A, B = "http://a", "http://b"


def probe_of(policy_version: int) -> Probe:
    return Probe((1, 2, 3), (-1.0 - policy_version, -2.0 - policy_version))


def target(policy_version: int) -> PublishRequested:
    return PublishRequested(policy_version, f"v{policy_version}", probe_of(policy_version))


class ModelEngine:
    """An engine as the publisher and the fleet see it."""

    def __init__(self) -> None:
        self.label = self.weights = 0
        self.is_up, self.is_paused = True, False
        self.num_starts = 0
        self.adapter = ""
        self.broken: UpdatePhase | None = None
        """The phase whose call fails."""
        self.out_of_reach: UpdatePhase | None = None
        """The phase whose call the publisher cannot send."""
        self.is_starting = False
        """Its socket listens but no process accepts yet: calls wait."""
        self.is_idle = False
        """Updates change the label only."""
        self.named = UNVERSIONED
        """The version that it reports."""
        self.num_requests = 0
        """Requests that cannot be resumed."""

    def call(self, call: RunPhase) -> PhaseResult:
        if not self.is_up or call.phase is self.broken:
            return PhaseResult(call.url, call.serial, False, "broken")
        if call.phase is self.out_of_reach:
            why = "no descriptor"
            return PhaseResult(call.url, call.serial, False, why, is_local=True)
        match call.phase:
            case UpdatePhase.DRAINING:
                num = self.num_requests
                return PhaseResult(call.url, call.serial, True, num_requests=num)
            case UpdatePhase.PAUSING:
                self.is_paused = True
            case UpdatePhase.LOADING:
                assert self.is_paused
                self.adapter = call.target.adapter
                self.label = call.target.policy_version
                self.weights = self.weights if self.is_idle else self.label
            case UpdatePhase.RESUMING | UpdatePhase.UNDOING:
                self.is_paused = False
            case UpdatePhase.SCORING:
                scores = probe_of(self.weights).logprobs
                return PhaseResult(
                    call.url, call.serial, True, "", scores, policy_version=self.named
                )
        return PhaseResult(call.url, call.serial, True)

    def restart(self) -> None:
        self.adapter = ""
        self.label = self.weights = 0
        self.is_paused = False
        self.num_starts += 1

    def probed(self, ask: ProbeEngine | ContinueEngine) -> EngineProbed:
        if self.is_up and isinstance(ask, ContinueEngine):
            self.is_paused = False
        return EngineProbed(
            url=ask.url,
            serial=ask.serial,
            ok=self.is_up,
            incarnation=f"i{self.num_starts}",
            policy_version=self.label,
            adapter=self.adapter,
        )


def new_fleet() -> Fleet:
    """The table of a new router, which engines A and B may join."""
    return Fleet(FleetSettings(allow_hosts=("a", "b")))


class Mesh:
    """Publisher, fleet and engines on one clock; messages wait in queues until delivered."""

    def __init__(self, *urls: str, lease_s: float = 10.0) -> None:
        self.settings = PublisherSettings(lease_s=lease_s, name="run")
        self.publisher = Publisher(self.settings)
        self.num_starts = 0
        self.fleet = new_fleet()
        self.is_deaf = False
        """The router receives nothing."""
        self.engines = {url: ModelEngine() for url in urls}
        self.now_s = 0.0
        self.reports: list[PublishReport] = []
        self.superseded: list[Superseded] = []
        self.doubted: list[Doubted] = []
        self.accepted: list[int] = []
        self.calls: list[RunPhase] = []
        self.to_fleet: list[AnyMessage] = [JoinEngine(0, url) for url in urls]
        self.to_publisher: list[AnyMessage] = []
        self.probes: list[ProbeEngine | ContinueEngine] = []
        self.was_called: list[tuple[str, UpdatePhase]] = []

    def publish(self, event: PublishRequested | PhaseResult | Received | Ticked) -> None:
        for action in self.publisher.step(event, self.now_s):
            match action:
                case Send(_, message):
                    self.to_fleet.append(message)
                case RunPhase():
                    self.calls.append(action)
                    self.was_called.append((action.url, action.phase))
                case PublishEnded(report):
                    self.reports.append(report)
                case Superseded():
                    self.superseded.append(action)
                case Doubted():
                    self.doubted.append(action)
                case Accepted(policy_version):
                    self.accepted.append(policy_version)

    def tend_fleet(self, event: EngineProbed | Received | Ticked) -> None:
        for action in self.fleet.step(event, self.now_s):
            match action:
                case Send(_, message):
                    self.to_publisher.append(message)
                case ProbeEngine() | ContinueEngine():
                    self.probes.append(action)

    def deliver(self, rng: random.Random | None = None) -> None:
        """Deliver all waiting messages; with `rng`, drop some."""
        for message in [] if self.is_deaf else take(self.to_fleet, rng):
            self.tend_fleet(Received(b"publisher-%d" % self.num_starts, message))
        for probe in take(self.probes, None):
            self.tend_fleet(self.engines[probe.url].probed(probe))
        for message in take(self.to_publisher, rng):
            self.publish(Received(b"", message))
        for call in take(self.calls, None):
            if self.engines[call.url].is_starting:
                self.calls.append(call)
            else:
                self.publish(self.engines[call.url].call(call))

    def run(self, seconds: float, rng: random.Random | None = None) -> None:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.05
            self.publish(Ticked())
            self.tend_fleet(Ticked())
            self.deliver(rng)

    def kill(self) -> None:
        """Kill the publisher with everything in progress and start another incarnation."""
        self.num_starts += 1
        self.publisher = Publisher(self.settings)
        for queue in (self.to_fleet, self.to_publisher, self.calls):
            queue.clear()

    def row(self, url: str = A) -> EngineRow:
        return next(row for row in self.fleet.table().engines if row.url == url)

    def phase(self, url: str = A) -> EnginePhase:
        return self.row(url).phase

    def policy_version(self, url: str = A) -> int:
        return self.row(url).policy_version


def draining(asked: PublishRequested) -> Mesh:
    """An engine with one turn that cannot be resumed, for which a publication has been
    requested."""
    mesh = Mesh(A, lease_s=10.0)
    mesh.run(1.0)
    mesh.engines[A].num_requests = 1
    mesh.publish(asked)
    return mesh


T = TypeVar("T")


def take(queue: list[T], rng: random.Random | None) -> list[T]:
    taken = [each for each in queue if rng is None or rng.random() > 0.2]
    queue.clear()
    return taken
