"""What stands around the simulated workers: a launch that restarts them, and a cli that drains.

It tells the router how a local worker's process ended, once, and that word may be lost; of a remote
one nobody tells anything. It is never frozen and never dies. Driven by mesh.py and by the workers.
"""

import collections

from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.testing.mesh_sim.worker import SimWorker
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import AskDrain, DrainAnswered, WorkerExited

SAY_DRAIN_S = 0.5
SAY_DRAINS = 3
"""How often an AskDrain is said, at most."""


class SimLaunch(Node):
    """See the module."""

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
        """A worker's process has ended; there will be another."""
        self.num_ends[worker.name] += 1
        if worker.is_local:
            exited = WorkerExited(worker.name, pid, cause)
            self._network.send(self, "router", Packet(exited))
        self.raise_in(self._kernel.rng.uniform(0.1, 2.0), worker)

    def raise_in(self, delay_s: float, worker: SimWorker) -> None:
        """Start its process then, unless it runs."""

        def rise() -> None:
            if not worker.alive:
                worker.restart()

        self._kernel.after(delay_s, rise)

    def drain(self, worker: SimWorker) -> None:
        """Somebody typed `rollmesh drain`."""
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
