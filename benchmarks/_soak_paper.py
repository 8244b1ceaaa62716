"""What a soak leaves for readers: soak.json, soak.md and curves.png.

Invariant: the table and the picture show what soak.json holds, and each says with which command
line it was made. Driven by rss_soak.py.
"""

import platform
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks._soak_arms import Findings
from benchmarks._soak_figures import left_over, load_of, named_at_peak, peak_of
from benchmarks._soak_run import Seen
from benchmarks._soak_watch import MB

SEED = (("the seed, unmended", 1053, 990), ("the seed, mended", 275, 155))
"""Peak and resting MB of 45-turn browser rollouts, 4 at a time: where this began."""
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


def table(soaked: Findings) -> str:
    """Markdown: a line an arm, and what it tells beside."""
    lines = ["| arm | " + " | ".join(title for _, title in COLUMNS) + " |"]
    lines.append("|---" * (len(COLUMNS) + 1) + "|")
    for seen in soaked.arms:
        # One that was stopped had nothing to hold any more when it held most.
        void = ("load_at_peak_mb", "peak_factor") if seen.is_stopped else ()
        cells = (
            None if name in void else soaked.figures.get(f"{seen.name}.{name}")
            for name, _ in COLUMNS
        )
        told = " | ".join("" if cell is None else _number(cell) for cell in cells)
        lines.append(f"| {seen.name} | {told} |")
    if any(seen.name == "off" for seen in soaked.arms):
        lines += [f"| {who} | | {peak} | {rest} |" + " |" * 5 for who, peak, rest in SEED]
    lines += ["", *_shares(soaked), *(_copies(seen) for seen in soaked.arms)]
    lines += [f"- {note}" for note in soaked.notes]
    for seen in soaked.arms:
        lines += [f"- {seen.name}, left at rest: {n} {v:g}" for n, v in left_over(seen).items()]
    return "\n".join(lines)


def write(soaked: Findings, folder: Path, words: Sequence[str]) -> None:
    """All three, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "benchmarks/rss_soak.py", *words])
    tree = {
        "command": command,
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "figures": soaked.figures,
        "goals": [list(goal) for goal in soaked.goals],
        "missed": [goal.figure for goal in soaked.goals if not goal.is_met(soaked.figures)],
        "notes": soaked.notes,
        "arms": [_told(seen) for seen in soaked.arms],
    }
    (folder / "soak.json").write_bytes(msgspec.json.format(msgspec.json.encode(tree), indent=1))
    (folder / "soak.md").write_text(f"`{command}`\n\n{table(soaked)}\n")
    _draw(soaked, folder / "curves.png", command)


def _told(seen: Seen) -> dict[str, object]:
    """An arm for the file: lags by the second, and memory as it was read."""
    begin_s = next(iter(seen.series.values())).at_s[0]
    series = {
        name: {
            "at_s": [round(at_s - begin_s, 2) for at_s in each.at_s],
            "rss_bytes": each.rss_bytes,
            "pss_bytes": each.pss_bytes,
        }
        for name, each in seen.series.items()
    }
    return {
        "name": seen.name,
        "series": series,
        "rests": seen.rests,
        "peaks": seen.peaks,
        "before": seen.before,
        "after": seen.after,
        "load": {
            name: [(round(at_s - begin_s, 2), num) for at_s, num in load_of(seen, name)]
            for name in seen.judged
        },
        "lag_by_second": {name: _by_second(seen, name, begin_s) for name in seen.lags},
        "reasons": seen.reasons,
        "named_at_peak": {name: named_at_peak(seen, name) for name in seen.judged},
    }


def _by_second(seen: Seen, name: str, begin_s: float) -> list[tuple[float, float]]:
    """The worst lag of each second, in ms."""
    worst: dict[int, float] = {}
    for at_s, lag_s in zip(*seen.lags[name], strict=True):
        second = int((at_s - begin_s) / LAG_BIN_S)
        worst[second] = max(worst.get(second, 0.0), lag_s)
    return [(second * LAG_BIN_S, round(1e3 * lag_s, 3)) for second, lag_s in worst.items()]


def _shares(soaked: Findings) -> Iterator[str]:
    """What each measure saves, beside all others."""
    for seen in soaked.arms:
        _, is_less, measure = seen.name.partition("less ")
        if is_less:
            peak, resting = (
                soaked.figures[f"{seen.name}.{what}"] - soaked.figures[f"on.{what}"]
                for what in ("peak_mb", "resting_mb")
            )
            yield f"- {measure} alone saves {peak:.0f} MB at the peak and {resting:.0f} at rest"


def _copies(seen: Seen) -> str:
    """What stands behind the peak of an arm's heaviest process, as it says itself."""
    name = max(seen.judged, key=lambda each: peak_of(seen, each).rss_bytes)
    peak, named = peak_of(seen, name), named_at_peak(seen, name)
    parts = [f"{_what(gauge)} {held / MB:.0f}" for gauge, held in named.items() if held >= MB / 2]
    unnamed = peak.rss_bytes - peak.idle_bytes - sum(named.values())
    told = ", ".join([f"idle {peak.idle_bytes / MB:.0f}", *parts, f"the rest {unnamed / MB:.0f}"])
    return f"- {seen.name}: {peak.rss_bytes / MB:.0f} MB at the peak of {name} were {told}"


def _what(gauge: str) -> str:
    """The value of its one label."""
    return gauge.partition('"')[2].partition('"')[0]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 20 else f"{value:.2f}"


def _draw(soaked: Findings, path: Path, command: str) -> None:
    import matplotlib  # noqa: PLC0415 - not of the base install

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415 - likewise

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(11, 7), sharex=True, height_ratios=(3, 1)
    )
    for seen in soaked.arms:
        for name in seen.judged:
            series = seen.series[name]
            begin_s = series.at_s[0]
            label = name if len(soaked.arms) == 1 else f"{seen.name}: {name}"
            every = max(1, len(series.at_s) // POINTS)
            minutes = [(at_s - begin_s) / 60 for at_s in series.at_s[::every]]
            above.plot(
                minutes, [rss / MB for rss in series.rss_bytes[::every]], lw=0.8, label=label
            )
            loads = load_of(seen, name)
            shown = loads[:: max(1, len(loads) // POINTS)]
            above.plot(
                [(at_s - begin_s) / 60 for at_s, _ in shown],
                [num / MB for _, num in shown],
                lw=0.4,
                ls=":",
                label=f"{label}: had to be held",
            )
            if name in seen.lags:
                pairs = _by_second(seen, name, begin_s)
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
