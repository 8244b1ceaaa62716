"""What the comparison of arms leaves for readers: a table in Markdown, and a picture.

Invariant: both show the figures as they were measured, and nothing else; what the last bar has is
as old or older. Driven by staleness.py.
"""

from collections.abc import Mapping
from pathlib import Path

from benchmarks._staleness_world import Outcome

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
"""What is older stands in one bar."""


def table(figures: Mapping[str, Mapping[str, float]]) -> str:
    """A row for each arm."""
    heads = [head for head, _ in COLUMNS.values()]
    rows = [["", *heads], ["---", *["---:"] * len(heads)]]
    for arm, each in figures.items():
        rows.append([arm, *[form.format(each[name]) for name, (_, form) in COLUMNS.items()]])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(
    path: Path, figures: Mapping[str, Mapping[str, float]], outcomes: Mapping[str, Outcome]
) -> None:
    """Throughput, length bias, and the ages that were trained."""
    import matplotlib as mpl  # noqa: PLC0415 - only where a picture is wanted

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


def _share(outcome: Outcome, age: int) -> float:
    """Of that age; the oldest bar has all that are older."""
    num = sum(num for of, num in outcome.ages.items() if min(of, OLDEST_BAR) == age)
    return num / sum(outcome.ages.values())
