"""What processes hold, read from outside each PERIOD_S: RSS, PSS, open files, threads, gauges.

Owns a thread and the series that it reads; all times are time.monotonic. Invariants: a look costs
the watched process nothing but the kernel's walk of its pages; what is read once a look (memory) is
told apart from what is read when asked (files, threads, gauges). Driven by _soak_mesh.py and
_soak_relay.py.
"""

import os
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import msgspec

PERIOD_S = 0.5
MB = 2**20
SCRAPE_S = 10.0


class Series(msgspec.Struct):
    """One process's memory over time; in bytes."""

    pid: int
    at_s: list[float] = []
    rss_bytes: list[int] = []
    pss_bytes: list[int] = []

    def between(self, begin_s: float, end_s: float) -> list[int]:
        """RSS in that time."""
        pairs = zip(self.at_s, self.rss_bytes, strict=True)
        return [rss for at_s, rss in pairs if begin_s <= at_s <= end_s]


class Held(msgspec.Struct, frozen=True):
    """What a process has besides memory, at one moment."""

    num_files: int
    num_threads: int
    gauges: dict[str, float]
    """By name and labels, as Prometheus' text has them; {} where it tells none."""


class Watch:
    """Looks at processes by name until closed; stops the run where one is past `max_rss_bytes`."""

    def __init__(self, pids: Mapping[str, int], max_rss_bytes: int = 0) -> None:
        self.series = {name: Series(pid) for name, pid in pids.items()}
        self.is_over = threading.Event()
        """One was past the limit."""
        self._max_rss_bytes = max_rss_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        due_s = time.monotonic()
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


def memory_of(pid: int) -> tuple[int, int]:
    """Resident and proportional bytes of a process; proc_pid_smaps(5)."""
    figures = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        figures[name] = int(rest.split()[0]) * 1024
    return figures["Rss"], figures["Pss"]


def peak_bytes(pid: int) -> int:
    """The most that was ever resident, as the kernel has it."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def held_by(pid: int, metrics_url: str = "", token: str = "") -> Held:
    """Of one process; its gauges where it serves them."""
    status = Path(f"/proc/{pid}/status").read_text()
    num_threads = int(status.partition("Threads:")[2].split()[0])
    gauges = read_gauges(metrics_url, token) if metrics_url else {}
    return Held(len(os.listdir(f"/proc/{pid}/fd")), num_threads, gauges)


def read_gauges(url: str, token: str = "") -> dict[str, float]:
    """What GET `url` tells, by name and labels; {} where nothing is served there."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=SCRAPE_S
        ) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return {}
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}
