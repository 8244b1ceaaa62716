"""What a soak's arm comes to: ratios, a slope with its bound, what is left at rest.

Invariants: pure; a figure is never better than what was seen (the worst of several processes, the
kernel's peak where it is above the samples', and of a slope the upper end of its two-sided 95 %
interval); a gauge that only counts upwards is no table and is not compared. Driven by rss_soak.py.
"""

import math
import re
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks._load import percentile
from benchmarks._soak_run import LEAD_S, Rest, Seen
from benchmarks._soak_watch import MB

T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t at 97.5 %, for 1 to 30 degrees of freedom; more have the last, which is safe."""
TABLES = re.compile(r"rollmesh_(held_bytes|entries)\{")
"""Gauges of what is held; caches have a name of their own."""
WARM_RESTS = 2
"""First rests that a slope leaves out: heaps and pools still find their size."""


class Slope(NamedTuple):
    """MB per 1,000 rollouts of one process, and the ends of the 95 % interval."""

    at: float
    low: float
    high: float


def slope(xs: Sequence[float], ys: Sequence[float]) -> Slope:
    """The least squares' line through these; it needs three points."""
    num, mean_x, mean_y = len(xs), sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    at = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    rests = (y - mean_y - at * (x - mean_x) for x, y in zip(xs, ys, strict=True))
    error = math.sqrt(sum(r * r for r in rests) / (num - 2) / spread)
    margin = T_975[min(num - 3, len(T_975) - 1)] * error
    return Slope(at, at - margin, at + margin)


def slope_of(rests: Sequence[Rest]) -> Slope | None:
    """Of all judged processes together, so per rollout that one of them ran; None of too few."""
    rests = rests[WARM_RESTS:]
    if len({rest.num_rollouts for rest in rests}) < 3:
        return None
    thousands = [rest.num_rollouts / 1000 for rest in rests]
    return slope(thousands, [sum(rest.rss_bytes.values()) / MB for rest in rests])


class Peak(NamedTuple):
    """The moment at which a process held most."""

    at_s: float
    rss_bytes: int
    load_bytes: int
    """What it had to hold then: live set and bodies in flight."""
    idle_bytes: float

    @property
    def factor(self) -> float:
        """Of the bytes above idle to those that had to be held."""
        return (self.rss_bytes - self.idle_bytes) / max(1, self.load_bytes)


def peak_of(seen: Seen, name: str) -> Peak:
    """By the samples; the kernel's own peak has no moment."""
    series = seen.series[name]
    rss_bytes, at_s = max(zip(series.rss_bytes, series.at_s, strict=True))
    loads = [
        num_bytes for told_s, num_bytes in load_of(seen, name) if at_s - LEAD_S <= told_s <= at_s
    ]
    return Peak(at_s, rss_bytes, max(loads, default=0), seen.idle[name])


def load_of(seen: Seen, name: str) -> list[tuple[float, int]]:
    """What a process had to hold, by the agents: live set and bodies in flight, and when."""
    port = seen.ports[name]
    return [
        (told.at_s, told.held[port].live_bytes + told.held[port].body_bytes)
        for told in seen.load
        if port in told.held
    ]


def left_over(seen: Seen) -> dict[str, float]:
    """Gauges of held bytes and entries that are not what they were, by process and name."""
    left: dict[str, float] = {}
    for name, after in seen.after.items():
        before = seen.cold[name].gauges
        for gauge, value in after.gauges.items():
            if TABLES.match(gauge) and value > before.get(gauge, 0.0):
                left[f"{name} {gauge}"] = value - before.get(gauge, 0.0)
    return left


def named_at_peak(seen: Seen, name: str) -> dict[str, float]:
    """What the process said it held, nearest to its peak."""
    at_s = peak_of(seen, name).at_s
    scrapes = seen.scrapes.get(name, [])
    nearest = min(scrapes, key=lambda scrape: abs(scrape.at_s - at_s), default=None)
    return dict(nearest.held) if nearest else {}


def figures_of(seen: Seen) -> dict[str, float]:
    """By name, without the arm's."""
    peaks = [peak_of(seen, name) for name in seen.judged]
    highest = max(peaks, key=lambda peak: peak.rss_bytes)
    idle, resting = max(seen.idle.values()), max(seen.resting.values())
    load = [told for told in seen.load if told.at_s >= seen.began_s]
    turns_s = [turn_s for told in load[1:] for turn_s in told.turns_s]
    counts = Counter(load[-1].counts)
    counts.subtract(load[0].counts)
    wall_s = sum(end_s - begin_s for begin_s, end_s in seen.waves)
    lags = [lag for name in seen.judged for lag in _busy_lags(seen, name)]
    found = {
        "rollouts": float(counts["rollouts"]),
        "turns": float(counts["turns"]),
        "turns_per_s": counts["turns"] / wall_s,
        "turn_p50_ms": 1e3 * percentile(turns_s, 50),
        "turn_p99_ms": 1e3 * percentile(turns_s, 99),
        "vanished": float(counts["vanished"]),
        "crashed": float(counts["crashed"]),
        "broken": float(counts["broken"]),
        "groups": float(seen.num_groups),
        "groups_dropped": float(seen.num_dropped),
        "idle_mb": idle / MB,
        "peak_mb": highest.rss_bytes / MB,
        "peak_kernel_mb": max(seen.peaks.values()) / MB,
        "resting_mb": resting / MB,
        "resting_vs_idle": max(seen.resting[name] / seen.idle[name] for name in seen.judged),
        "load_at_peak_mb": highest.load_bytes / MB,
        "peak_factor": max(peak.factor for peak in peaks),
        "files_left": _left(seen, "num_files"),
        "threads_left": _left(seen, "num_threads"),
        "gauges": float(sum(map(_num_tables, seen.after.values()))),
        "gauges_left": float(len(left_over(seen))),
        "beats_missed": float(seen.num_missed),
        "stopped_at_8_gib": float(seen.is_stopped),
    }
    if lags:
        for percent in (50, 99):
            found[f"lag_p{percent}_ms"] = 1e3 * percentile(lags, percent)
        found["lag_worst_ms"] = 1e3 * max(lags)
    if fit := slope_of(seen.rests):
        found |= {"waves": float(len(seen.rests))}
        found |= {"slope_mb_per_1000": fit.at, "slope_upper_mb_per_1000": fit.high}
    return found


def _busy_lags(seen: Seen, name: str) -> Iterable[float]:
    """While it worked: idle loops are never late."""
    at_s, lags = seen.lags.get(name, ((), ()))
    starts = [begin_s for begin_s, _ in seen.waves]
    return [
        lag
        for at, lag in zip(at_s, lags, strict=True)
        if (wave := bisect(starts, at)) and at <= seen.waves[wave - 1][1]
    ]


def _left(seen: Seen, what: str) -> float:
    return float(
        max(getattr(seen.after[n], what) - getattr(seen.before[n], what) for n in seen.after)
    )


def _num_tables(held: object) -> int:
    return sum(1 for gauge in getattr(held, "gauges", {}) if TABLES.match(gauge))
