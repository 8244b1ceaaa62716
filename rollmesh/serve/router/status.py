"""A snapshot of the router for people and Prometheus.

The thread that owns the machines makes it, and it never changes, so any thread may read it.
"""

import itertools
from collections.abc import Iterator, Mapping

import msgspec

from rollmesh.core.metrics import Figure, counted
from rollmesh.serve.router.group_scheduler import GroupScheduler
from rollmesh.serve.router.workers import WorkerEntry, WorkerHealth
from rollmesh.wire.fleet import FleetChanged
from rollmesh.wire.messages import GroupState, WorkerBeat, WorkerHello
from rollmesh.wire.worker_report import WorkerReport, WorkerStatus, worker_metrics


def held(group_scheduler: GroupScheduler) -> Mapping[str, int]:
    """Bytes in memory, by what."""
    return {"asks": group_scheduler.table.num_body_bytes}


def entries(group_scheduler: GroupScheduler) -> Mapping[str, int]:
    """By table."""
    table, workers = group_scheduler.table, list(group_scheduler.membership.workers)
    return {
        "groups": len(table.groups),
        "waiting_groups": table.num_waiting,
        "client_groups": sum([len(groups) for groups in table.of_client.values()]),
        "worker_groups": sum([len(worker.groups) for worker in workers]),
    }


def cache_entries(group_scheduler: GroupScheduler, num_engines: int) -> Mapping[str, int]:
    """By cache."""
    table, workers = group_scheduler.table, list(group_scheduler.membership.workers)
    return {
        "clients": len(table.clients),
        "workers": len(workers),
        "lost_groups": sum([len(worker.lost_groups) for worker in workers]),
        "engines": num_engines,
        "notes": len(table.tombstones),
        "ended_workers": group_scheduler.membership.num_ends,
        "loading_workers": len(group_scheduler.env_loads.now()),
        "agenda": group_scheduler.assignments.num_noted + len(table.deadlines),
    }


MAX_CLIENTS = 100
"""Limit on clients that are listed one by one."""


class ClientStatus(msgspec.Struct, frozen=True):
    """One client."""

    client_id: str
    weight: int
    keep: bool
    num_open: int
    """Groups that it waits for."""


class EngineStatus(msgspec.Struct, frozen=True):
    """One engine of the fleet table."""

    url: str
    phase: str
    policy_version: int
    num_running: int
    num_waiting: int
    detail: str


class RouterStatus(msgspec.Struct, frozen=True):
    """The answer of GET /status."""

    incarnation: str
    workers: list[WorkerStatus]
    queue: dict[str, int]
    """Groups that have not ended, by state."""
    num_done: int
    num_failed: int
    num_cancelled: int
    num_clients: int
    clients: list[ClientStatus]
    """The first MAX_CLIENTS of them."""
    engines: list[EngineStatus]
    counts: dict[str, int]
    """Events since the start: asks, refusals, requeues, claims, returns, workers_lost..."""
    causes: list[str] = []
    """Why groups wait, for causes that only an operator can remove."""
    address: str = ""
    """tcp://, which workers and clients dial."""
    status_url: str = ""
    """http://, of this answer."""
    held_bytes: Mapping[str, int] = {}
    entries: Mapping[str, int] = {}
    cache_entries: Mapping[str, int] = {}
    """See status.py."""


def status_of(
    incarnation: str, group_scheduler: GroupScheduler, table: FleetChanged, counts: dict[str, int]
) -> RouterStatus:
    """The state of the router; `counts` are the socket's own."""
    num_in = group_scheduler.table.num_in
    open_states = (GroupState.QUEUED, GroupState.ASSIGNED, GroupState.RUNNING)
    return RouterStatus(
        incarnation=incarnation,
        workers=[
            *map(_worker_status, group_scheduler.membership.workers),
            *map(_loading_status, group_scheduler.env_loads.now()),
        ],
        queue={state.value: num_in[state] for state in open_states},
        num_done=num_in[GroupState.DONE],
        num_failed=num_in[GroupState.FAILED],
        num_cancelled=num_in[GroupState.CANCELLED],
        num_clients=len(group_scheduler.table.clients),
        clients=_clients(group_scheduler),
        engines=[
            EngineStatus(
                row.url,
                row.phase.value,
                row.policy_version,
                row.num_running,
                row.num_waiting,
                row.detail,
            )
            for row in table.engines
        ],
        counts={**group_scheduler.table.num, **counts},
        causes=group_scheduler.blocked_reasons.standing(),
        held_bytes=held(group_scheduler),
        entries=entries(group_scheduler),
        cache_entries=cache_entries(group_scheduler, len(table.engines)),
    )


def _clients(group_scheduler: GroupScheduler) -> list[ClientStatus]:
    clients = itertools.islice(group_scheduler.table.clients.values(), MAX_CLIENTS)
    groups = group_scheduler.table.of_client
    return [
        ClientStatus(each.client_id, each.weight, each.keep, len(groups.get(each.client_id, ())))
        for each in clients
    ]


def _state_of(worker: WorkerEntry) -> str:
    """`live`, `stalled` or `lost`, or what a live one says that it does instead of serving."""
    if worker.state is not WorkerHealth.LIVE:
        return worker.state.value
    if worker.drain_reason:
        return "draining"
    state = worker.beat.state if worker.beat else "serving"
    return WorkerHealth.LIVE.value if state == "serving" else state


def _worker_status(worker: WorkerEntry) -> WorkerStatus:
    beat = worker.beat or WorkerBeat(worker.worker_id)
    report = {name: getattr(beat, name) for name in WorkerReport.__struct_fields__}
    own = {"state": _state_of(worker), "waits_for": worker.waits_for}
    return WorkerStatus(
        **report | own,
        env=worker.hello.env,
        in_flight=worker.load,
        pid=worker.hello.pid,
        host=worker.hello.host,
        max_rollouts=worker.hello.max_rollouts,
        num_attempts=worker.num_assigned,
        longest_gap_s=worker.longest_gap_s,
    )


def _loading_status(hello: WorkerHello) -> WorkerStatus:
    """One that does not serve yet."""
    nothing_yet = WorkerEntry(hello, b"", 0.0)
    return msgspec.structs.replace(_worker_status(nothing_yet), state="loading", accepting=False)


def figures_of(status: RouterStatus) -> Iterator[Figure]:
    """Convert a status to Prometheus figures."""
    for state, number in status.queue.items():
        yield Figure("router_groups", number, "Groups that have not ended.", {"state": state})
    ended = {
        "done": status.num_done,
        "failed": status.num_failed,
        "cancelled": status.num_cancelled,
    }
    for state, number in ended.items():
        yield Figure("router_groups_ended_total", number, "Groups by end.", {"state": state})
    for event, number in status.counts.items():
        yield Figure("router_events_total", number, "What happened, by name.", {"event": event})
    yield from counted(status.held_bytes, status.entries, status.cache_entries)
    for worker in status.workers:
        labels = {"worker_id": worker.worker_id}
        for name, value, about in worker_metrics(worker):
            yield Figure(name, value, about, labels)
    for engine in status.engines:
        labels = {"engine": engine.url}
        is_ready = engine.phase == "ready"
        yield Figure("engine_ready", is_ready, "Whether it may be used.", labels)
        yield Figure("engine_policy_version", engine.policy_version, "Of its weights.", labels)
        yield Figure("engine_running", engine.num_running, "Requests that generate.", labels)
        yield Figure("engine_waiting", engine.num_waiting, "Requests that wait.", labels)
