"""Clients that repeat a keyed request until it is answered: admission, node agents, killers.

- A request is repeated each second until its answer has arrived. An earlier one of the same client
  is answered before a later one is sent.
"""

import collections
from collections.abc import Callable

import msgspec

from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.wire.frames import Packet
from rollmesh.wire.scheduling import (
    AdmissionMessage,
    DrainNode,
    JoinNode,
    NodeBeat,
    SchedulerAnswered,
    UndrainNode,
    UnregisterPipeline,
    signed,
)

SAY_S = 1.0

Ask = AdmissionMessage | JoinNode | DrainNode | UndrainNode


class RpcClient(Node):
    """A node that repeats its requests until they are answered."""

    def __init__(self, name: str, kernel: Kernel, network: Network, token: str = "") -> None:
        super().__init__(name)
        self._token = token
        self._kernel = kernel
        self._network = network
        self._waiting: collections.deque[tuple[Ask, Callable[[], None]]] = collections.deque()
        self._num_keys = 0
        network.attach(self, self._receive)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def start(self) -> None:
        self._say()

    def restart(self) -> None:
        """Its verb was killed in the middle and is repeated by hand, with another key."""
        super().restart()
        for _ in range(len(self._waiting)):
            ask, then = self._waiting.popleft()
            self._waiting.append((msgspec.structs.replace(ask, key=self.key()), then))
        self.start()

    def key(self) -> str:
        self._num_keys += 1
        return f"{self.name}.{self.num_crashes}.{self._num_keys}"

    def ask(self, ask: Ask, then: Callable[[], None] = lambda: None) -> None:
        self._waiting.append((ask, then))

    def _say(self) -> None:
        if self._waiting:
            self._network.send(self, "scheduler", Packet(signed(self._waiting[0][0], self._token)))
        self._kernel.after(SAY_S, self._say, self)

    def _receive(self, _source: str, packet: Packet) -> None:
        answer = packet.message
        if not isinstance(answer, SchedulerAnswered) or not self._waiting:
            return
        ask, then = self._waiting[0]
        if answer.key == ask.key:
            has_left = isinstance(ask, UnregisterPipeline) and answer.error.startswith(
                "no pipeline"
            )
            assert answer.ok or has_left, f"{ask}: {answer.error}"
            self._waiting.popleft()
            then()


class SimAgent(RpcClient):
    """The agent of one node: it joins, and then sends heartbeats."""

    def __init__(self, name: str, num_gpus: int, kernel: Kernel, network: Network) -> None:
        super().__init__(f"agent-{name}", kernel, network)
        self.node_name = name
        self._num_gpus = num_gpus
        self.joined: Callable[[], None] = lambda: None
        """Called once, the first time."""
        self.has_joined = False

    def start(self) -> None:
        super().start()
        others = [each for each in self._waiting if not isinstance(each[0], JoinNode)]
        self._waiting = collections.deque(others)
        self.ask(JoinNode(self.key(), self.node_name, self._num_gpus), self._joined)
        self._beat()

    def _joined(self) -> None:
        self.has_joined = True
        then, self.joined = self.joined, lambda: None
        then()

    def _beat(self) -> None:
        self._network.send(self, "scheduler", Packet(NodeBeat(self.node_name)))
        self._kernel.after(SAY_S, self._beat, self)
