"""An operator adds and removes engines of the faulty mesh at random: every group ends exactly once,
and at the end all engines serve again.
"""

import collections

import pytest

from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.machines import REAL
from rollmesh.testing.mesh_sim.mesh import CHAOS, SHORT, SimMesh
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.wire.fleet import AddEngine, DropEngine
from rollmesh.wire.frames import Packet

NUM_SEEDS = 60
INTERVAL_S = 0.4
"""Mean time between the operator's requests."""


class Operator(Node):
    """Adds and removes engines at random; after the faults it adds all."""

    def __init__(self, kernel: Kernel, network: Network, engines: list[str]) -> None:
        super().__init__("operator")
        self._kernel = kernel
        self._network = network
        self._engines = engines
        self.is_calm = False
        network.attach(self, lambda _source, _packet: None)

    def act(self) -> None:
        rng, url = self._kernel.rng, self._kernel.rng.choice(self._engines)
        asks: list[AddEngine | DropEngine] = [AddEngine(1, url)]
        asks += [DropEngine(1, url), DropEngine(1, url, True)]
        asks += [DropEngine(1, url, rng.random() < 0.5, force=True)]
        # A slow message of the faulty network may arrive later than the first request to add.
        ask = asks[0] if self.is_calm else rng.choice(asks)
        self._network.send(self, "router", Packet(ask))
        self._kernel.after(rng.expovariate(1 / INTERVAL_S), self.act)


class OperatedMesh(SimMesh):
    """A simulated mesh with an operator."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, CHAOS, SHORT[1], REAL)
        self.operator = Operator(self.kernel, self.network, list(self.engines))

    def start(self) -> None:
        super().start()
        self.operator.act()

    def calm(self) -> None:
        self.operator.is_calm = True
        super().calm()

    def _unsettled(self) -> list[str]:
        rows = self.router.fleet.table().engines
        found = [f"{row.url} is {row.phase}" for row in rows if row.phase != "ready"]
        found += [f"{url} is gone" for url in self.engines.keys() - {row.url for row in rows}]
        return [*super()._unsettled(), *found]


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 20))
def test_engines_that_come_and_go_lose_and_double_nothing(first: int) -> None:
    moves = collections.Counter[str]()
    for seed in range(first, first + 20):
        mesh = OperatedMesh(seed)
        mesh.start()
        mesh.chaos(SHORT[0])
        mesh.calm()
        moves += mesh.network.transitions.num
    for move in ("ready > draining", "draining > gone", "ready > gone"):
        assert moves[f"fleet: {move}"], move
