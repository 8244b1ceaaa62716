"""A network that drops, delays, duplicates and reorders, as its seed says.

Two kinds of traffic: messages (ZMQ: fire and forget, may be lost, doubled or overtaken) and calls
(HTTP to an engine: an answer or an error comes back, unless the caller died). Invariant: every
fault is counted by name, so that a test can ask whether each kind occurred. Driven by the nodes.
"""

import collections
from collections.abc import Callable

import msgspec

from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.machines import Machines
from rollmesh.testing.mesh_sim.transitions import Transitions
from rollmesh.wire.frames import Packet, decode, encode


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Chances of each fault; all zero is a perfect network."""

    drop: float = 0.0
    duplicate: float = 0.0
    slow: float = 0.0
    """A message that takes long, so that later ones overtake it."""
    call_error: float = 0.0
    """A call that fails although the engine lives."""
    crash: float = 0.0
    """Per second and node."""
    freeze: float = 0.0
    """Per second and node."""
    cancel: float = 0.0
    """Per tick: the client changes its mind about a group."""
    not_kept: float = 0.0
    """A result that the journal could not write."""
    reader_left: float = 0.0
    """Per tick and turn: the agent's connection breaks."""


class Network:
    """Carries packets between nodes by name."""

    def __init__(self, kernel: Kernel, faults: Faults, machines: Machines) -> None:
        self.kernel = kernel
        self.machines = machines
        """What the nodes on this network are built from."""
        self.faults = faults
        self.num = collections.Counter[str]()
        """How often each fault occurred."""
        self.transitions = Transitions()
        self._receivers: dict[str, tuple[Node, Callable[[str, Packet], None]]] = {}

    def attach(self, node: Node, receive: Callable[[str, Packet], None]) -> None:
        """Hand `node` what is sent to its name."""
        self._receivers[node.name] = (node, receive)

    def send(self, source: Node, target: str, packet: Packet) -> None:
        """One message; whether it arrives, once, twice or late is the dice's matter."""
        if self.strikes("drop"):
            return
        for _ in range(2 if self.strikes("duplicate") else 1):
            delay_s = self.kernel.rng.uniform(0.0005, 0.003)
            if self.strikes("slow"):
                delay_s += self.kernel.rng.expovariate(2.0)
            self._deliver(source.name, target, packet, delay_s)

    def answer(self, caller: Node, life: int, answer: Callable[[], None]) -> None:
        """Bring an answer back to `caller`, if it still lives the life in which it called."""
        self.kernel.after(self.kernel.rng.uniform(0.001, 0.01), answer, caller, life)

    def strikes(self, fault: str) -> bool:
        """Whether this fault happens now; counted if it does."""
        chance: float = getattr(self.faults, fault)
        if self.kernel.rng.random() >= chance:
            return False
        self.num[fault] += 1
        return True

    def _deliver(self, source: str, target: str, packet: Packet, delay_s: float) -> None:
        known = self._receivers.get(target)
        if known is None:
            self.num["no_such_peer"] += 1
            return
        node, receive = known
        copy = decode([bytes(frame) for frame in encode(packet)])

        def arrive() -> None:
            if node.alive:
                receive(source, copy)

        self.kernel.after(delay_s, arrive, node)
