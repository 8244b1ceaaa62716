"""Resources of processes, read from outside every PERIOD_S: RSS, PSS, open files, threads, gauges.

- All times are time.monotonic.
- Reading costs a watched process only the kernel's walk of its pages. Memory is read periodically;
  files, threads and gauges on request.
"""

import os
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil

PERIOD_S = 0.5
MB = 2**20
SCRAPE_PERIOD_S = 5.0
SCRAPE_TIMEOUT_S = 10.0
HELD = "rollmesh_held_bytes"


class MemorySeries(msgspec.Struct):
    """Memory of one process over time, in bytes."""

    pid: int
    at_s: list[float] = []
    rss_bytes: list[int] = []
    pss_bytes: list[int] = []

    def between(self, begin_s: float, end_s: float) -> list[int]:
        """Return the RSS values within a time range."""
        pairs = zip(self.at_s, self.rss_bytes, strict=True)
        return [rss for at_s, rss in pairs if begin_s <= at_s <= end_s]


class OpenResources(msgspec.Struct, frozen=True):
    """Files, threads and gauges of a process at one moment."""

    num_files: int
    num_threads: int
    gauges: dict[str, float]
    """By name and labels, as in Prometheus' text; {} if the process serves none."""


class Metrics(msgspec.Struct, frozen=True):
    """Address at which a process serves its gauges."""

    url: str
    token: str = ""


class Scrape(msgspec.Struct, frozen=True):
    """Bytes that a process reports to hold, by kind."""

    at_s: float
    held: dict[str, float]


class Watch:
    """Samples processes by name until closed, and reports one that exceeds `max_rss_bytes`."""

    def __init__(
        self, pids: Mapping[str, int], metrics: Mapping[str, Metrics], max_rss_bytes: int
    ) -> None:
        self.series = {name: MemorySeries(pid) for name, pid in pids.items()}
        self.scrapes: dict[str, list[Scrape]] = {name: [] for name in metrics}
        self.is_over = threading.Event()
        """Whether a process exceeded the limit."""
        self._metrics = metrics
        self._max_rss_bytes = max_rss_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop sampling."""
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        due_s = scrape_s = time.monotonic()
        while not self._stop.wait(max(0.0, due_s - time.monotonic())):
            due_s += PERIOD_S
            for series in self.series.values():
                try:
                    rss_bytes, pss_bytes = memory_of(series.pid)
                except OSError:
                    continue
                series.at_s.append(time.monotonic())
                series.rss_bytes.append(rss_bytes)
                series.pss_bytes.append(pss_bytes)
                if 0 < self._max_rss_bytes < rss_bytes:
                    self.is_over.set()
            if due_s > scrape_s + SCRAPE_PERIOD_S:
                scrape_s = due_s
                self._scrape()

    def _scrape(self) -> None:
        for name, metrics in self._metrics.items():
            gauges = read_gauges(metrics)
            held = {what: value for what, value in gauges.items() if what.startswith(HELD)}
            self.scrapes[name].append(Scrape(time.monotonic(), held))


def memory_of(pid: int) -> tuple[int, int]:
    """Resident and proportional bytes of a process."""
    figures = _rollup(pid)
    return figures["Rss"], figures["Pss"]


def private_bytes(pid: int) -> int:
    """Resident bytes that no other process maps."""
    figures = _rollup(pid)
    return figures["Private_Clean"] + figures["Private_Dirty"]


def _rollup(pid: int) -> dict[str, int]:
    """Read smaps_rollup (proc_pid_smaps(5)), in bytes."""
    figures = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        figures[name] = int(rest.split()[0]) * 1024
    return figures


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def peak_bytes(pid: int) -> int:
    """Peak resident memory, as counted by the kernel."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def held_by(pid: int, metrics: Metrics | None) -> OpenResources:
    """Count for one process; with its gauges if it serves them."""
    status = Path(f"/proc/{pid}/status").read_text()
    num_threads = int(status.partition("Threads:")[2].split()[0])
    num_files = len(os.listdir(f"/proc/{pid}/fd"))
    # Counted before the gauges, whose request opens a file.
    return OpenResources(num_files, num_threads, read_gauges(metrics) if metrics else {})


def read_gauges(metrics: Metrics) -> dict[str, float]:
    """Return the gauges served there, by name and labels; {} if there are none."""
    headers = {"Authorization": f"Bearer {metrics.token}"} if metrics.token else {}
    asked = urllib.request.Request(metrics.url, headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=SCRAPE_TIMEOUT_S) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return {}
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}
