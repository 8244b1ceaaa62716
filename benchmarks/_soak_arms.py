"""Which arms a soak runs, and the goals that its figures are held to.

    on                  all measures; alone where nothing is compared
    less NAME           all but one (--ablate, --shape seed)
    off                 none of those
    relay, bare         our gateway, and a proxy that records nothing (--mode relay)
    mallopt, trim, ...  ways to give memory back (--allocators)

Invariant: goals are never lowered, and each is judged where its figure can be had. Driven by
rss_soak.py.
"""

import argparse
import ctypes.util
import glob
from pathlib import Path

import msgspec

from benchmarks._soak_ablations import HEAP, MEASURES
from benchmarks._soak_figures import figures_of
from benchmarks._soak_mesh import Arm
from benchmarks._soak_relay import BARE
from benchmarks._soak_run import Plan, Seen, run_arm
from benchmarks.lib.report import Goal

__all__ = ["MEASURES", "Findings", "run"]

WAVE_S = 75.0
MIN_WAVES = 4
SLOPE_WAVES, SLOPE_ROLLOUTS = 20, 3000
LAG_KEEP = 3
"""The loop's lag is judged for histories that are kept so short."""


class Findings(msgspec.Struct):
    """All arms, and what they come to."""

    arms: list[Seen]
    figures: dict[str, float]
    """By `arm.name`."""
    goals: list[Goal]
    notes: list[str]


def run(options: argparse.Namespace, scratch: Path) -> Findings:
    """One arm after the other, each with processes of its own."""
    plan = Plan(
        num_rollouts=options.rollouts or 0,
        minutes=options.minutes,
        num_waves=max(MIN_WAVES, round(60 * options.minutes / WAVE_S)),
    )
    arms, notes = _arms(options)
    seen: list[Seen] = []
    for number, arm in enumerate(arms):
        print(f"soak: {arm.name}", flush=True)
        seen.append(run_arm(arm, plan, options.mode, scratch / str(number)))
    found = {each.name: figures_of(each) for each in seen}
    figures = {f"{arm}.{name}": value for arm, own in found.items() for name, value in own.items()}
    goals = [goal for each in seen for goal in _own_goals(each, figures, options.keep)]
    goals += _compared(found, figures, options.keep)
    notes += [f"{each.name} was stopped at 8 GiB" for each in seen if each.is_stopped]
    return Findings(seen, figures, goals, notes)


def _arms(options: argparse.Namespace) -> tuple[list[Arm], list[str]]:
    names, notes = options.ablate, []
    settings = {"interception.max_blob_bytes": options.blob_mb * 2**20} if options.blob_mb else {}

    def arm(name: str, *ablated: str, environ: dict[str, str] | None = None) -> Arm:
        return Arm(
            name=name,
            shape=options.load,
            num_workers=options.workers,
            ablated=ablated,
            environ=environ or {},
            settings=settings,
        )

    arms = [arm("on")]
    if options.mode == "relay":
        arms = [arm(BARE), arm("relay")]
    arms += [arm(f"less {name}", name) for name in names]
    if len(names) > 1:
        arms.append(arm("off", *names))
    if options.allocators:
        mallopt, keeper = HEAP
        arms += [arm("neither", mallopt, keeper), arm("mallopt", keeper), arm("trim", mallopt)]
        for library in ("jemalloc", "mimalloc"):
            if path := _library(library):
                arms.append(arm(library, mallopt, keeper, environ={"LD_PRELOAD": path}))
            else:
                notes.append(f"{library}: no such library here, so no arm")
    return arms, notes


def _library(name: str) -> str:
    """Its path; '' where the system has none."""
    if not ctypes.util.find_library(name):
        return ""
    found = sorted(glob.glob(f"/usr/lib/*/lib{name}.so*") + glob.glob(f"/usr/lib/lib{name}.so*"))
    return found[0] if found else ""


def _own_goals(seen: Seen, figures: dict[str, float], keep: int) -> list[Goal]:
    """Of an arm with all measures on."""
    name = seen.name
    if name not in ("on", "relay"):
        return []
    goals = [
        Goal(f"{name}.resting_vs_idle", "<=", 1.4),
        Goal(f"{name}.peak_factor", "<=", 2.5),
        Goal(f"{name}.files_left", "<=", 0),
        Goal(f"{name}.threads_left", "<=", 0),
        Goal(f"{name}.gauges_left", "<=", 0),
        Goal(f"{name}.gauges", ">=", 1),
        Goal(f"{name}.beats_missed", "<=", 0),
        Goal(f"{name}.broken", "<=", 0),
    ]
    if keep == LAG_KEEP:
        goals.append(Goal(f"{name}.lag_p99_ms", "<=", 20.0))
    is_long = len(seen.rests) >= SLOPE_WAVES and figures[f"{name}.rollouts"] >= SLOPE_ROLLOUTS
    if is_long:
        goals.append(Goal(f"{name}.slope_upper_mb_per_1000", "<=", 1.0))
    return goals


def _compared(
    found: dict[str, dict[str, float]], figures: dict[str, float], keep: int
) -> list[Goal]:
    """Figures of two arms together, which are added, and their goals."""
    goals = []
    on, off, bare = found.get("on"), found.get("off"), found.get(BARE)
    if on and off:
        figures["off_vs_on.resting"] = off["resting_mb"] / on["resting_mb"]
        figures["off_vs_on.peak"] = off["peak_mb"] / on["peak_mb"]
        goals += [Goal("off_vs_on.resting", ">=", 6.0), Goal("off_vs_on.peak", ">=", 4.0)]
    if on and (without := found.get("less trim")):
        figures["trim_adds.lag_p99_ms"] = on["lag_p99_ms"] - without["lag_p99_ms"]
        goals.append(Goal("trim_adds.lag_p99_ms", "<=", 5.0))
    if bare and (ours := found.get("relay")):
        figures["relay_vs_bare.resting"] = ours["resting_mb"] / bare["resting_mb"]
        figures["relay_vs_bare.peak"] = ours["peak_mb"] / bare["peak_mb"]
        goals.append(Goal("relay_vs_bare.resting", "<=", 1.0))
        if not keep:
            # Agents that drop screenshots send little; what they showed must be recorded all the
            # same, and one that records nothing is no measure of that.
            goals.append(Goal("relay_vs_bare.peak", "<=", 1.5))
    return goals
