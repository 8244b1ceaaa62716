"""A soak: browser-like agents against real processes, and their memory over time.

    python benchmarks/rss_soak.py --minutes 5 --workers 2 --out runs/soak
    python benchmarks/rss_soak.py --minutes 30 --workers 2 --keep 3 --out runs/soak
    python benchmarks/rss_soak.py --shape seed --out runs/seed       each measure's own share
    python benchmarks/rss_soak.py --mode relay --out runs/relay      beside a bare proxy

Agents of 45 turns show a new 0.5 MB screenshot at each, 4 at a time for each worker, in groups of
4; some disconnect during a stream and ask again, some crash. `--out` gets soak.json, soak.md and
curves.png. The arms:

    on                  all measures; the only arm if nothing is compared
    less NAME           all but one (--ablate, --shape seed)
    off                 none of those
    relay, bare         our gateway, and a proxy that records nothing (--mode relay)
    mallopt, trim, ...  ways to return memory to the system (--allocators)

- Memory is read from outside the measured processes; the bytes that they had to hold are counted by
  the agents, which run in another process.
- Goals are the same for any duration, but a slope is judged only over 20 waves and 3,000 rollouts.
"""

import argparse
import ctypes.util
import glob
import importlib.util
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.lib.process_watch import MB
from benchmarks.lib.report import Goal, parser, report
from benchmarks.lib.soak_agents import RolloutShape
from benchmarks.lib.soak_mesh import BARE, SoakArm
from benchmarks.lib.soak_run import (
    ArmResult,
    SoakPlan,
    figures_of,
    left_over,
    load_of,
    named_at_peak,
    peak_of,
    run_arm,
)
from benchmarks.lib.soak_worker import HEAP, MEASURES

__all__ = ["MEASURES", "Findings", "run"]

WAVE_S = 75.0
MIN_WAVES = 4
SLOPE_WAVES, SLOPE_ROLLOUTS = 20, 3000
LAG_KEEP = 3
"""The loop's lag is judged only for histories of at most this many screenshots."""


class Findings(msgspec.Struct):
    """All arms with their figures and goals."""

    arms: list[ArmResult]
    figures: dict[str, float]
    """Figures by `arm.name`."""
    goals: list[Goal]
    notes: list[str]


def run(options: argparse.Namespace, scratch: Path) -> Findings:
    """Run one arm after the other, each with its own processes."""
    plan = SoakPlan(
        num_rollouts=options.rollouts or 0,
        minutes=options.minutes,
        num_waves=max(MIN_WAVES, round(60 * options.minutes / WAVE_S)),
    )
    arms, notes = _arms(options)
    results: list[ArmResult] = []
    for number, arm in enumerate(arms):
        print(f"soak: {arm.name}", flush=True)
        results.append(run_arm(arm, plan, options.mode, scratch / str(number)))
    found = {each.name: figures_of(each) for each in results}
    figures = {f"{arm}.{name}": value for arm, own in found.items() for name, value in own.items()}
    goals = [goal for each in results for goal in _own_goals(each, figures, options.keep)]
    goals += _compared(found, figures, options.keep)
    notes += [f"{each.name} was stopped at 8 GiB" for each in results if each.is_stopped]
    return Findings(results, figures, goals, notes)


def _arms(options: argparse.Namespace) -> tuple[list[SoakArm], list[str]]:
    names, notes = options.ablate, []
    settings = {"interception.max_blob_bytes": options.blob_mb * 2**20} if options.blob_mb else {}

    def arm(name: str, *ablated: str, environ: dict[str, str] | None = None) -> SoakArm:
        return SoakArm(
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
    """Return the library's path; '' if the system has none."""
    if not ctypes.util.find_library(name):
        return ""
    found = sorted(glob.glob(f"/usr/lib/*/lib{name}.so*") + glob.glob(f"/usr/lib/lib{name}.so*"))
    return found[0] if found else ""


def _own_goals(result: ArmResult, figures: dict[str, float], keep: int) -> list[Goal]:
    """Return the goals of an arm with all measures enabled."""
    name = result.name
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
    is_long = len(result.rests) >= SLOPE_WAVES and figures[f"{name}.rollouts"] >= SLOPE_ROLLOUTS
    if is_long:
        goals.append(Goal(f"{name}.slope_upper_mb_per_1000", "<=", 1.0))
    return goals


def _compared(
    found: dict[str, dict[str, float]], figures: dict[str, float], keep: int
) -> list[Goal]:
    """Add figures that compare two arms; return their goals."""
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
            # Agents that drop screenshots send little, but all screenshots must be recorded; a
            # proxy that records nothing is then no baseline.
            goals.append(Goal("relay_vs_bare.peak", "<=", 1.5))
    return goals


SEED = (("first version", 1053, 990), ("first version, fixed", 275, 155))
"""Peak and resting MB of 45-turn browser rollouts, 4 at a time, in the first version."""
COLUMNS = (
    ("idle_mb", "idle, MB"),
    ("peak_mb", "peak, MB"),
    ("resting_mb", "resting, MB"),
    ("load_at_peak_mb", "live set + bodies, MB"),
    ("peak_factor", "(peak - idle) / these"),
    ("lag_p99_ms", "lag p99, ms"),
    ("turns_per_s", "turns/s"),
    ("rollouts", "rollouts"),
)
LAG_BIN_S = 1.0
POINTS = 2000


def table(findings: Findings) -> str:
    """Return a Markdown table with a line per arm, and notes below it."""
    lines = ["| arm | " + " | ".join(title for _, title in COLUMNS) + " |"]
    lines.append("|---" * (len(COLUMNS) + 1) + "|")
    for result in findings.arms:
        # A stopped arm held nothing any more at its peak.
        void = ("load_at_peak_mb", "peak_factor") if result.is_stopped else ()
        cells = (
            None if name in void else findings.figures.get(f"{result.name}.{name}")
            for name, _ in COLUMNS
        )
        row = " | ".join("" if cell is None else _number(cell) for cell in cells)
        lines.append(f"| {result.name} | {row} |")
    if any(result.name == "off" for result in findings.arms):
        lines += [f"| {label} | | {peak} | {rest} |" + " |" * 5 for label, peak, rest in SEED]
    lines += ["", *_shares(findings), *(_copies(result) for result in findings.arms)]
    lines += [f"- {note}" for note in findings.notes]
    for result in findings.arms:
        lines += [f"- {result.name}, left at rest: {n} {v:g}" for n, v in left_over(result).items()]
    return "\n".join(lines)


def write(findings: Findings, folder: Path, words: Sequence[str]) -> None:
    """Write all three files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "benchmarks/rss_soak.py", *words])
    tree = {
        "command": command,
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "figures": findings.figures,
        "goals": [list(goal) for goal in findings.goals],
        "missed": [goal.figure for goal in findings.goals if not goal.is_met(findings.figures)],
        "notes": findings.notes,
        "arms": [_arm_document(result) for result in findings.arms],
    }
    (folder / "soak.json").write_bytes(msgspec.json.format(msgspec.json.encode(tree), indent=1))
    (folder / "soak.md").write_text(f"`{command}`\n\n{table(findings)}\n")
    _draw(findings, folder / "curves.png", command)


def _arm_document(result: ArmResult) -> dict[str, object]:
    """Return an arm for the file: lags by second, and all memory samples."""
    begin_s = next(iter(result.series.values())).at_s[0]
    series = {
        name: {
            "at_s": [round(at_s - begin_s, 2) for at_s in each.at_s],
            "rss_bytes": each.rss_bytes,
            "pss_bytes": each.pss_bytes,
        }
        for name, each in result.series.items()
    }
    return {
        "name": result.name,
        "series": series,
        "rests": result.rests,
        "peaks": result.peaks,
        "before": result.before,
        "after": result.after,
        "load": {
            name: [(round(at_s - begin_s, 2), num) for at_s, num in load_of(result, name)]
            for name in result.judged
        },
        "lag_by_second": {name: _by_second(result, name, begin_s) for name in result.lags},
        "reasons": result.reasons,
        "named_at_peak": {name: named_at_peak(result, name) for name in result.judged},
    }


def _by_second(result: ArmResult, name: str, begin_s: float) -> list[tuple[float, float]]:
    """Return the worst lag of each second, in ms."""
    worst: dict[int, float] = {}
    for at_s, lag_s in zip(*result.lags[name], strict=True):
        second = int((at_s - begin_s) / LAG_BIN_S)
        worst[second] = max(worst.get(second, 0.0), lag_s)
    return [(second * LAG_BIN_S, round(1e3 * lag_s, 3)) for second, lag_s in worst.items()]


def _shares(findings: Findings) -> Iterator[str]:
    """Return what each measure saves, beside all others."""
    for result in findings.arms:
        _, is_less, measure = result.name.partition("less ")
        if is_less:
            peak, resting = (
                findings.figures[f"{result.name}.{what}"] - findings.figures[f"on.{what}"]
                for what in ("peak_mb", "resting_mb")
            )
            yield f"- {measure} alone saves {peak:.0f} MB at the peak and {resting:.0f} at rest"


def _copies(result: ArmResult) -> str:
    """Return the gauges behind the peak of an arm's heaviest process."""
    name = max(result.judged, key=lambda each: peak_of(result, each).rss_bytes)
    peak, named = peak_of(result, name), named_at_peak(result, name)
    parts = [f"{_what(gauge)} {held / MB:.0f}" for gauge, held in named.items() if held >= MB / 2]
    unnamed = peak.rss_bytes - peak.idle_bytes - sum(named.values())
    shares = ", ".join([f"idle {peak.idle_bytes / MB:.0f}", *parts, f"the rest {unnamed / MB:.0f}"])
    return f"- {result.name}: {peak.rss_bytes / MB:.0f} MB at the peak of {name} were {shares}"


def _what(gauge: str) -> str:
    """Return the value of a gauge's only label."""
    return gauge.partition('"')[2].partition('"')[0]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 20 else f"{value:.2f}"


def _draw(findings: Findings, path: Path, command: str) -> None:
    import matplotlib  # noqa: PLC0415 - not of the base install

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415 - likewise

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(11, 7), sharex=True, height_ratios=(3, 1)
    )
    for result in findings.arms:
        for name in result.judged:
            series = result.series[name]
            begin_s = series.at_s[0]
            label = name if len(findings.arms) == 1 else f"{result.name}: {name}"
            every = max(1, len(series.at_s) // POINTS)
            minutes = [(at_s - begin_s) / 60 for at_s in series.at_s[::every]]
            above.plot(
                minutes, [rss / MB for rss in series.rss_bytes[::every]], lw=0.8, label=label
            )
            loads = load_of(result, name)
            shown = loads[:: max(1, len(loads) // POINTS)]
            above.plot(
                [(at_s - begin_s) / 60 for at_s, _ in shown],
                [num / MB for _, num in shown],
                lw=0.4,
                ls=":",
                label=f"{label}: had to be held",
            )
            if name in result.lags:
                pairs = _by_second(result, name, begin_s)
                below.plot([s / 60 for s, _ in pairs], [ms for _, ms in pairs], lw=0.5)
    above.set_ylabel("resident memory, MB")
    above.set_ylim(bottom=0)
    above.legend(loc="upper right", fontsize=8)
    above.set_title(command, fontsize=8)
    below.set_ylabel("worst loop lag\nof each second, ms")
    below.set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if not __package__:
    # As a script: its imports, and the processes that it starts, need the repository's root.
    sys.path.insert(0, str(Path(__file__).parents[1]))


DEFAULT_MINUTES, QUICK_MINUTES = 5.0, 1.0
SEED_ROLLOUTS = 24


def main() -> None:
    """Run the soak, write the files, report."""
    options = _options()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    with tempfile.TemporaryDirectory(prefix="rollmesh-soak-") as scratch:
        findings = run(options, Path(scratch))
    if options.out is not None:
        write(findings, options.out, sys.argv[1:])
    print(table(findings))
    report(options, findings.figures, findings.goals)


def _options() -> argparse.Namespace:
    arguments = parser("rss_soak")
    add = arguments.add_argument
    add("--minutes", type=float, help=f"minutes of each arm (default: {DEFAULT_MINUTES:g})")
    add("--rollouts", type=int, help="rollouts of each arm, in one wave, instead of minutes")
    add(
        "--workers",
        type=int,
        default=1,
        help="workers; in relay mode 4 agents for each (default: 1)",
    )
    add(
        "--keep",
        type=int,
        default=0,
        help="latest screenshots that stay in a history (default: 0, all)",
    )
    add(
        "--blob-mb",
        type=int,
        default=0,
        help="interception.max_blob_bytes in MB (default: as configured)",
    )
    add("--mode", choices=("tokens", "relay"), default="tokens")
    add("--shape", choices=("seed",), help="24 rollouts, one worker, with and without all measures")
    add("--ablate", default="", help=f"measures to remove, one arm for each: {','.join(MEASURES)}")
    add(
        "--allocators",
        action="store_true",
        help="an arm for each way to return memory to the system",
    )
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="folder for soak.json, soak.md, curves.png")
    options = arguments.parse_args()
    names = [name for name in options.ablate.split(",") if name]
    if unknown := set(names) - set(MEASURES):
        arguments.error(f"--ablate: no {', '.join(unknown)}; {', '.join(MEASURES)}")
    if options.out is not None and importlib.util.find_spec("matplotlib") is None:
        arguments.error("--out draws with matplotlib: pip install '.[train]'")
    if options.shape == "seed":
        names, options.workers = names or list(MEASURES), 1
    options.ablate = names
    compares = names or options.allocators
    if options.minutes is None and options.rollouts is None and compares:
        options.rollouts = SEED_ROLLOUTS
    if options.minutes is None:
        options.minutes = QUICK_MINUTES if options.quick else DEFAULT_MINUTES
    options.load = RolloutShape(keep=options.keep, seed=options.seed)
    return options


if __name__ == "__main__":
    main()
