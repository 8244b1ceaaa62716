"""Metrics for Prometheus, and memory accounting of one process.

- Hot paths count in plain attributes; a source function reads them at each scrape, without locks.
- Names start with `rollmesh_` and end in their unit or `_total`; labels have few values (workers,
  engines, states), never ids of rollouts.
- Tables of live work are empty at rest; caches are bounded by themselves. Every gauge has a row in
  HELD_BYTES, ENTRIES or CACHE_ENTRIES with its bound.
"""

import functools
import os
import resource
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec
import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Figure(msgspec.Struct, frozen=True):
    """One value, as a source reads it."""

    name: str
    """The name without `rollmesh_`; `_total` marks a counter, all others are gauges."""
    value: float
    about: str
    """One line of help."""
    labels: Mapping[str, str] = {}


Source = Callable[[], Iterable[Figure]]


class Exposition:
    """All metrics of one process."""

    def __init__(self, role: str) -> None:
        self._sources: list[Source] = [lambda: process_figures(role)]
        self._registry = CollectorRegistry()
        self._registry.register(_Reader(self._sources))

    def add(self, source: Source) -> None:
        """Add a source that is read at each scrape, possibly on the scraping thread."""
        self._sources.append(source)

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format (CONTENT_TYPE)."""
        return generate_latest(self._registry)


class _Reader(Collector):
    """Groups the values of all sources into families, one per name."""

    def __init__(self, sources: list[Source]) -> None:
        self._sources = sources

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for source in self._sources:
            for figure in source():
                family = families.get(figure.name) or _new_family(figure)
                families[figure.name] = family
                family.add_sample(f"rollmesh_{figure.name}", dict(figure.labels), figure.value)
        yield from families.values()


def _new_family(figure: Figure) -> Metric:
    name = f"rollmesh_{figure.name}"
    counts = name.endswith("_total")
    return (CounterMetricFamily if counts else GaugeMetricFamily)(name, figure.about)


def rss_bytes() -> int:
    """Return the resident memory of this process; needs a descriptor only on the first call."""
    statm = _statm()
    if statm < 0:
        return int(psutil.Process().memory_info().rss)
    return int(os.pread(statm, 128, 0).split()[1]) * resource.getpagesize()


@functools.cache
def _statm() -> int:
    """Open /proc/self/statm, see proc_pid_statm(5); -1 if there is none."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1


def process_figures(role: str) -> Iterator[Figure]:
    """Yield memory and CPU time of this process."""
    process = psutil.Process()
    times = process.cpu_times()
    labels = {"role": role}
    yield Figure("process_rss_bytes", rss_bytes(), "Resident memory.", labels)
    cpu_s = times.user + times.system
    yield Figure("process_cpu_seconds_total", cpu_s, "CPU time, user and system.", labels)


Counts = Callable[[], Mapping[str, int]]
"""Reads the current counts, by name."""


class Bound(NamedTuple):
    """Which processes show a gauge, and what limits it."""

    processes: tuple[str, ...]
    limit: str


WORKER = ("worker",)
GATEWAY = ("gateway",)
ROUTER = ("router",)
EDGE = (*WORKER, *GATEWAY)
EVERY = (*EDGE, *ROUTER)

HELD_BYTES = {
    "graph": Bound(EDGE, "its session: token ids, log-probs, rows, the prompt as JSON"),
    "history": Bound(EDGE, "its session: short messages and their places"),
    "answers": Bound(GATEWAY, "its session: short raw answers (relay)"),
    "blobs": Bound(
        EDGE,
        "`interception.max_blob_bytes`; the rest is on disk",
    ),
    "bodies": Bound(EDGE, "`interception.max_inflight_bytes` and one body"),
    "accounts": Bound(
        GATEWAY,
        "finished sessions, under 16 KiB each, for `interception.retention_s`",
    ),
    "outbox": Bound(WORKER, "`worker.max_unacked_bytes` and the running groups"),
    "asks": Bound(ROUTER, "512 MiB of waiting requests, and the running ones"),
}
"""Bytes in memory, by what they are."""

ENTRIES = {
    "scopes": Bound(EDGE, "live rollouts; end with their group or their own cleanup"),
    "groups": Bound(
        EVERY,
        "open groups; `router.max_queued_groups` and workers' slots",
    ),
    "doors": Bound(EDGE, "keys of open sessions"),
    "loans": Bound(EDGE, "child tasks; revoked 30 s after their scope should have ended"),
    "exchanges": Bound(EDGE, "requests in flight"),
    "bodies": Bound(EDGE, "requests in flight with 16 KiB and more"),
    "blobs": Bound(EDGE, "sessions that show them"),
    "images": Bound(EDGE, "sessions that show them, remote ones included"),
    "generations": Bound(EDGE, "running, or parked for `interception.retry_window_s`"),
    "generations_queued": Bound(EDGE, "turns that wait for `engine.max_inflight`"),
    "legs": Bound(EDGE, "engine requests"),
    "engine_tasks": Bound(EDGE, "aborts and fault reports in progress"),
    "sessions": Bound(GATEWAY, "until deleted, or for `interception.retention_s`"),
    "running_groups": Bound(WORKER, "`worker.max_rollouts`"),
    "aborting_groups": Bound(WORKER, "groups that are ending"),
    "group_tasks": Bound(WORKER, "running and ending groups"),
    "open_slots": Bound(WORKER, "`worker.max_rollouts`"),
    "parcels": Bound(WORKER, "unacknowledged results; `worker.max_unacked_bytes`"),
    "payloads": Bound(WORKER, "unacknowledged results"),
    "left_behind": Bound(WORKER, "calls that never returned; at 100 the worker recycles"),
    "waiting_groups": Bound(ROUTER, "`router.max_queued_groups`, twice that with many clients"),
    "client_groups": Bound(ROUTER, "open groups, by client"),
    "worker_groups": Bound(ROUTER, "open groups, by worker"),
}
"""Tables of live work; each is empty at rest."""

CACHE_ENTRIES = {
    "openings": Bound(EDGE, "4 MB of first requests that siblings share"),
    "ended_rollouts": Bound(EDGE, "1,024 names"),
    "engine_clients": Bound(EDGE, "engines in the table"),
    "engines_avoided": Bound(EDGE, "engines that failed lately"),
    "engine_connections": Bound(EDGE, "concurrent engine requests; closed when idle"),
    "sticky_sessions": Bound(EDGE, "engines of the newest sessions"),
    "connections": Bound(EDGE, "HTTP connections of agents; idle ones end after 120 s"),
    "delivered_groups": Bound(WORKER, "4,096 names"),
    "sinks": Bound(WORKER, "64 sockets, 384 if so many are busy"),
    "clients": Bound(ROUTER, "clients with heartbeats; `router.client_grace_s` after them"),
    "workers": Bound(ROUTER, "workers with heartbeats, and those lost lately"),
    "lost_groups": Bound(ROUTER, "groups of silent workers"),
    "engines": Bound(ROUTER, "the engine table"),
    "notes": Bound(ROUTER, "8,192 ended groups"),
    "ended_workers": Bound(ROUTER, "1,024 ended workers"),
    "loading_workers": Bound(ROUTER, "4,096"),
    "agenda": Bound(ROUTER, "three times the open groups"),
}
"""Limits on the objects that are kept while nothing is in progress."""


class Inventory:
    """Sum of the counts of all rooms of a process."""

    def __init__(self) -> None:
        self._held: list[Counts] = []
        self._tables: list[Counts] = []
        self._caches: list[Counts] = []

    def add(
        self,
        held: Counts | None = None,
        tables: Counts | None = None,
        caches: Counts | None = None,
    ) -> None:
        """Include bytes in memory, entries of live work, and entries of caches."""
        for counts, into in (held, self._held), (tables, self._tables), (caches, self._caches):
            if counts is not None:
                into.append(counts)

    def held(self) -> dict[str, int]:
        """Bytes in memory, by kind."""
        return _sum(self._held)

    def held_bytes(self) -> int:
        """Bytes in memory, all kinds together."""
        return sum(self.held().values())

    def figures(self) -> Iterator[Figure]:
        """Source of metrics for the exposition."""
        yield from counted(self.held(), _sum(self._tables), _sum(self._caches))


def counted(
    held: Mapping[str, int], tables: Mapping[str, int], caches: Mapping[str, int]
) -> Iterator[Figure]:
    """Metrics of bytes, live work and caches; each name must have a bound."""
    unknown = {*held} - {*HELD_BYTES} | {*tables} - {*ENTRIES} | {*caches} - {*CACHE_ENTRIES}
    assert not unknown, f"gauges without a bound in core/metrics.py: {sorted(unknown)}"
    for what, number in held.items():
        yield Figure("held_bytes", number, "Bytes in memory, by kind.", {"what": what})
    for table, number in tables.items():
        yield Figure("entries", number, "Entries of tables of live work.", {"table": table})
    for cache, number in caches.items():
        yield Figure("cache_entries", number, "Entries of caches.", {"cache": cache})


def _sum(sources: list[Counts]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for read in sources:
        counts.update(read())
    return counts
