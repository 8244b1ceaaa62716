"""Builds a mesh, lets chaos loose on it, then calm, and sees whether everything came to its end.

    CHAOS (faults, crashes, freezes) -> CALM (a perfect network, everyone up) -> at rest, or failed

Driven by `simulate`, which tests and the kept seeds call.
"""

import collections
from collections.abc import Sequence

import msgspec

from rollmesh.testing.mesh_sim.checks import RunningChecks, unsettled
from rollmesh.testing.mesh_sim.client import SimClient
from rollmesh.testing.mesh_sim.engine import SimEngine
from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.machines import REAL, Machines
from rollmesh.testing.mesh_sim.network import Faults, Network
from rollmesh.testing.mesh_sim.publisher import SimPublisher
from rollmesh.testing.mesh_sim.router import SimRouter
from rollmesh.testing.mesh_sim.worker import SimWorker

CHAOS = Faults(
    drop=0.05,
    duplicate=0.05,
    slow=0.05,
    call_error=0.05,
    crash=0.15,
    freeze=0.1,
    cancel=0.01,
    not_kept=0.02,
    reader_left=0.03,
)
FATE_S = 0.25
"""How often fate looks at each node."""
CALM_S = 120.0
"""Virtual time in which everything must have come to its end, once calm."""
REST_S = 2.0
"""And stayed so."""


class Report(msgspec.Struct):
    """What one simulation saw."""

    seed: int
    num_events: int
    num_groups: int
    num_results: int
    num_trained: int
    num_steps: int
    faults: collections.Counter[str]
    transitions: collections.Counter[str]


class Mesh:
    """One client, one router, a publisher, workers and engines."""

    def __init__(self, seed: int, faults: Faults, num_groups: int, machines: Machines) -> None:
        self.kernel = Kernel(seed)
        self.network = Network(self.kernel, faults, machines)
        names = ["engine-0", "engine-1"]
        self.engines = {name: SimEngine(name, self.kernel, self.network) for name in names}
        self.router = SimRouter(self.kernel, self.network, self.engines)
        self.client = SimClient(self.kernel, self.network, num_groups)
        self.publisher = SimPublisher(self.kernel, self.network, self.engines, self.client)
        self.workers = [
            SimWorker(f"worker-{index}", self.kernel, self.network, self.engines)
            for index in range(3)
        ]
        self._checks = RunningChecks(self.client)

    def start(self) -> None:
        for node in (self.router, self.client, self.publisher, *self.workers):
            node.start()

    def chaos(self, num_events: int) -> None:
        """Run `num_events` events, with faults."""
        self._fate()
        self.kernel.run(num_events, float("inf"), self._checks.after_event)

    def calm(self) -> None:
        """No more faults; a freeze ends by itself. AssertionError if all is not at rest in time."""
        self.network.faults = Faults()
        for node in self._mortals():
            if not node.alive:
                node.restart()
        deadline_s = self.kernel.now_s() + CALM_S
        resting_since_s = self.kernel.now_s()
        while self.kernel.now_s() < resting_since_s + REST_S:
            # A slow message of the chaos may still stir things up for a moment.
            if found := self._unsettled():
                resting_since_s = self.kernel.now_s()
                assert resting_since_s < deadline_s, "; ".join(found)
            self._run_for(0.5)

    def _run_for(self, seconds: float) -> None:
        until_s = self.kernel.now_s() + seconds
        self.kernel.run(10**9, until_s, self._checks.after_event)
        if self.kernel.now_s() < until_s:
            self.kernel.clock.advance_to(until_s)

    def _unsettled(self) -> list[str]:
        return unsettled(self.client, self.router, self.workers, list(self.engines.values()))

    def _mortals(self) -> Sequence[Node]:
        return [self.router, self.publisher, *self.workers, *self.engines.values()]

    def _fate(self) -> None:
        faults, rng = self.network.faults, self.kernel.rng
        for node in [*self._mortals(), self.client]:
            if not node.alive:
                continue
            if rng.random() < faults.freeze * FATE_S:
                self.network.num["freeze"] += 1
                node.freeze(self.kernel.now_s() + rng.expovariate(0.7))
            elif rng.random() < faults.crash * FATE_S and node is not self.client:
                self.network.num["crash"] += 1
                self._crash(node)
        self.kernel.after(FATE_S, self._fate)

    def _crash(self, node: Node) -> None:
        node.crash()

        def rise() -> None:
            if not node.alive:
                node.restart()

        self.kernel.after(self.kernel.rng.uniform(0.1, 2.0), rise)


def simulate(
    seed: int,
    num_events: int = 1500,
    num_groups: int = 24,
    faults: Faults = CHAOS,
    machines: Machines = REAL,
) -> Report:
    """One run: at least `num_events` events with faults, then calm until all is at rest."""
    mesh = Mesh(seed, faults, num_groups, machines)
    mesh.start()
    mesh.chaos(num_events)
    mesh.calm()
    client = mesh.client
    return Report(
        seed=seed,
        num_events=mesh.kernel.num_events,
        num_groups=len(client.asked),
        num_results=sum(1 for ending in client.endings if not ending.reason),
        num_trained=len(client.trained),
        num_steps=client.num_steps,
        faults=mesh.network.num,
        transitions=mesh.network.transitions.num,
    )
