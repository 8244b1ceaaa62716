"""A peer that talks nonsense to everybody: of groups, workers and engines that nobody knows, with
numbers that nobody means.

Invariant: what it says is well-formed and about nothing real, since a peer that lies about what is
real could undo any promise; frames that do not decode are another test's. Driven by mesh.py.
"""

from rollmesh.core.ids import GroupId
from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import (
    AskDrain,
    AskGroup,
    CancelGroup,
    CancelRun,
    ClientHello,
    GroupAcked,
    GroupDelivered,
    GroupFailed,
    GroupFinished,
    GroupLost,
    GroupReturned,
    GroupStarted,
    HeldGroup,
    WorkerBeat,
    WorkerExited,
    WorkerHello,
    WorkerLeft,
)

NOBODYS = GroupId("nobody", 2**40)
NONSENSE = (
    AskDrain(-1, "nobody", ""),
    AskGroup(NOBODYS, "vandal", "guess", -7, "nowhere"),
    AskGroup(NOBODYS, "vandal", "no such env", 10**9, "nowhere", -(10**9), 10**9, 1e-300),
    AskGroup(NOBODYS, "", "", 1, "", 0, 0, float("nan")),
    CancelGroup(NOBODYS, ""),
    CancelRun(NOBODYS, ""),
    ClientHello("vandal", -(2**60), True),
    GroupAcked(NOBODYS, -1, False),
    GroupDelivered(NOBODYS, 0),
    GroupFailed(NOBODYS, ""),
    GroupFinished(NOBODYS, 1, "nobody", True),
    GroupLost(NOBODYS, 1, ""),
    GroupReturned(NOBODYS, 1, ""),
    GroupStarted(NOBODYS, 2**60),
    WorkerBeat("nobody", -1, True, -1, float("nan"), -1, -1, -1, -1),
    WorkerExited("nobody", -1, ""),
    WorkerExited("worker-0", 2**60, "another one"),
    WorkerHello("hollow", "no such env", -1, -1, "nowhere", (HeldGroup(NOBODYS, 1, False),)),
    WorkerLeft("nobody", ""),
)


class Vandal(Node):
    """See the module."""

    def __init__(self, kernel: Kernel, network: Network) -> None:
        super().__init__("vandal")
        self._kernel = kernel
        self._network = network
        network.attach(self, lambda _source, _packet: None)

    def act(self, targets: list[str]) -> None:
        """Say something to somebody."""
        rng = self._kernel.rng
        packet = Packet(rng.choice(NONSENSE), "", b"\x00junk")
        self._network.send(self, rng.choice(targets), packet)
