"""Draw learning.png, the reward curve and the ages of trained samples, from metrics.jsonl.

It reads only the run folder, so it draws any run, finished or interrupted.
"""

from pathlib import Path
from typing import Any

import matplotlib

from rollmesh.core.files import read_rows

matplotlib.use("Agg")  # no display is needed

import matplotlib.pyplot as plt

MOVING_STEPS = 10


def draw_learning(folder: Path) -> None:
    """Write learning.png beside metrics.jsonl; do nothing if no step was done."""
    rows = read_rows(folder / "metrics.jsonl")
    steps = [row for row in rows if row["step"] >= 0]
    if not steps:
        return
    measured = [row.get("reward_untrained") for row in rows if row["step"] < 0]
    untrained = next((each for each in measured if each is not None), None)
    figure, (rewards, ages) = plt.subplots(
        2, 1, figsize=(9, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    draw_rewards(rewards, steps, untrained)
    draw_ages(ages, steps)
    figure.savefig(folder / "learning.png", dpi=120)
    plt.close(figure)


def draw_rewards(axes: Any, steps: list[dict[str, Any]], untrained: float | None) -> None:
    """Plot each step's mean reward, its moving mean, and the untrained policy's mean reward."""
    known = [row for row in steps if row["reward"] is not None]
    x, y = [row["step"] for row in known], [row["reward"] for row in known]
    axes.plot(x, y, color="#9ec1e6", linewidth=1, label="mean reward of a step")
    axes.plot(x, moving_mean(y, MOVING_STEPS), color="#1f5fa8", linewidth=2, label="mean of 10")
    if untrained is not None:
        axes.axhline(untrained, color="#888888", linestyle="--", label=f"untrained {untrained:.3g}")
    axes.set_ylabel("mean reward")
    if all(0 <= value <= 1 for value in (*y, untrained or 0.0)):
        axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def draw_ages(axes: Any, steps: list[dict[str, Any]]) -> None:
    """Plot the share of each age in each step's samples, stacked."""
    x = [row["step"] for row in steps]
    ages = sorted({age for row in steps for age in row["age_histogram"]}, key=int)
    shares = [
        [row["age_histogram"].get(age, 0) / max(1, row["num_samples"]) for row in steps]
        for age in ages
    ]
    axes.stackplot(x, shares, labels=[f"age {age}" for age in ages], alpha=0.8)
    axes.set_ylabel("share by age")
    axes.set_xlabel("train step")
    axes.set_ylim(0, 1)
    axes.legend(loc="lower right", ncols=4)


def moving_mean(values: list[float], width: int) -> list[float]:
    """Return the mean of each value and up to `width - 1` before it."""
    windows = (values[max(0, at + 1 - width) : at + 1] for at in range(len(values)))
    return [sum(window) / len(window) for window in windows]
