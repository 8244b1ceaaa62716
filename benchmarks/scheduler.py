"""The scheduler: time of one plan, and the value of sharing a fleet.

    python -m benchmarks.scheduler [--quick] [--json] [--check] [--only CASE,...] [--jobs N]

- plans: plan() with the policy `fair`, proof included, in CPU time of this process, beside a loop
  of plain Python timed right before and after. Goals are of `scaled_ms`: the time if the loop took
  LOOP_MS.
- `cold` is the first plan of a fleet with nothing awake and demand in half the pipelines; median of
  several fleets.
- `cycle` is a plan of a running fleet: each second a demand begins or ends and another pipeline
  progresses. It continues from what the state keeps between plans. Median; a cycle with many moves
  takes twice as long.
- results: the traces of SHAPES, seeds 0 to 19 (--quick: 0 to 2), under all policies, in simulated
  seconds, the same on any machine; comparison.py defines the figures. `mixed` has the goals, and
  `scarce` those about waits and fairness; where engines are scarce there is no partition, so no
  `static`. --only CELL simulates one cell, such as `mixed.4`. All take 20 minutes of one core.
"""

import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import msgspec

from benchmarks.lib.report import Goal, parser, report
from rollmesh.scheduler.planning.plan import Expand, GpuPlan, Shrink, apply
from rollmesh.scheduler.planning.planner import plan
from rollmesh.scheduler.planning.policies import BASELINE_POLICY, make_policy
from rollmesh.scheduler.planning.state import (
    Demand,
    FleetState,
    GpuNode,
    PipelinePhase,
    PipelineState,
    StreamProgress,
)
from rollmesh.scheduler.simulator.comparison import (
    Comparison,
    SummaryFigures,
    TraceResult,
    compared_policies,
    summarise,
    table_lines,
)
from rollmesh.scheduler.simulator.trace import SHAPES, generate_trace
from rollmesh.wire.scheduling import PipelineSpec, WorkerPhase

NODE_GPUS = 8
MAPPED = 8
"""Mean number of pipelines that may use a GPU."""
REST = {WorkerPhase.WAKING: WorkerPhase.AWAKE, WorkerPhase.SLEEPING: WorkerPhase.ASLEEP}


class PlannedFleet:
    """A fleet to plan for, a function of its sizes and seed.

    - Maps of all pipelines together name each GPU eight times. Half of the pipelines are on
      adjacent nodes, half on random ones; each trains on the first GPUs of its map.
    - A quarter of them each has workers of 1, 1, 2 and 4 GPUs. Half of them have demand at first.
    """

    def __init__(self, num_gpus: int, num_pipelines: int, seed: int = 0) -> None:
        self.state = FleetState()
        self._chance = random.Random(seed)
        num_nodes = num_gpus // NODE_GPUS
        for number in range(num_nodes):
            gpus = tuple(range(number * NODE_GPUS, number * NODE_GPUS + NODE_GPUS))
            self.state.add_node(GpuNode(name=f"n{number}", gpus=gpus))
        num_each = min(num_nodes, max(1, MAPPED * num_nodes // num_pipelines))
        for number in range(num_pipelines):
            self._add(number, self._nodes(number, num_nodes, num_each))
        for number, pipeline in enumerate(self.state.pipelines.values()):
            if number % 2:
                self._open(pipeline)

    def carry_out(self, plan: GpuPlan) -> None:
        """Apply the plan and complete all moves at once."""
        state = self.state
        for op in plan.ops:
            apply(state, op)
        for pipeline_id, credit in plan.credits.items():
            state.pipelines[pipeline_id].credit_gpu_s = credit
        state.credited_s, state.fair_shares = state.now_s, plan.fair_shares
        moved = {op.pipeline_id for op in plan.ops if isinstance(op, Shrink | Expand)}
        for pipeline_id in moved:
            for worker in state.pipelines[pipeline_id].workers:
                phase = REST.get(worker.phase, worker.phase)
                state.move_worker(pipeline_id, worker.rank, phase)

    def change(self) -> None:
        """Advance a second: one demand begins or ends, and another progresses."""
        self.state.now_s += 1.0
        one, other = self._chance.sample(list(self.state.pipelines.values()), 2)
        if one.demand is None:
            self._open(one)
        else:
            one.demand, one.progress = None, {}
        self.state.update_waiting(one)
        if other.demand is not None:
            completed = self._chance.randrange(other.demand.estimate)
            target = other.demand.estimate
            other.progress = {"train": StreamProgress(batch=0, target=target, completed=completed)}

    def _nodes(self, number: int, num_nodes: int, num_each: int) -> list[int]:
        if number % 4 < 2:
            first = self._chance.randrange(num_nodes - num_each + 1)
            return list(range(first, first + num_each))
        return sorted(self._chance.sample(range(num_nodes), num_each))

    def _add(self, number: int, nodes: list[int]) -> None:
        gpus = tuple(node * NODE_GPUS + gpu for node in nodes for gpu in range(NODE_GPUS))
        spec = PipelineSpec(
            pipeline_id=f"p{number}",
            clusters={"actor_train": gpus[:4]},
            generation=gpus,
            tp=(1, 1, 2, 4)[number // 4 % 4],
            weight=self._chance.choice((1.0, 1.0, 2.0)),
            rollouts_per_worker=4,
        )
        self.state.add_pipeline(spec).phase = PipelinePhase.ADMITTED

    def _open(self, pipeline: PipelineState) -> None:
        pipeline.demand = Demand(
            key=f"{pipeline.pipeline_id}-demand",
            estimate=self._chance.choice((64, 128, 256)),
            opened_s=self.state.now_s,
        )
        self.state.update_waiting(pipeline)


FLEETS = {"64x8": (64, 8, 1.0), "512x32": (512, 32, 10.0), "10000x1000": (10_000, 1_000, 300.0)}
"""GPUs, pipelines, and the goal of a cold plan in ms."""
CYCLE_MS = 20.0
LOOP_MS = 3.0
"""CPU time of the loop on the machine of the published figures when idle: 2.8 to 3.0."""
PLANS = [
    *(Goal(f"cold.{size}.scaled_ms", "<=", goal) for size, (_, _, goal) in FLEETS.items()),
    Goal("cycle.10000x1000.scaled_ms", "<=", CYCLE_MS),
]


def loop() -> None:
    """Plain Python like the planner's: look up, compare, add, insert."""
    found: dict[int, tuple[int, str]] = {}
    for number in range(25_000):
        key = number * 7919 % 4096
        entry = found.get(key)
        if entry is None or entry[0] < number:
            found[key] = (number + len(found), "p")


def timed_ms(call: Callable[[], object]) -> float:
    """CPU time of one call."""
    results_ns = time.process_time_ns()
    call()
    return (time.process_time_ns() - results_ns) / 1e6


class CaseTimer:
    """Times of one case, and of the reference loop around it."""

    def __init__(self) -> None:
        self._times_ms: list[float] = []
        self._loops_ms = [timed_ms(loop) for _ in range(3)]

    def time(self, call: Callable[[], GpuPlan]) -> GpuPlan:
        """Time one call and return its plan."""
        made: list[GpuPlan] = []
        self._times_ms.append(timed_ms(lambda: made.append(call())))
        return made[0]

    def figures(self, case: str) -> dict[str, float]:
        """Median, raw and scaled, and the worst."""
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
    """Time the first plans of several fleets."""
    num_gpus, num_pipelines, _ = FLEETS[size]
    fleets = [PlannedFleet(num_gpus, num_pipelines, seed) for seed in range(num_plans)]
    policy, clock = make_policy("fair"), CaseTimer()
    for fleet in fleets:
        clock.time(lambda fleet=fleet: plan(fleet.state, policy))  # type: ignore[misc]  # bound now
    return clock.figures(f"cold.{size}")


def cycle(size: str, num_plans: int) -> dict[str, float]:
    """Time plans of a running fleet."""
    num_gpus, num_pipelines, _ = FLEETS[size]
    fleet, policy = PlannedFleet(num_gpus, num_pipelines), make_policy("fair")
    for _ in range(3):
        fleet.carry_out(plan(fleet.state, policy))
        fleet.change()
    clock = CaseTimer()
    for _ in range(num_plans):
        fleet.carry_out(clock.time(lambda: plan(fleet.state, policy)))
        fleet.change()
    return clock.figures(f"cycle.{size}")


SIZES = (4, 8)
SCARCE = "scarce"
NUM_SEEDS = 20
NUM_SEEDS_QUICK = 3
CELLS = {f"{shape}.{size}": (shape, size) for shape in SHAPES for size in SIZES}
RESULT_GOALS = [
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


class ResultCell(msgspec.Struct, frozen=True):
    """Figures of one shape and size."""

    name: str
    by_policy: dict[str, SummaryFigures]
    bound: float

    def flat(self) -> dict[str, float]:
        """Figures by dotted name, and the ratios that goals refer to."""
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
    """Results of one trace."""

    results: dict[str, TraceResult]
    """By policy."""
    bound: float


def simulate(shape: str, size: int, seed: int) -> Simulated:
    """Simulate a trace under all policies."""
    policies = [each for each in compared_policies() if shape != SCARCE or each != BASELINE_POLICY]
    comparison = Comparison(generate_trace(SHAPES[shape], size, seed))
    results = {policy: comparison.result(policy, comparison.run(policy)) for policy in policies}
    return Simulated(results, comparison.bound())


def cells(
    quick: bool, names: Sequence[str] = tuple(CELLS), num_jobs: int | None = None
) -> Iterator[ResultCell]:
    """Simulate these cells; yield each when all its traces are done."""
    num_seeds = NUM_SEEDS_QUICK if quick else NUM_SEEDS
    with multiprocessing.get_context("spawn").Pool(num_jobs or os.cpu_count()) as pool:
        results = {
            name: pool.starmap_async(
                simulate, [(*CELLS[name], seed) for seed in range(num_seeds)], chunksize=1
            )
            for name in names
        }
        for name, traces in results.items():
            done = traces.get()
            by_policy = {
                policy: summarise([each.results[policy] for each in done])
                for policy in done[0].results
            }
            yield ResultCell(name, by_policy, sum(each.bound for each in done) / num_seeds)


def main() -> None:
    """Measure and report."""
    arguments = parser("scheduler", ("plans", "results", *CELLS))
    arguments.add_argument("--jobs", type=int, metavar="N", help="default: as many as CPUs")
    options = arguments.parse_args()
    cases = options.only or ["plans", "results"]
    figures: dict[str, float] = {}
    goals: list[Goal] = []
    if "plans" in cases:
        num_plans = 3 if options.quick else 9
        for size in FLEETS:
            figures |= cold(size, num_plans if size == "10000x1000" else 10 * num_plans)
        figures |= cycle("10000x1000", 10 * num_plans)
        goals += PLANS
    names = [name for name in CELLS if name in cases or "results" in cases]
    for cell in cells(options.quick, names, options.jobs) if names else ():
        print(f"{cell.name}\n", *table_lines(cell.by_policy, cell.bound), "", sep="\n", flush=True)
        figures |= cell.flat()
    goals += [goal for goal in RESULT_GOALS if goal.figure in figures]
    report(options, figures, goals)


if __name__ == "__main__":
    main()
