"""A network that drops, delays, duplicates and reorders, as its seed decides.

- Messages (ZMQ) are sent without an answer and may be lost, doubled or overtaken.
- Calls (HTTP to an engine) get an answer or an error unless the caller died.
- Every fault is counted by name, so that a test can assert that each kind occurred.
"""

import collections
from collections.abc import Callable
from functools import partial

import msgspec

from rollmesh.core.errors import WireError
from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.machines import StepMachines, TransitionCounts
from rollmesh.wire.frames import Packet, decode, encode

MALFORMED_DIGIT = 4
"""Last digit of the seeds with malformed results; the others stay as they were."""
ON_WIRE = 10
"""In one of this many seeds messages travel as bytes, which is slower."""


class FaultChances(msgspec.Struct, frozen=True, kw_only=True):
    """Probability of each fault; all zero is a perfect network."""

    drop: float = 0.0
    duplicate: float = 0.0
    slow: float = 0.0
    """A message that takes long, so that later ones overtake it."""
    call_error: float = 0.0
    """A call that fails although the engine runs."""
    crash: float = 0.0
    """Per second and node."""
    freeze: float = 0.0
    """Per second and node."""
    cancel: float = 0.0
    """Per tick: the client cancels a group."""
    not_kept: float = 0.0
    """A result that the journal could not write."""
    reader_left: float = 0.0
    """Per tick and turn: the agent's connection breaks."""
    poison: float = 0.0
    """Per visitor's ask: it kills whatever worker runs it."""
    deadline: float = 0.0
    """Per visitor's ask: it has one."""
    stall: float = 0.0
    """Per second and worker: its loop is held while it sends heartbeats."""
    recycle: float = 0.0
    """Per second and worker: it finishes what it has and restarts."""
    full: float = 0.0
    """Per second and worker: it is over its budget for a while."""
    drain: float = 0.0
    """Per second and worker: the router is asked to drain it."""
    stop: float = 0.0
    """Per second and worker: SIGTERM; it cuts short what does not end in a moment."""
    jump: float = 0.0
    """Per second and node: its machine was suspended, and its clock is a minute further at once."""
    moved: float = 0.0
    """Per start of a remote worker: it is on another host than before, under its old name."""
    env_failed: float = 0.0
    """Per start of a worker: its environment does not load."""
    double_client: float = 0.0
    """Per seed: two clients have one name, by mistake."""
    lie: float = 0.0
    """Per second of the publisher: what an engine sampled is found not to be of its weights."""
    nonsense: float = 0.0
    """Per second: a message about objects that do not exist, to any node."""
    forged: float = 0.0
    """Per second: a stranger sends a client a result of its open, ended or unknown group."""
    malformed: float = 0.0
    """Per group that a worker has run, in seeds with MALFORMED_DIGIT: its result cannot be read."""
    straggler: float = 0.0
    """Per rollout: its tokens come slowly."""
    agent_failed: float = 0.0
    """Per rollout: its agent ends in an error, and nothing of it trains."""
    killed_before_write: float = 0.0
    """Per entry of the trainer's journal: it is killed instead."""
    killed_after_write: float = 0.0
    """Per entry: it is killed before it acts on it."""
    disk_full: float = 0.0
    """Per entry: there is no room for it."""
    save_failed: float = 0.0
    """Per checkpoint: it cannot be written."""
    save_broke: float = 0.0
    """Per incarnation of the trainer: the newest checkpoint is no longer whole."""
    zombie: float = 0.0
    """Per death of the trainer: its publisher is frozen for a while, and then continues."""


class Network:
    """Carries packets between nodes by name."""

    def __init__(self, kernel: Kernel, faults: FaultChances, machines: StepMachines) -> None:
        self.kernel = kernel
        self.machines = machines
        """The machines of the nodes on this network."""
        self.faults = faults
        self.num = collections.Counter[str]()
        """How often each fault occurred."""
        self.transitions = TransitionCounts()
        self._receivers: dict[str, tuple[Node, Callable[[str, Packet], None]]] = {}
        self._is_on_wire = kernel.seed % ON_WIRE == 0

    def attach(self, node: Node, receive: Callable[[str, Packet], None]) -> None:
        """Deliver to `node` what is sent to its name."""
        self._receivers[node.name] = (node, receive)

    def send(self, source: Node, target: str, packet: Packet) -> None:
        """Send one message; the random numbers decide whether it arrives, once, twice or late."""
        known = self._receivers.get(target)
        if known is None:
            self.num["no_such_peer"] += 1
            return
        fault = self._fault_of_message()
        if fault == "drop":
            return
        if self._is_on_wire:
            try:
                packet = decode([bytes(frame) for frame in encode(packet)])
            except WireError:
                self.num["malformed_frame"] += 1
                return
        rng, (node, receive) = self.kernel.rng, known
        for _ in range(2 if fault == "duplicate" else 1):
            delay_s = 0.0005 + 0.0025 * rng.random()
            if fault == "slow":
                delay_s += rng.expovariate(2.0)
            arrive = partial(_arrive, node, receive, source.name, packet)
            self.kernel.after(delay_s, arrive, node)

    def inject(self, source: str, target: str, packet: Packet) -> None:
        """Deliver a message of a peer that is no node, at once, if its target runs."""
        node, receive = self._receivers[target]
        if node.alive and node.frozen_until_s <= self.kernel.now_s():
            receive(source, packet)

    def spoils_a_result(self) -> bool:
        """Return whether the result that a worker has just made is malformed."""
        if self.kernel.seed % 10 != MALFORMED_DIGIT:
            return False
        return self.strikes("malformed")

    def answer(self, caller: Node, num_crashes: int, answer: Callable[[], None]) -> None:
        """Return an answer to `caller` if it is still in the incarnation that called."""
        self.kernel.after(self.kernel.rng.uniform(0.001, 0.01), answer, caller, num_crashes)

    def strikes(self, fault: str, seconds: float = 1.0) -> bool:
        """Return whether this fault happens now, or within `seconds`; count it if it does."""
        chance: float = getattr(self.faults, fault)
        if not chance or self.kernel.rng.random() >= chance * seconds:
            return False
        self.num[fault] += 1
        return True

    def _fault_of_message(self) -> str:
        """Draw `drop`, `duplicate`, `slow` or none of them."""
        left, faults = self.kernel.rng.random(), self.faults
        if left >= faults.drop + faults.duplicate + faults.slow:
            return ""
        for fault, chance in (
            ("drop", faults.drop),
            ("duplicate", faults.duplicate),
            ("slow", faults.slow),
        ):
            left -= chance
            if left < 0:
                self.num[fault] += 1
                return fault
        return ""


def _arrive(
    node: Node, receive: Callable[[str, Packet], None], source: str, packet: Packet
) -> None:
    if node.alive:
        receive(source, packet)
