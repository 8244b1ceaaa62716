"""One arm of the soak from start to end, and its figures.

    idle, cold -> a few warm-up groups -> counts -> waves, each with a rest -> 10 s -> counts

- Idle memory and gauges are read before the first rollout, so that modules loaded later count.
  Files and threads are compared with those after the warm-up, when pools have their threads.
- A resting figure is the median of the last RESTING_S.
- Figures are never optimistic: the worst of several processes, the kernel's peak if it exceeds the
  samples', the upper end of a slope's two-sided 95 % interval.
"""

import itertools
import math
import re
import time
from array import array
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from benchmarks.lib.http_load import percentile
from benchmarks.lib.process_watch import MB, MemorySeries, OpenResources, Scrape, Watch, peak_bytes
from benchmarks.lib.soak_agents import LoadSample
from benchmarks.lib.soak_mesh import ArmProcesses, SoakArm, SoakMesh, SoakRelay
from benchmarks.lib.soak_worker import read_beats, read_lags
from rollmesh.runtime.heap_trimmer import LOOK_S, MIN_INTERVAL_S

IDLE_S = 3.0
REST_S = 10.0
BETWEEN_S = 6.0
"""Longer than kept connections to engines stay open."""
RESTING_S = 2.0
"""A resting figure is the median over this period."""
WARM_TURNS, WARM_GROUPS = 6, 2
"""Warm-up groups per concurrent one; then one wave of full length follows, since zmq creates a
thread and a context when the first long result is sent.
"""
LEAD_S = MIN_INTERVAL_S + LOOK_S
"""Period during which a figure may still contain memory that was held before: trims are no more
frequent, and a whole rollout of three screenshots takes little longer.
"""
MAX_RSS_BYTES = 8 * 2**30

_load_samples = msgspec.json.Decoder(LoadSample)


class SoakPlan(msgspec.Struct, frozen=True):
    """Duration of an arm: `num_rollouts` in one wave, or `minutes` in waves."""

    num_rollouts: int = 0
    minutes: float = 5.0
    num_waves: int = 24


class WaveMemory(msgspec.Struct, frozen=True):
    """Resting memory after a wave."""

    num_rollouts: int
    """Rollouts since the start."""
    rss_bytes: dict[str, float]
    """Resident bytes by judged process."""


class ArmResult(msgspec.Struct, kw_only=True):
    """All measurements of an arm."""

    name: str
    judged: list[str]
    ports: dict[str, str]
    series: dict[str, MemorySeries]
    peaks: dict[str, int]
    """Peaks counted by the kernel."""
    idle: dict[str, float]
    resting: dict[str, float]
    rests: list[WaveMemory] = []
    scrapes: dict[str, list[Scrape]] = {}
    """Periodic readings of the bytes that each process reports to hold, by kind."""
    cold: dict[str, OpenResources] = {}
    """Resources before the first group, after the warm-up, and at the end."""
    before: dict[str, OpenResources] = {}
    after: dict[str, OpenResources] = {}
    num_missed: int = 0
    """Number of missed heartbeats and lost workers."""
    load: list[LoadSample] = []
    lags: dict[str, tuple["array[float]", "array[float]"]] = {}
    began_s: float = 0.0
    ended_s: float = 0.0
    """End of the last wave."""
    waves: list[tuple[float, float]] = []
    """Begin and end of each wave."""
    num_groups: int = 0
    num_dropped: int = 0
    reasons: dict[str, int] = {}
    is_stopped: bool = False
    """Whether a process exceeded MAX_RSS_BYTES."""


def run_arm(arm: SoakArm, plan: SoakPlan, mode: str, folder: Path) -> ArmResult:
    """Run an arm in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        processes: SoakMesh | SoakRelay
        processes = SoakRelay(arm, folder) if mode == "relay" else SoakMesh(arm, folder)
        stack.enter_context(processes)
        watch = Watch(processes.pids, processes.metrics, MAX_RSS_BYTES)
        stack.callback(watch.close)
        return _soak(arm, plan, processes, watch)


def _soak(arm: SoakArm, plan: SoakPlan, processes: ArmProcesses, watch: Watch) -> ArmResult:
    time.sleep(IDLE_S)
    result = ArmResult(
        name=arm.name,
        judged=processes.judged,
        ports=processes.ports,
        series=watch.series,
        scrapes=watch.scrapes,
        peaks={},
        idle=_resting(processes, watch),
        resting={},
    )
    num_at_once = arm.num_workers * arm.shape.slots // arm.shape.group_size
    result.cold = processes.held()
    processes.wave(WARM_GROUPS * num_at_once, WARM_TURNS, watch.is_over)
    processes.wave(num_at_once, arm.shape.num_turns, watch.is_over)
    time.sleep(BETWEEN_S)
    result.before, result.began_s = processes.held(), time.monotonic()
    for num_groups in _waves(arm, plan, result):
        begun_s = time.monotonic()
        wave = processes.wave(num_groups, arm.shape.num_turns, watch.is_over)
        result.ended_s = time.monotonic()
        result.waves.append((begun_s, result.ended_s))
        result.num_groups += num_groups
        result.num_dropped += wave.num_dropped
        for reason, number in wave.reasons.items():
            result.reasons[reason] = result.reasons.get(reason, 0) + number
        if watch.is_over.is_set():
            result.is_stopped = True
            break
        time.sleep(BETWEEN_S)
        num_rollouts = result.num_groups * arm.shape.group_size
        result.rests.append(WaveMemory(num_rollouts, _resting(processes, watch)))
        resting = max(result.rests[-1].rss_bytes.values()) / MB
        print(f"soak: {arm.name}: {num_rollouts} rollouts, rests at {resting:.0f} MB", flush=True)
    time.sleep(max(0.0, result.ended_s + REST_S - time.monotonic()))
    result.resting = _resting(processes, watch)
    result.after, result.num_missed = (
        processes.held(),
        processes.num_lost() + _num_missed(processes),
    )
    result.peaks = {name: peak_bytes(processes.pids[name]) for name in processes.judged}
    result.load = [
        _load_samples.decode(line) for line in processes.load_log.read_bytes().splitlines()
    ]
    result.lags = {name: read_lags(path) for name, path in processes.lags.items()}
    return result


def _num_missed(processes: ArmProcesses) -> int:
    gaps = (
        after - before
        for path in processes.lags.values()
        for before, after in itertools.pairwise(read_beats(path))
    )
    return sum(gap_s > 2 * processes.beat_s for gap_s in gaps)


def _resting(processes: ArmProcesses, watch: Watch) -> dict[str, float]:
    now_s = time.monotonic()
    since_s = now_s - RESTING_S
    return {name: median(watch.series[name].between(since_s, now_s)) for name in processes.judged}


def _waves(arm: SoakArm, plan: SoakPlan, result: ArmResult) -> Iterator[int]:
    """Yield the number of groups of each wave; a timed arm starts with a small one to measure the
    rate.
    """
    size = arm.shape.group_size
    if plan.num_rollouts:
        yield -(-plan.num_rollouts // size)
        return
    wave_s = 60 * plan.minutes / plan.num_waves - BETWEEN_S
    until_s = result.began_s + 60 * plan.minutes
    num_at_once = max(1, arm.num_workers * arm.shape.slots // size)
    num_groups = 2 * num_at_once
    while (began_s := time.monotonic()) + wave_s / 2 < until_s:
        yield num_groups
        took_s = result.ended_s - began_s
        num_groups = max(num_at_once, round(num_groups * wave_s / took_s))


T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t at 97.5 %, for 1 to 30 degrees of freedom; larger ones use the last, which is
conservative.
"""
TABLES = re.compile(r"rollmesh_(held_bytes|entries)\{")
"""Gauges of held objects; caches have other names."""
WARM_RESTS = 2
"""Number of first rests that a slope leaves out, while heaps and pools are still growing."""


class Slope(NamedTuple):
    """MB per 1,000 rollouts of one process, with the ends of the 95 % interval."""

    at: float
    low: float
    high: float


def slope(xs: Sequence[float], ys: Sequence[float]) -> Slope:
    """Fit a least squares' line, which needs three points."""
    num, mean_x, mean_y = len(xs), sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    at = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    rests = (y - mean_y - at * (x - mean_x) for x, y in zip(xs, ys, strict=True))
    error = math.sqrt(sum(r * r for r in rests) / (num - 2) / spread)
    margin = T_975[min(num - 3, len(T_975) - 1)] * error
    return Slope(at, at - margin, at + margin)


def slope_of(rests: Sequence[WaveMemory]) -> Slope | None:
    """Return the slope over all judged processes per rollout of one; None if there are too few
    points.
    """
    rests = rests[WARM_RESTS:]
    if len({rest.num_rollouts for rest in rests}) < 3:
        return None
    thousands = [rest.num_rollouts / 1000 for rest in rests]
    return slope(thousands, [sum(rest.rss_bytes.values()) / MB for rest in rests])


class PeakMemory(NamedTuple):
    """The moment at which a process held most memory."""

    at_s: float
    rss_bytes: int
    load_bytes: int
    """Bytes that it had to hold then: live set and bodies in flight."""
    idle_bytes: float

    @property
    def factor(self) -> float:
        """Ratio of the bytes above idle to those that had to be held."""
        return (self.rss_bytes - self.idle_bytes) / max(1, self.load_bytes)


def peak_of(result: ArmResult, name: str) -> PeakMemory:
    """Find the peak among the samples, since the kernel's own peak has no time."""
    series = result.series[name]
    rss_bytes, at_s = max(zip(series.rss_bytes, series.at_s, strict=True))
    loads = [
        num_bytes
        for sampled_s, num_bytes in load_of(result, name)
        if at_s - LEAD_S <= sampled_s <= at_s
    ]
    return PeakMemory(at_s, rss_bytes, max(loads, default=0), result.idle[name])


def load_of(result: ArmResult, name: str) -> list[tuple[float, int]]:
    """Return the bytes that a process had to hold (live set and bodies in flight), with times."""
    port = result.ports[name]
    return [
        (sample.at_s, sample.held[port].live_bytes + sample.held[port].body_bytes)
        for sample in result.load
        if port in sample.held
    ]


def left_over(result: ArmResult) -> dict[str, float]:
    """Return gauges of held bytes and entries that have grown, by process and name."""
    left: dict[str, float] = {}
    for name, after in result.after.items():
        before = result.cold[name].gauges
        for gauge, value in after.gauges.items():
            if TABLES.match(gauge) and value > before.get(gauge, 0.0):
                left[f"{name} {gauge}"] = value - before.get(gauge, 0.0)
    return left


def named_at_peak(result: ArmResult, name: str) -> dict[str, float]:
    """Return the gauges read nearest to its peak."""
    at_s = peak_of(result, name).at_s
    scrapes = result.scrapes.get(name, [])
    nearest = min(scrapes, key=lambda scrape: abs(scrape.at_s - at_s), default=None)
    return dict(nearest.held) if nearest else {}


def figures_of(result: ArmResult) -> dict[str, float]:
    """Return the figures by name, without the arm's prefix."""
    peaks = [peak_of(result, name) for name in result.judged]
    highest = max(peaks, key=lambda peak: peak.rss_bytes)
    idle, resting = max(result.idle.values()), max(result.resting.values())
    load = [sample for sample in result.load if sample.at_s >= result.began_s]
    turns_s = [turn_s for sample in load[1:] for turn_s in sample.turns_s]
    counts = Counter(load[-1].counts)
    counts.subtract(load[0].counts)
    wall_s = sum(end_s - begin_s for begin_s, end_s in result.waves)
    lags = [lag for name in result.judged for lag in _busy_lags(result, name)]
    found = {
        "rollouts": float(counts["rollouts"]),
        "turns": float(counts["turns"]),
        "turns_per_s": counts["turns"] / wall_s,
        "turn_p50_ms": 1e3 * percentile(turns_s, 50),
        "turn_p99_ms": 1e3 * percentile(turns_s, 99),
        "vanished": float(counts["vanished"]),
        "crashed": float(counts["crashed"]),
        "broken": float(counts["broken"]),
        "groups": float(result.num_groups),
        "groups_dropped": float(result.num_dropped),
        "idle_mb": idle / MB,
        "peak_mb": highest.rss_bytes / MB,
        "peak_kernel_mb": max(result.peaks.values()) / MB,
        "resting_mb": resting / MB,
        "resting_vs_idle": max(result.resting[name] / result.idle[name] for name in result.judged),
        "load_at_peak_mb": highest.load_bytes / MB,
        "peak_factor": max(peak.factor for peak in peaks),
        "files_left": _left(result, "num_files"),
        "threads_left": _left(result, "num_threads"),
        "gauges": float(sum(map(_num_tables, result.after.values()))),
        "gauges_left": float(len(left_over(result))),
        "beats_missed": float(result.num_missed),
        "stopped_at_8_gib": float(result.is_stopped),
    }
    if lags:
        for percent in (50, 99):
            found[f"lag_p{percent}_ms"] = 1e3 * percentile(lags, percent)
        found["lag_worst_ms"] = 1e3 * max(lags)
    if fit := slope_of(result.rests):
        found |= {"waves": float(len(result.rests))}
        found |= {"slope_mb_per_1000": fit.at, "slope_upper_mb_per_1000": fit.high}
    return found


def _busy_lags(result: ArmResult, name: str) -> Iterable[float]:
    """Lags during waves; idle loops are never late."""
    at_s, lags = result.lags.get(name, ((), ()))
    starts = [begin_s for begin_s, _ in result.waves]
    return [
        lag
        for at, lag in zip(at_s, lags, strict=True)
        if (wave := bisect(starts, at)) and at <= result.waves[wave - 1][1]
    ]


def _left(result: ArmResult, what: str) -> float:
    return float(
        max(getattr(result.after[n], what) - getattr(result.before[n], what) for n in result.after)
    )


def _num_tables(held: object) -> int:
    return sum(1 for gauge in getattr(held, "gauges", {}) if TABLES.match(gauge))
