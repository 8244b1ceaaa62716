"""Peers of the simulated mesh that send forged results, or messages about nothing real.

- ResultForger knows the ids of all groups and the addresses of sinks, but no ticket. It sends
  results for open groups, ended groups and ids that were never asked for.
- FuzzPeer sends well-formed messages about groups, workers and engines that do not exist, with
  random numbers.
- Both have random numbers of their own, so everything else in a seed is as it would be without
  them.
"""

import random
from collections.abc import Sequence

from rollmesh.core.ids import TICKET_BYTES, GroupId
from rollmesh.testing.mesh_sim.kernel import Kernel, Node
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.testing.mesh_sim.requesting_client import FORGED, RequestingClient
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

NEVER_ASKED = 2**62


class ResultForger:
    """A peer that sends forged results and results of groups that were never asked for."""

    def __init__(self, kernel: Kernel, network: Network) -> None:
        self._rng = random.Random(f"forger {kernel.seed}")
        self._network = network

    def act(self, askers: Sequence[RequestingClient], seconds: float) -> None:
        """Send one forged result, or none, to the sink of one of `askers`."""
        rng = self._rng
        if rng.random() >= self._network.faults.forged * seconds:
            return
        asker = rng.choice(askers)
        open_ids = sorted(asker.asks.open)
        group_ids = [*open_ids, *open_ids, *sorted(asker.endings.reasons)]
        group_ids += [GroupId(each.run_id, NEVER_ASKED) for each in open_ids[:1]]
        if not group_ids:
            return
        self._network.num["forged"] += 1
        ticket = rng.choice((b"", rng.randbytes(TICKET_BYTES)))
        forged = GroupFinished(rng.choice(group_ids), rng.randint(1, 3), "worker-0", True, ticket)
        self._network.inject("forger", asker.name, Packet(forged, "", FORGED))


UNKNOWN_GROUP = GroupId("unknown", 2**40)
NONSENSE = (
    AskDrain(-1, "unknown", ""),
    AskGroup(UNKNOWN_GROUP, "vandal", "guess", -7, "nowhere"),
    AskGroup(UNKNOWN_GROUP, "vandal", "no such env", 10**9, "nowhere", -(10**9), 10**9, 1e-300),
    AskGroup(UNKNOWN_GROUP, "", "", 1, "", 0, 0, float("nan")),
    CancelGroup(UNKNOWN_GROUP, ""),
    CancelRun(UNKNOWN_GROUP, ""),
    ClientHello("vandal", -(2**60), True),
    GroupAcked(UNKNOWN_GROUP, -1, False),
    GroupDelivered(UNKNOWN_GROUP, 0),
    GroupFailed(UNKNOWN_GROUP, ""),
    GroupFinished(UNKNOWN_GROUP, 1, "unknown", True),
    GroupLost(UNKNOWN_GROUP, 1, ""),
    GroupReturned(UNKNOWN_GROUP, 1, ""),
    GroupStarted(UNKNOWN_GROUP, 2**60),
    WorkerBeat("unknown", -1, True, -1, float("nan"), -1, -1, -1, -1),
    WorkerExited("unknown", -1, ""),
    WorkerExited("worker-0", 2**60, "another one"),
    WorkerHello("hollow", "no such env", -1, -1, "nowhere", (HeldGroup(UNKNOWN_GROUP, 1, False),)),
    WorkerLeft("unknown", ""),
)


class FuzzPeer(Node):
    """A peer that sends well-formed messages about objects that do not exist."""

    def __init__(self, kernel: Kernel, network: Network) -> None:
        super().__init__("vandal")
        self._kernel = kernel
        self._network = network
        network.attach(self, lambda _source, _packet: None)

    def act(self, targets: list[str]) -> None:
        """Send a message to a node."""
        rng = self._kernel.rng
        packet = Packet(rng.choice(NONSENSE), "", b"\x00junk")
        self._network.send(self, rng.choice(targets), packet)
