"""The scheduler: how long the planner takes for one plan, and what sharing a fleet is worth.

    python -m benchmarks.scheduler [--quick] [--json] [--check] [--only plans,results]

plans: plan() with the policy `fair` on the fleets of _scheduler_fleet.py, proof included, in CPU
time of this process, each case beside a loop of plain Python that is timed right before and after.
`cold` is the first plan of a fleet where nobody is awake and half the pipelines have demand; the
median of several fleets. `cycle` is one of a fleet that runs: each second a demand begins or ends,
and another pipeline makes progress; then all of the plan is made, with the credits of everybody
and the moves of those whose slice has come. It goes on from what the state kept of the plan before:
of where pipelines may generate, and of their shares. The median; a cycle in which much moves at
once takes twice as long. A goal is of `scaled_ms`: the time that it would have taken where the loop
takes LOOP_MS. results: _scheduler_results.py.

Driven by `make bench`.
"""

import time
from collections.abc import Callable
from statistics import median

from benchmarks import _scheduler_results as results
from benchmarks._scheduler_fleet import PlannedFleet
from benchmarks.lib.report import Goal, parser, report
from rollmesh.scheduler.planning.plan import GpuPlan
from rollmesh.scheduler.planning.planner import plan
from rollmesh.scheduler.planning.policies import make_policy

SIZES = {"64x8": (64, 8, 1.0), "512x32": (512, 32, 10.0), "10000x1000": (10_000, 1_000, 300.0)}
"""GPUs, pipelines, and the goal of a cold plan in ms."""
CYCLE_MS = 20.0
LOOP_MS = 3.0
"""The loop's CPU time on the machine of the published figures, at its quietest: 2.8 to 3.0."""
PLANS = [
    *(Goal(f"cold.{size}.scaled_ms", "<=", goal) for size, (_, _, goal) in SIZES.items()),
    Goal("cycle.10000x1000.scaled_ms", "<=", CYCLE_MS),
]


def loop() -> None:
    """What the planner does all day: look up, compare, add, put in."""
    found: dict[int, tuple[int, str]] = {}
    for number in range(25_000):
        key = number * 7919 % 4096
        entry = found.get(key)
        if entry is None or entry[0] < number:
            found[key] = (number + len(found), "p")


def timed_ms(call: Callable[[], object]) -> float:
    """CPU time of one call."""
    begun_ns = time.process_time_ns()
    call()
    return (time.process_time_ns() - begun_ns) / 1e6


class Clock:
    """Times of one case, and of the loop around it."""

    def __init__(self) -> None:
        self._times_ms: list[float] = []
        self._loops_ms = [timed_ms(loop) for _ in range(3)]

    def time(self, call: Callable[[], GpuPlan]) -> GpuPlan:
        """One more."""
        made: list[GpuPlan] = []
        self._times_ms.append(timed_ms(lambda: made.append(call())))
        return made[0]

    def figures(self, case: str) -> dict[str, float]:
        """Its median, as it was and scaled, and the worst."""
        self._loops_ms += [timed_ms(loop) for _ in range(3)]
        slowness = median(self._loops_ms) / LOOP_MS
        time_ms = median(self._times_ms)
        return {
            f"{case}.ms": time_ms,
            f"{case}.worst_ms": max(self._times_ms),
            f"{case}.loop_ms": median(self._loops_ms),
            f"{case}.scaled_ms": time_ms / slowness,
        }


def cold(size: str, num_plans: int) -> dict[str, float]:
    """The first plans of several fleets."""
    num_gpus, num_pipelines, _ = SIZES[size]
    fleets = [PlannedFleet(num_gpus, num_pipelines, seed) for seed in range(num_plans)]
    policy, clock = make_policy("fair"), Clock()
    for fleet in fleets:
        clock.time(lambda fleet=fleet: plan(fleet.state, policy))  # type: ignore[misc]  # bound now
    return clock.figures(f"cold.{size}")


def cycle(size: str, num_plans: int) -> dict[str, float]:
    """Plans of a fleet that runs."""
    num_gpus, num_pipelines, _ = SIZES[size]
    fleet, policy = PlannedFleet(num_gpus, num_pipelines), make_policy("fair")
    for _ in range(3):
        fleet.carry_out(plan(fleet.state, policy))
        fleet.change()
    clock = Clock()
    for _ in range(num_plans):
        fleet.carry_out(clock.time(lambda: plan(fleet.state, policy)))
        fleet.change()
    return clock.figures(f"cycle.{size}")


def main() -> None:
    """Measure and report."""
    options = parser("scheduler", ("plans", "results")).parse_args()
    cases = options.only or ["plans", "results"]
    figures: dict[str, float] = {}
    goals: list[Goal] = []
    if "plans" in cases:
        num_plans = 3 if options.quick else 9
        for size in SIZES:
            figures |= cold(size, num_plans if size == "10000x1000" else 10 * num_plans)
        figures |= cycle("10000x1000", 10 * num_plans)
        goals += PLANS
    if "results" in cases:
        figures |= results.figures(options.quick)
        goals += results.goals
    report(options, figures, goals)


if __name__ == "__main__":
    main()
