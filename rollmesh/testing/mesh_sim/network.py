"""A network that drops, delays, duplicates and reorders, as its seed says.

Two kinds of traffic: messages (ZMQ: fire and forget, may be lost, doubled or overtaken) and calls
(HTTP to an engine: an answer or an error comes back, unless the caller died). Invariant: every
fault is counted by name, so that a test can ask whether each kind occurred. Driven by the nodes.
"""

import collections
from collections.abc import Callable

import msgspec

from rollmesh.testing.mesh_sim.kernel import Kernel, Node
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


class Network:
    """Carries packets between nodes by name."""

    def __init__(self, kernel: Kernel, faults: Faults) -> None:
        self.kernel = kernel
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
        faults, rng = self.faults, self.kernel.rng
        if rng.random() < faults.drop:
            self.num["drop"] += 1
            return
        copies = 1
        if rng.random() < faults.duplicate:
            self.num["duplicate"] += 1
            copies = 2
        for _ in range(copies):
            delay_s = rng.uniform(0.0005, 0.003)
            if rng.random() < faults.slow:
                self.num["slow"] += 1
                delay_s += rng.expovariate(2.0)
            self._deliver(source.name, target, packet, delay_s)

    def answer(self, caller: Node, life: int, answer: Callable[[], None]) -> None:
        """Bring an answer back to `caller`, if it still lives the life in which it called."""
        self.kernel.after(self.kernel.rng.uniform(0.001, 0.01), answer, caller, life)

    def call_fails(self) -> bool:
        """Whether this call meets an error on its way."""
        if self.kernel.rng.random() < self.faults.call_error:
            self.num["call_error"] += 1
            return True
        return False

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
