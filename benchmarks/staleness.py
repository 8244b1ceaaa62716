"""Cost and bias of bounded staleness: four policies, and AReaL's formula.

    python -m benchmarks.staleness [--quick] [--json] [--check] [--plot FILE.png]

A discrete-event simulator (lib/staleness_sim.py): the product's StalenessManager paces a fleet
whose rollouts have long tails. Figures are in simulated time, the same on any machine;
docs/internals/staleness.md discusses them. For each arm:

    tokens_per_s, vs_unbounded   trained tokens per simulated second, and relative to no bound
    max_age, mean_age            train steps, of the oldest trained token of each rollout
    dropped_, requeued_share     of the rollouts that ended
    masked_share                 of the tokens of trained rollouts
    length_bias                  mean trained length / mean requested length; < 1: long ones lose
"""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.lib.report import Goal, parser, report
from benchmarks.lib.staleness_sim import FAR, FleetShape, RunFigures, StalenessSimulation, arms

COLUMNS = {
    "tokens_per_s": ("tokens / s", "{:,.0f}"),
    "vs_unbounded": ("of unbounded", "{:.0%}"),
    "max_age": ("max age", "{:.0f}"),
    "mean_age": ("mean age", "{:.2f}"),
    "dropped_share": ("dropped", "{:.1%}"),
    "requeued_share": ("requeued", "{:.1%}"),
    "masked_share": ("tokens masked", "{:.1%}"),
    "length_bias": ("trained / asked length", "{:.2f}"),
}
OLDEST_BAR = 8
"""Older ages share one bar."""


def table(figures: Mapping[str, Mapping[str, float]]) -> str:
    """A Markdown table with a row for each arm."""
    heads = [head for head, _ in COLUMNS.values()]
    rows = [["", *heads], ["---", *["---:"] * len(heads)]]
    for arm, each in figures.items():
        rows.append([arm, *[form.format(each[name]) for name, (_, form) in COLUMNS.items()]])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(
    path: Path, figures: Mapping[str, Mapping[str, float]], outcomes: Mapping[str, RunFigures]
) -> None:
    """Draw throughput, length bias, and the ages of trained rollouts."""
    import matplotlib as mpl  # noqa: PLC0415 - only for a picture

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415 - after the choice of no display

    figure, (speed, bias, ages) = plt.subplots(
        1, 3, figsize=(14, 4.5), width_ratios=(2, 2, 3), layout="constrained"
    )
    names = list(figures)
    for axes, column, title in (
        (speed, "vs_unbounded", "trained tokens / s, of unbounded"),
        (bias, "length_bias", "mean trained / mean asked length"),
    ):
        bars = axes.barh(names[::-1], [figures[each][column] for each in names[::-1]])
        axes.bar_label(bars, fmt="%.2f", padding=2)
        axes.set_title(title, fontsize=11)
        axes.margins(x=0.15)
    left = [0.0] * len(names)
    for age in range(OLDEST_BAR + 1):
        shares = [_share(outcomes[name], age) for name in names[::-1]]
        label = f"{age}" if age < OLDEST_BAR else f"{age} and older"
        ages.barh(
            names[::-1],
            shares,
            left=left,
            color=mpl.colormaps["viridis"](age / OLDEST_BAR),
            label=label,
        )
        left = [before + share for before, share in zip(left, shares, strict=True)]
    ages.set_title("share of rollouts by age in train steps", fontsize=11)
    ages.set_xlim(0, 1)
    ages.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=9, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _share(outcome: RunFigures, age: int) -> float:
    """Share of rollouts of that age; the oldest bar includes older ones."""
    num = sum(num for of, num in outcome.ages.items() if min(of, OLDEST_BAR) == age)
    return num / sum(outcome.ages.values())


SHAPES = {"long": FleetShape(), "short": FleetShape(rare_share=0.0, task_spread=0.4)}
"""By tails: 2 % of the tasks are very long, or none."""
GOALS = [
    *(
        Goal(f"{tails}.{arm.name}.max_age", "<=", arm.bound)
        for tails, shape in SHAPES.items()
        for arm in arms(shape)
        if arm.bound < FAR
    ),
    *(
        Goal(f"{tails}.wait.{figure}", relation, bound)
        for tails in SHAPES
        for figure, relation, bound in (
            ("dropped_share", "<=", 0.0),
            ("masked_share", "<=", 0.0),
            ("length_bias", ">=", 1.0),
            ("length_bias", "<=", 1.0),
        )
    ),
]


def measure(shape: FleetShape, num_seeds: int, num_steps: int) -> dict[str, RunFigures]:
    """Outcomes by arm, over all seeds."""
    outcomes: dict[str, RunFigures] = {}
    for seed in range(num_seeds):
        for arm in arms(shape):
            outcome = outcomes.setdefault(arm.name, RunFigures())
            outcome.add(StalenessSimulation(shape, arm, seed).run(num_steps))
    return outcomes


def figures_of(outcomes: dict[str, RunFigures]) -> dict[str, dict[str, float]]:
    """Figures by arm."""
    figures = {name: outcome.figures() for name, outcome in outcomes.items()}
    whole = figures["unbounded"]["tokens_per_s"]
    for each in figures.values():
        each["vs_unbounded"] = each["tokens_per_s"] / whole
    return figures


def main() -> None:
    """Simulate and report."""
    arguments = parser("staleness")
    arguments.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the long tails")
    options = arguments.parse_args()
    flat: dict[str, float] = {}
    for tails, shape in SHAPES.items():
        outcomes = measure(shape, *((2, 60) if options.quick else (5, 400)))
        figures = figures_of(outcomes)
        print(f"{tails} tails\n\n{table(figures)}\n")
        if options.plot and tails == "long":
            draw(options.plot, figures, outcomes)
        for arm, each in figures.items():
            flat |= {f"{tails}.{arm}.{name}": value for name, value in each.items()}
    report(options, flat, GOALS)


if __name__ == "__main__":
    main()
