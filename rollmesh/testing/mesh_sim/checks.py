"""What must hold in the simulated mesh: of each group that trains, and once it has come to rest.

(Of each end endings.py says it, of the router's tables router.py.) Invariant: a check raises
AssertionError, as soon as it happens, in words that name the group or the node. Driven by mesh.py.
"""

import re

from rollmesh.core.ids import GroupId
from rollmesh.testing.mesh_sim.client import SimClient, Trained
from rollmesh.testing.mesh_sim.engine import SimEngine
from rollmesh.testing.mesh_sim.errands import POISON
from rollmesh.testing.mesh_sim.launch import SimLaunch
from rollmesh.testing.mesh_sim.router import SimRouter
from rollmesh.testing.mesh_sim.visitor import Visitor
from rollmesh.testing.mesh_sim.worker import SimWorker

CULPRIT_DEATHS = 2
NAMED_WORKER = re.compile(r"worker-\d+")


class TrainingChecks:
    """Looks at each group that trains."""

    def __init__(self, client: SimClient) -> None:
        self._client = client
        self._trained: set[GroupId] = set()

    def look(self, trained: Trained) -> None:
        """Nothing trains twice, or before it ended; no sample is older than the bound."""
        client = self._client
        group_id, age = trained.group_id, trained.step - trained.oldest_step
        assert group_id not in self._trained, f"{group_id} was trained twice"
        assert group_id in client.endings, f"{group_id} was trained before it ended"
        bound = client.staleness.settings.max_staleness
        assert age <= bound, f"{group_id} was trained at age {age}"
        self._trained.add(group_id)


def look_at_ends(visitors: list[Visitor], workers: list[SimWorker], launch: SimLaunch) -> None:
    """What kills brings no result; nobody is a culprit whose workers live."""
    for visitor in visitors:
        for group_id, reason in visitor.endings.reasons.items():
            is_poison = visitor.asked[group_id].body == POISON
            assert reason or not is_poison, f"{group_id} kills, and brought a result"
            if reason.startswith("quarantined"):
                named = NAMED_WORKER.findall(reason)
                assert len(named) >= CULPRIT_DEATHS, reason
                for name in named:
                    assert launch.num_ends[name] >= named.count(name), f"{group_id}: {reason}"
    for group_id in [each for worker in workers for each in worker.kills]:
        [owner] = [visitor for visitor in visitors if group_id in visitor.asked]
        assert owner.asked[group_id].body == POISON


def unsettled(
    client: SimClient,
    visitors: list[Visitor],
    router: SimRouter,
    workers: list[SimWorker],
    engines: list[SimEngine],
) -> list[str]:
    """What is not at rest yet, in words; empty when everything asked for has ended everywhere."""
    found = []
    if client.wants_more:
        found.append(f"only {len(client.asked)} groups were asked for")
    if client.open_groups():
        waiting = [str(each) for each in client.asked if each not in client.endings]
        found.append(f"asked and not ended: {waiting}")
    if client.asks.open or client.asks.num_cancels:
        found.append(f"asks: {len(client.asks.open)} open, {client.asks.num_cancels} cancels")
    if client.staleness.num_running:
        found.append(f"staleness counts {client.staleness.num_running} as running")
    for visitor in visitors:
        if not visitor.is_gone and not visitor.is_done:
            waiting = [str(each) for each in visitor.asked if each not in visitor.endings]
            found.append(f"{visitor.name} waits for {waiting}, or has not asked for all")
    if router.held():
        found.append(f"the ledger holds {router.held()} entries and bytes")
    found += [f"{w.name} holds {w.held()} groups and payloads" for w in workers if w.held()]
    found += [
        f"{w.name} counts {w.duties.outbox.unacked_bytes} bytes as not acked"
        for w in workers
        if w.duties.outbox.unacked_bytes
    ]
    found += [f"{e.name} runs {len(e.running)} requests" for e in engines if e.running]
    found += [f"{e.name} is paused" for e in engines if e.paused]
    return found
