"""What serving costs and carries: router, workers, client, sink, beside a floor and a peer.

    python -m benchmarks.serving [--only CASE,...] [--quick] [--json] [--check]

Every process may use every core (two, for the goals as they stand), and the client with its sink is
in this one. `<case>.cpu_us.<role>` is a role's CPU per group, all its processes together;
`vs_floor` and `vs_verifiers` are ratios of groups/s. The cases are in _serving_cases.py and
_serving_router.py, what runs in the workers in _serving_worker.py and _serving_envs.py. Invariant:
no goal is easier or absent under --quick; `--only` judges the goals of the cases that it names.
Driven by `make bench`.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from benchmarks import _serving_cases
from benchmarks._serving_cases import Bench
from benchmarks._serving_router import router
from benchmarks.lib.report import Goal, parser, report

CASES: dict[str, Callable[[Bench], None]] = {
    "router": router,
    "echo": _serving_cases.echo,
    "sleep": _serving_cases.sleep,
    "burn": _serving_cases.burn,
    "burst": _serving_cases.burst,
    "turns": _serving_cases.turns,
    "streamed": _serving_cases.streamed,
}

GOALS = [
    Goal("echo.vs_floor", ">=", 0.15),
    Goal("echo.cpu_us.router", "<=", 60.0),
    Goal("echo.alone.p50_vs_floor", "<=", 3.0),
    Goal("sleep.of_ideal", ">=", 0.95),
    Goal("burn.of_cores", ">=", 0.85),
    Goal("burst.wall_s", "<=", 2.5),
    Goal("turns.100_vs_20", "<=", 6.0),
    Goal("streamed.100_vs_20", "<=", 6.0),
]
PEER_GOAL = Goal("echo.vs_verifiers", ">=", 3.0)


def judged(cases: Sequence[str], figures: dict[str, float]) -> list[Goal]:
    """The goals of these cases; that beside the peer only where `make bench-peers` was run."""
    goals = [*GOALS, PEER_GOAL] if PEER_GOAL.figure in figures else GOALS
    return [goal for goal in goals if goal.figure.partition(".")[0] in cases]


def main() -> None:
    """Measure and report."""
    options = parser("serving", CASES).parse_args()
    cases = options.only or [*CASES]
    with ExitStack() as stack:
        bench = Bench(options, stack)
        for name in cases:
            CASES[name](bench)
        report(options, bench.figures, judged(cases, bench.figures))


if __name__ == "__main__":
    main()
