"""A hostile peer of the simulated mesh: it sends results of groups that it was not given.

It knows the ids of all groups and the addresses of sinks, and no ticket. It sends what a program
that has joined the network could send: complete results for open groups, for groups that have
ended, and for ids that were never asked for. It has dice of its own and its messages take no time,
so that everything else in a seed is as it would be without it.
"""

import random
from collections.abc import Sequence

from rollmesh.core.ids import TICKET_BYTES, GroupId
from rollmesh.testing.mesh_sim.asker import FORGED, Asker
from rollmesh.testing.mesh_sim.kernel import Kernel
from rollmesh.testing.mesh_sim.network import Network
from rollmesh.wire.frames import Packet
from rollmesh.wire.messages import GroupFinished

NEVER_ASKED = 2**62


class Forger:
    """A peer that sends forged results and results of groups that were never asked for."""

    def __init__(self, kernel: Kernel, network: Network) -> None:
        self._rng = random.Random(f"forger {kernel.seed}")
        self._network = network

    def act(self, askers: Sequence[Asker], seconds: float) -> None:
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
