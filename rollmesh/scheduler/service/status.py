"""What the service tells people and Prometheus: a snapshot of its machine, as plain values.

Invariant: a snapshot is made by the thread that owns the machine and never changes afterwards, so
any thread may read it. Driven by process.py; served by face.py.
"""

from collections import Counter
from collections.abc import Iterator

import msgspec

from rollmesh.core.metrics import Figure
from rollmesh.scheduler.service.explain import FleetView, view
from rollmesh.scheduler.service.scheduler import Scheduler
from rollmesh.wire.scheduling import TicketState

QUANTILES = (0.5, 0.9, 0.99)


class Status(msgspec.Struct, frozen=True):
    """The answer of GET /status."""

    fleet: FleetView
    counts: dict[str, int]
    """What happened in this life: asks, grants, evictions, resizes, pipeline.quarantined..."""
    num_lives: int
    """Of schedulers with this journal, this one among them."""
    num_waiting: int
    """Asks that are queued."""
    wait_s: dict[str, float]
    """From asking to granted, of the newest grants: quantiles."""


def status_of(scheduler: Scheduler, counts: dict[str, int]) -> Status:
    """How all stands; `counts` are the socket's and the journal's own."""
    book = scheduler.book
    waits_s = sorted(book.waits_s)
    queued = (each.state is TicketState.QUEUED for each in book.tickets.values())
    return Status(
        fleet=view(book.state, scheduler.known()),
        counts={**book.num, **counts},
        num_lives=book.numbers.num_lives,
        num_waiting=sum(queued),
        wait_s={f"{q:g}": waits_s[int(q * (len(waits_s) - 1))] for q in QUANTILES if waits_s},
    )


def figures_of(status: Status) -> Iterator[Figure]:
    """The same for Prometheus."""
    fleet = status.fleet
    yield Figure("scheduler_gpus_free", fleet.num_free, "GPUs of no one, on nodes that are up.")
    yield Figure("scheduler_asks_waiting", status.num_waiting, "Asks that are queued.")
    for quantile, wait_s in status.wait_s.items():
        labels = {"quantile": quantile}
        yield Figure("scheduler_wait_seconds", wait_s, "From asking to granted.", labels)
    for event, number in status.counts.items():
        yield Figure("scheduler_events_total", number, "What happened, by name.", {"event": event})
    phases = Counter(node.phase.value for node in fleet.nodes)
    for phase, number in phases.items():
        yield Figure("scheduler_nodes", number, "Nodes by phase.", {"phase": phase})
    for pipeline in fleet.pipelines:
        labels = {"pipeline": pipeline.pipeline_id}
        workers = Counter(worker.phase.value for worker in pipeline.workers)
        for phase, number in workers.items():
            named = {**labels, "phase": phase}
            yield Figure("scheduler_workers", number, "Generation workers by phase.", named)
        is_out = pipeline.phase.value == "quarantined"
        yield Figure("scheduler_quarantined", is_out, "Whether it is in quarantine.", labels)
        longest_s = max((wait.for_s for wait in pipeline.waits), default=0.0)
        yield Figure("scheduler_waiting_seconds", longest_s, "Its longest wait now.", labels)
        credit_s = pipeline.credit_gpu_s
        yield Figure("scheduler_credit_gpu_seconds", credit_s, "What its share owes it.", labels)
