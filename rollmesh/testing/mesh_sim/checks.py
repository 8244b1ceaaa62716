"""Checks of the simulated mesh at rest; each raises an AssertionError that names the group or node.

The ends of groups are checked in requesting_client.py, training in training_history.py, and the
router's tables in router.py.
"""

import re

from rollmesh.testing.mesh_sim.disk import SEGMENT_BYTES
from rollmesh.testing.mesh_sim.engine import SimEngine
from rollmesh.testing.mesh_sim.rollouts import POISON
from rollmesh.testing.mesh_sim.router import SimRouter
from rollmesh.testing.mesh_sim.trainer import SimTrainer
from rollmesh.testing.mesh_sim.transient_client import TransientClient
from rollmesh.testing.mesh_sim.worker import SimLaunch, SimWorker

CULPRIT_DEATHS = 2
UNDER_WAY_BYTES = 8000
"""Bound on the excess: the results of all that may run at once, and what a checkpoint causes to be
written.
"""
NAMED_WORKER = re.compile(r"worker-\d+")


def look_at_journal(client: SimTrainer) -> None:
    """Assert that the journal never held much more than its budget."""
    most = client.disk.most_bytes
    assert most <= client.max_bytes + UNDER_WAY_BYTES, f"the journal held {most} bytes"


def look_at_ends(
    visitors: list[TransientClient], workers: list[SimWorker], launch: SimLaunch
) -> None:
    """Assert that killing groups bring no result and that no innocent group is quarantined."""
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
    client: SimTrainer,
    visitors: list[TransientClient],
    router: SimRouter,
    workers: list[SimWorker],
    engines: list[SimEngine],
) -> list[str]:
    """Return what is not at rest yet; '' when everything requested has ended everywhere."""
    found = []
    if client.wants_more or client.is_busy:
        found.append(f"{len(client.witness.asked)} groups were asked for, and more is to be done")
    if waiting := [str(each) for each in client.witness.asked if each not in client.endings]:
        found.append(f"asked and not ended: {waiting}")
    if client.disk.size_bytes > client.max_bytes + _waiting_bytes(client) + SEGMENT_BYTES:
        found.append(f"the journal holds {client.disk.size_bytes} bytes")
    if client.asks.open or client.asks.num_cancels:
        found.append(f"asks: {len(client.asks.open)} open, {client.asks.num_cancels} cancels")
    if client.staleness.running:
        found.append(f"staleness counts {client.staleness.running} as running")
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
    current = (router.incarnation, router.fleet.table().epoch)
    found += [
        f"{w.name} has the table of {w.view.place()}, not {current}"
        for w in workers
        if w.alive and w.view.place() != current
    ]
    return found


def _waiting_bytes(client: SimTrainer) -> int:
    """Bytes of results that no step has taken, which a journal over its budget cannot free by
    itself.
    """
    results = client.book.history().results
    return sum(each.num_bytes for each in results if each.group_id in client.waiting)
