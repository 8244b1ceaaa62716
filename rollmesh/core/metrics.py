"""Figures for Prometheus: plain integers are counted on the hot path and read when asked.

Owns the exposition of one process. A room counts in ordinary attributes and hands over a source,
a function that reads them; nothing is locked and nothing is paid until someone scrapes. Invariants:
every name starts with `rollmesh_` and ends in its unit or in `_total`; a label's values are few
(workers, engines, states), never ids of rollouts. Driven by the HTTP face of each process.
"""

import functools
import os
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Figure(msgspec.Struct, frozen=True):
    """One value, as a source reads it."""

    name: str
    """Without `rollmesh_`; a name that ends in `_total` is a counter, any other a gauge."""
    value: float
    about: str
    """One line for people."""
    labels: Mapping[str, str] = {}


Source = Callable[[], Iterable[Figure]]


class Exposition:
    """All figures of one process."""

    def __init__(self, role: str) -> None:
        self._sources: list[Source] = [lambda: process_figures(role)]
        self._registry = CollectorRegistry()
        self._registry.register(_Reader(self._sources))

    def add(self, source: Source) -> None:
        """Read `source` at each scrape; it may be called from the scraping thread."""
        self._sources.append(source)

    def render(self) -> bytes:
        """Prometheus' text format, to be sent as CONTENT_TYPE."""
        return generate_latest(self._registry)


class _Reader(Collector):
    """Turns what the sources say into families, one per name."""

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
    """Resident memory of this process; a look that needs no descriptor, but for the first."""
    statm = _statm()
    if statm < 0:
        return int(psutil.Process().memory_info().rss)
    return int(os.pread(statm, 128, 0).split()[1]) * resource.getpagesize()


@functools.cache
def _statm() -> int:
    """The file that proc_pid_statm(5) describes; -1 where there is none."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1


def process_figures(role: str) -> Iterator[Figure]:
    """Memory and CPU time of this process."""
    process = psutil.Process()
    times = process.cpu_times()
    labels = {"role": role}
    yield Figure("process_rss_bytes", rss_bytes(), "Resident memory.", labels)
    cpu_s = times.user + times.system
    yield Figure("process_cpu_seconds_total", cpu_s, "CPU time, user and system.", labels)
