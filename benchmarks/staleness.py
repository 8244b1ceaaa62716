"""What bounding staleness costs, and what it selects against: four policies, and the known formula.

    python -m benchmarks.staleness [--quick] [--json] [--check] [--plot FILE.png]

A discrete-event simulator: the product's own StalenessManager paces a fleet whose rollouts have
long tails (_staleness_shape.py) and a trainer that takes its time (_staleness_world.py). Figures
are of simulated seconds, and the same on any machine; docs/internals/staleness.md says what
follows. For each arm:

    tokens_per_s, vs_unbounded   trained tokens per simulated second, and against no bound at all
    max_age, mean_age            train steps, of the oldest trained token of each rollout
    dropped_, requeued_share     of the rollouts that ended
    masked_share                 of the tokens of those that trained
    length_bias                  mean trained length / mean asked length; below 1: long ones lose

Driven by `make bench`.
"""

from pathlib import Path

from benchmarks._staleness_arms import FAR, arms
from benchmarks._staleness_paper import draw, table
from benchmarks._staleness_shape import Shape
from benchmarks._staleness_world import Outcome, World
from benchmarks.lib.report import Goal, parser, report

SHAPES = {"long": Shape(), "short": Shape(rare_share=0.0, task_spread=0.4)}
"""By their tails: 2 % of the tasks are very long, or none is."""
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


def measure(shape: Shape, num_seeds: int, num_steps: int) -> dict[str, Outcome]:
    """Each arm's runs together."""
    outcomes: dict[str, Outcome] = {}
    for seed in range(num_seeds):
        for arm in arms(shape):
            outcome = outcomes.setdefault(arm.name, Outcome())
            outcome.add(World(shape, arm, seed).run(num_steps))
    return outcomes


def figures_of(outcomes: dict[str, Outcome]) -> dict[str, dict[str, float]]:
    """By arm."""
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
