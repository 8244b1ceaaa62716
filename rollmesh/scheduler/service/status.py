"""Status of the service for HTTP and Prometheus, and the endpoint that explains why a pipeline
waits.

    GET /explain/PIPELINE     why it waits, and until when, as JSON; as text with ?text

- A snapshot is made by the thread that owns the machine and never changes, so that any thread may
  read it.
- /explain shows the newest snapshot in the words of the command line.
"""

import socket
from collections import Counter
from collections.abc import Iterator

import msgspec
from aiohttp import web

from rollmesh.core.clock import Clock
from rollmesh.core.metrics import Exposition, Figure
from rollmesh.scheduler.service.explain import FleetExplanation, explain_fleet, select_pipeline
from rollmesh.scheduler.service.scheduler import FleetScheduler
from rollmesh.serve.status_app import SnapshotCell, StatusApp
from rollmesh.wire.scheduling import TicketState

QUANTILES = (0.5, 0.9, 0.99)


class ServiceStatus(msgspec.Struct, frozen=True, rename={"num_incarnations": "num_lives"}):
    """Answer of GET /status."""

    fleet: FleetExplanation
    counts: dict[str, int]
    """Events of this incarnation: asks, grants, evictions, resizes, pipeline.quarantined..."""
    num_incarnations: int
    """Scheduler processes with this journal so far, including this one."""
    num_waiting: int
    """Queued requests."""
    wait_s: dict[str, float]
    """Quantiles of the time from request to grant, over the newest grants."""


def status_of(scheduler: FleetScheduler, counts: dict[str, int]) -> ServiceStatus:
    """Make a snapshot; `counts` are those of the socket and the journal."""
    state = scheduler.state
    waits_s = sorted(state.waits_s)
    queued = (each.state is TicketState.QUEUED for each in state.tickets.values())
    return ServiceStatus(
        fleet=explain_fleet(state.fleet, scheduler.explain_context()),
        counts={**state.counts, **counts},
        num_incarnations=state.numbers.num_incarnations,
        num_waiting=sum(queued),
        wait_s={f"{q:g}": waits_s[int(q * (len(waits_s) - 1))] for q in QUANTILES if waits_s},
    )


def figures_of(status: ServiceStatus) -> Iterator[Figure]:
    """Metrics of a snapshot for Prometheus."""
    fleet = status.fleet
    yield Figure("scheduler_gpus_free", fleet.num_free, "Free GPUs on nodes that are up.")
    yield Figure("scheduler_asks_waiting", status.num_waiting, "Queued requests.")
    for quantile, wait_s in status.wait_s.items():
        labels = {"quantile": quantile}
        yield Figure("scheduler_wait_seconds", wait_s, "Time from request to grant.", labels)
    for event, number in status.counts.items():
        yield Figure("scheduler_events_total", number, "Events by name.", {"event": event})
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
        yield Figure(
            "scheduler_quarantined", is_out, "Whether the pipeline is quarantined.", labels
        )
        longest_s = max((wait.for_s for wait in pipeline.waits), default=0.0)
        yield Figure(
            "scheduler_waiting_seconds", longest_s, "Longest current wait of the pipeline.", labels
        )
        credit_s = pipeline.credit_gpu_s
        yield Figure(
            "scheduler_credit_gpu_seconds",
            credit_s,
            "GPU seconds of generation owed to the pipeline.",
            labels,
        )


def snapshots_of(clock: Clock) -> SnapshotCell[ServiceStatus]:
    """Where the service's loop leaves its snapshots."""
    return SnapshotCell("scheduler", clock, figures_of)


def status_app_of(listening: socket.socket, snapshots: SnapshotCell[ServiceStatus]) -> StatusApp:
    """HTTP server of the snapshots; AddressError if others can reach it and there is no token."""

    async def explain(request: web.Request) -> web.Response:
        status = snapshots.newest()
        if status is None:
            return web.Response(status=503, text="the scheduler is starting\n")
        selected = select_pipeline(status.fleet, request.match_info["pipeline"])
        if selected.error:
            return web.Response(status=404, text=f"{selected.error}\n")
        if "text" in request.query:
            lines = [line for each in selected.pipelines for line in each.lines]
            return web.Response(text="\n".join([*lines, ""]))
        return web.Response(body=msgspec.json.encode(selected), content_type="application/json")

    routes = [web.get("/explain/{pipeline}", explain)]
    exposition = Exposition("scheduler")
    return StatusApp(listening, snapshots, exposition, setting="http_bind", routes=routes)
