"""What sharing a fleet is worth: four and eight pipelines under three policies, in simulated time.

Owns the published results: the traces of workload.SHAPES, seeds 0 to 19 (--quick: 0 to 2). `mixed`
has the goals, and `scarce` those of who waits how long; all else is told as it is. Where engines
are scarce there is no partition, so no `static`. Figures are of simulated seconds, the same on any
machine; comparison.py says what each means. Driven by scheduler.py; alone it prints the tables of
docs/scheduler.md:

    python -m benchmarks._scheduler_results [--quick] [--json] [--check]
"""

import msgspec

from benchmarks._report import Goal, parser, report
from rollmesh.scheduler.simulator.comparison import (
    POLICIES,
    STATIC,
    Comparison,
    Figures,
    Result,
    summary,
)
from rollmesh.scheduler.simulator.table import lines
from rollmesh.scheduler.simulator.workload import SHAPES, generate

SIZES = (4, 8)
SCARCE = "scarce"
NUM_SEEDS = 20
NUM_SEEDS_QUICK = 3
goals = [
    goal
    for size in SIZES
    for goal in (
        Goal(f"mixed.{size}.fair_vs_static", ">=", 1.5),
        Goal(f"mixed.{size}.fair_vs_gap_ratio", ">=", 1.0),
        Goal(f"mixed.{size}.fair.jain", ">=", 0.95),
        Goal(f"mixed.{size}.wait_p99_vs_gap_ratio", "<=", 0.5),
        Goal(f"scarce.{size}.fair.jain", ">=", 0.95),
        Goal(f"scarce.{size}.wait_p99_vs_gap_ratio", "<=", 0.5),
    )
]


class Cell(msgspec.Struct, frozen=True):
    """One shape and size."""

    name: str
    by_policy: dict[str, Figures]
    bound: float

    def flat(self) -> dict[str, float]:
        """Each figure by its dotted name, and what the goals compare."""
        found = {
            f"{self.name}.{policy}.{name}": value
            for policy, each in self.by_policy.items()
            for name, value in msgspec.structs.asdict(each).items()
        }
        fair, gap_ratio = self.by_policy["fair"], self.by_policy["gap-ratio"]
        compared = {
            "bound.steps_per_h_gpu": self.bound,
            "fair_vs_gap_ratio": fair.steps_per_h_gpu / gap_ratio.steps_per_h_gpu,
            "fair_vs_bound": fair.steps_per_h_gpu / self.bound,
            "wait_p99_vs_gap_ratio": fair.wait_p99_s / gap_ratio.wait_p99_s,
        }
        if STATIC in self.by_policy:
            static = self.by_policy[STATIC]
            compared["fair_vs_static"] = fair.steps_per_h_gpu / static.steps_per_h_gpu
        return found | {f"{self.name}.{name}": value for name, value in compared.items()}


def cell(shape: str, size: int, num_seeds: int) -> Cell:
    """Simulate all policies on its traces."""
    policies = [each for each in POLICIES if shape != SCARCE or each != STATIC]
    results: dict[str, list[Result]] = {policy: [] for policy in policies}
    bounds = []
    for seed in range(num_seeds):
        comparison = Comparison(generate(SHAPES[shape], size, seed))
        bounds.append(comparison.bound())
        for policy in policies:
            results[policy].append(comparison.result(policy, comparison.run(policy)))
    by_policy = {policy: summary(each) for policy, each in results.items()}
    return Cell(f"{shape}.{size}", by_policy, sum(bounds) / num_seeds)


def cells(quick: bool) -> list[Cell]:
    """All of them."""
    num_seeds = NUM_SEEDS_QUICK if quick else NUM_SEEDS
    return [cell(shape, size, num_seeds) for shape in SHAPES for size in SIZES]


def figures(quick: bool) -> dict[str, float]:
    """All figures, of which `goals` names some."""
    return {name: value for each in cells(quick) for name, value in each.flat().items()}


def main() -> None:
    """Simulate, and print the tables."""
    options = parser("_scheduler_results").parse_args()
    flat: dict[str, float] = {}
    for each in cells(options.quick):
        print(f"{each.name}\n", *lines(each.by_policy, each.bound), "", sep="\n")
        flat |= each.flat()
    report(options, flat, goals)


if __name__ == "__main__":
    main()
