"""Cost of the tensor data plane, beside memcpy, a bare socket, and an HTTP and base64 system.

    python -m benchmarks.tensors [--only CASE,...] [--steps N] [--quick] [--json] [--check]

- Owners and consumers are separate processes. Arms take turns lap by lap; ratios such as
  `tcp_vs_raw` are of speed between consecutive laps.
- `fetch_ms` ends when the tensors are available; `read_ms` is a first read of all of them.
- No goal is easier or absent under --quick, but a slope is judged only over 100 steps; `--only`
  judges the goals of the cases that it names.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from benchmarks.lib import tensor_cases, tensor_intake, tensor_locks, tensor_steps
from benchmarks.lib.report import Goal, parser, report
from benchmarks.lib.tensor_mesh import TensorBench

NUM_STEPS, QUICK_STEPS = 500, 20
CASES: dict[str, Callable[[TensorBench], None]] = {
    "handles": tensor_cases.handles,
    "locks": tensor_locks.locks,
    "big": tensor_cases.big,
    "small": tensor_cases.small,
    "tiny": tensor_cases.tiny,
    "fanout": tensor_cases.fanout,
    "intake": tensor_intake.intake,
    "steps": tensor_steps.steps,
}

GOALS = [
    Goal("handles.pack_ms", "<=", 1.0),
    Goal("handles.unpack_ms", "<=", 1.0),
    Goal("locks.store.clear_ms", "<=", 1.0),
    Goal("locks.store.end_step_ms", "<=", 1.0),
    Goal("locks.buffer.clear_ms", "<=", 1.0),
    Goal("locks.buffer.end_step_ms", "<=", 1.0),
    Goal("big.publish_vs_memcpy", ">=", 0.5),
    Goal("big.shm.fetch_ms", "<=", 2.0),
    Goal("big.tcp_vs_raw_warm", ">=", 0.75),
    Goal("big.shm.peak_vs_payload", "<=", 1.1),
    Goal("big.tcp.peak_vs_payload", "<=", 1.1),
    Goal("small.shm.fetch_ms", "<=", 15.0),
    Goal("small.tcp.fetch_ms", "<=", 60.0),
    Goal("tiny.shm.p50_ms", "<=", 0.3),
    Goal("tiny.tcp.p50_ms", "<=", 0.3),
    Goal("fanout.shm.over_sockets_vs_payload", "<=", 0.01),
    Goal("fanout.shm.private_memory_vs_payload", "<=", 0.05),
    Goal("fanout.remote.over_sockets_vs_payload", "<=", 1.01),
    Goal("fanout.remote.private_memory_vs_payload", "<=", 0.05),
    Goal("steps.left_bytes", "<=", 0.0),
    Goal("steps.left_tensors", "<=", 0.0),
    Goal("steps.segments_left", "<=", 0.0),
    Goal("steps.worst_slope_mb_per_100", "<=", 1.0),
]
"""Compared with `raw_warm`, since ours receives into used memory, too. A slope of 1 MB is, over 500
steps, 5 MB of the 150 GB transferred.
"""


def judged(cases: Sequence[str], figures: dict[str, float]) -> list[Goal]:
    """Return the goals of these cases; that of the slope only if there are enough steps."""
    goals = [goal for goal in GOALS if goal.figure.partition(".")[0] in cases]
    return [goal for goal in goals if "slope" not in goal.figure or goal.figure in figures]


def main() -> None:
    """Measure and report."""
    arguments = parser("tensors", CASES)
    arguments.add_argument(
        "--steps", type=int, help="number of steps; without --only, only the case `steps` runs"
    )
    options = arguments.parse_args()
    cases = options.only or ([*CASES] if options.steps is None else ["steps"])
    options.steps = options.steps or (QUICK_STEPS if options.quick else NUM_STEPS)
    if options.steps < tensor_steps.MIN_STEPS:
        arguments.error(f"--steps: at least {tensor_steps.MIN_STEPS}")
    with ExitStack() as stack:
        bench = TensorBench(options, stack)
        for name in cases:
            CASES[name](bench)
        report(options, bench.figures, judged(cases, bench.figures))


if __name__ == "__main__":
    main()
