"""What must hold in the simulated mesh: after every event, and once it has come to rest.

Invariant: a check raises AssertionError in words that name the group or the node, and costs little
enough to run after each of millions of events. Driven by mesh.py.
"""

from rollmesh.core.ids import GroupId
from rollmesh.testing.mesh_sim.client import SimClient
from rollmesh.testing.mesh_sim.engine import SimEngine
from rollmesh.testing.mesh_sim.router import SimRouter
from rollmesh.testing.mesh_sim.worker import SimWorker


class RunningChecks:
    """Looks at what is new since the last event, so that it costs little."""

    def __init__(self, client: SimClient) -> None:
        self._client = client
        self._num_endings = 0
        self._num_trained = 0
        self._ended: set[GroupId] = set()
        self._trained: set[GroupId] = set()

    def after_event(self) -> None:
        """Every ask ends once; nothing trains twice; no sample is older than the bound."""
        client = self._client
        for ending in client.endings[self._num_endings :]:
            assert ending.group_id not in self._ended, f"{ending.group_id} ended twice"
            self._ended.add(ending.group_id)
        self._num_endings = len(client.endings)
        for trained in client.trained[self._num_trained :]:
            group_id, age = trained.group_id, trained.step - trained.oldest_step
            assert group_id not in self._trained, f"{group_id} was trained twice"
            assert group_id in self._ended, f"{group_id} was trained before it ended"
            bound = client.staleness.settings.max_staleness
            assert age <= bound, f"{group_id} was trained at age {age}"
            self._trained.add(group_id)
        self._num_trained = len(client.trained)


def unsettled(
    client: SimClient, router: SimRouter, workers: list[SimWorker], engines: list[SimEngine]
) -> list[str]:
    """What is not at rest yet, in words; empty when everything asked for has ended everywhere."""
    found = []
    if client.wants_more:
        found.append(f"only {len(client.asked)} groups were asked for")
    if client.open_groups():
        ended = {ending.group_id for ending in client.endings}
        found.append(f"asked and not ended: {[str(g) for g in client.asked if g not in ended]}")
    if client.asks.open or client.asks.num_cancels:
        found.append(f"asks: {len(client.asks.open)} open, {client.asks.num_cancels} cancels")
    if client.staleness.num_running:
        found.append(f"staleness counts {client.staleness.num_running} as running")
    if router.held():
        found.append(f"the ledger holds {router.held()} groups")
    found += [f"{w.name} holds {w.held()} groups and payloads" for w in workers if w.held()]
    found += [
        f"{w.name} counts {w.duties.outbox.unacked_bytes} bytes as not acked"
        for w in workers
        if w.duties.outbox.unacked_bytes
    ]
    found += [f"{e.name} runs {len(e.running)} requests" for e in engines if e.running]
    found += [f"{e.name} is paused" for e in engines if e.paused]
    return found
