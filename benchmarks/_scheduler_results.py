"""What sharing a fleet is worth: four and eight pipelines under three policies, in simulated time.

Owns the published results: the traces of workload.SHAPES, seeds 0 to 19 (--quick: 0 to 2). `mixed`
has the goals, and `scarce` those of who waits how long; all else is told as it is. Where engines
are scarce there is no partition, so no `static`. Figures are of simulated seconds, the same on any
machine; comparison.py says what each means. Traces are simulated side by side, `--jobs` of them.
Driven by scheduler.py; alone it prints the tables of docs/internals/scheduling.md, in 20 minutes
of one core:

    python -m benchmarks._scheduler_results [--quick] [--json] [--check] [--only CELL] [--jobs N]
"""

import multiprocessing
import os
from collections.abc import Iterator, Sequence

import msgspec

from benchmarks.lib.report import Goal, parser, report
from rollmesh.scheduler.planning.policies import BASELINE_POLICY
from rollmesh.scheduler.simulator.comparison import (
    Comparison,
    SummaryFigures,
    TraceResult,
    compared_policies,
    summarise,
    table_lines,
)
from rollmesh.scheduler.simulator.trace import SHAPES, generate_trace

SIZES = (4, 8)
SCARCE = "scarce"
NUM_SEEDS = 20
NUM_SEEDS_QUICK = 3
CELLS = {f"{shape}.{size}": (shape, size) for shape in SHAPES for size in SIZES}
goals = [
    goal
    for size in SIZES
    for goal in (
        Goal(f"mixed.{size}.fair_vs_static", ">=", 1.5),
        Goal(f"mixed.{size}.fair_vs_gap_ratio", ">=", 1.0),
        Goal(f"mixed.{size}.fair.jain", ">=", 0.95),
        Goal(f"mixed.{size}.wait_p99_vs_gap_ratio", "<=", 0.5),
        Goal(f"mixed.{size}.wait_next_p99_vs_gap_ratio", "<=", 0.5),
        Goal(f"scarce.{size}.fair.jain", ">=", 0.95),
        Goal(f"scarce.{size}.wait_p99_vs_gap_ratio", "<=", 0.5),
    )
]


class Cell(msgspec.Struct, frozen=True):
    """One shape and size."""

    name: str
    by_policy: dict[str, SummaryFigures]
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
            "wait_next_p99_vs_gap_ratio": fair.wait_next_p99_s / gap_ratio.wait_next_p99_s,
        }
        if BASELINE_POLICY in self.by_policy:
            static = self.by_policy[BASELINE_POLICY]
            compared["fair_vs_static"] = fair.steps_per_h_gpu / static.steps_per_h_gpu
        return found | {f"{self.name}.{name}": value for name, value in compared.items()}


class Simulated(msgspec.Struct, frozen=True):
    """One trace."""

    results: dict[str, TraceResult]
    """By policy."""
    bound: float


def simulate(shape: str, size: int, seed: int) -> Simulated:
    """Under all policies."""
    policies = [each for each in compared_policies() if shape != SCARCE or each != BASELINE_POLICY]
    comparison = Comparison(generate_trace(SHAPES[shape], size, seed))
    results = {policy: comparison.result(policy, comparison.run(policy)) for policy in policies}
    return Simulated(results, comparison.bound())


def cells(
    quick: bool, names: Sequence[str] = tuple(CELLS), num_jobs: int | None = None
) -> Iterator[Cell]:
    """Each of these as soon as all its traces are simulated."""
    num_seeds = NUM_SEEDS_QUICK if quick else NUM_SEEDS
    with multiprocessing.get_context("spawn").Pool(num_jobs or os.cpu_count()) as pool:
        begun = {
            name: pool.starmap_async(
                simulate, [(*CELLS[name], seed) for seed in range(num_seeds)], chunksize=1
            )
            for name in names
        }
        for name, traces in begun.items():
            done = traces.get()
            by_policy = {
                policy: summarise([each.results[policy] for each in done])
                for policy in done[0].results
            }
            yield Cell(name, by_policy, sum(each.bound for each in done) / num_seeds)


def figures(quick: bool) -> dict[str, float]:
    """All figures, of which `goals` names some."""
    return {name: value for each in cells(quick) for name, value in each.flat().items()}


def main() -> None:
    """Simulate, and print the tables."""
    arguments = parser("_scheduler_results", CELLS)
    arguments.add_argument("--jobs", type=int, metavar="N", help="default: as many as CPUs")
    options = arguments.parse_args()
    flat: dict[str, float] = {}
    for each in cells(options.quick, options.only or tuple(CELLS), options.jobs):
        print(f"{each.name}\n", *table_lines(each.by_policy, each.bound), "", sep="\n", flush=True)
        flat |= each.flat()
    report(options, flat, [goal for goal in goals if goal.figure in flat])


if __name__ == "__main__":
    main()
