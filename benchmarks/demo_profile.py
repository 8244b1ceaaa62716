"""Profile of the demo: start to first rollout, a worker's idle memory, CPU per model call.

    python -m benchmarks.demo_profile [--quick] [--json] [--check]

- It runs `rollmesh demo` in a folder of its own; all figures come from the run's files and psutil.
- A role's busy share is its CPU seconds over the wall seconds in which rollouts finished. The role
  whose share is nearest to a whole core is the bottleneck.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.lib.report import Goal, parser, report
from rollmesh.core.process import Ready

GOALS = [
    Goal("first_rollout_s", "<=", 15.0),
    Goal("worker_idle_rss_mb", "<=", 100.0),
    Goal("cpu_ms_per_call", "<=", 2.0),
]
MB = 1e6


def main() -> None:
    """Run the demo, read its files and report."""
    options = parser("demo_profile").parse_args()
    num_steps = 30 if options.quick else 100
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.time()
        run_demo(folder, num_steps)
        run = Path(folder) / "demo"
        figures = {"first_rollout_s": first_rollout_s(run, began_s)}
        figures |= profile(run)
        figures["worker_idle_rss_mb"] = worker_idle_rss_mb(run)
    report(options, figures, GOALS)


def run_demo(folder: str, num_steps: int) -> None:
    """Run the demo as a user starts it, but for fewer steps."""
    argv = [sys.executable, "-m", "rollmesh.cli.main", "demo", "--no-live"]
    argv += ["--set", f"run.folder={folder}", "--set", f"trainer.num_steps={num_steps}"]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines file."""
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def first_rollout_s(run: Path, began_s: float) -> float:
    """Seconds from the start of the first process to the first finished rollout in the records."""
    with open(run / "trajectories.jsonl", "rb") as file:
        return float(msgspec.json.decode(file.readline())["time_s"]) - began_s


def num_finished(row: dict[str, Any]) -> int:
    """Rollouts that workers have finished so far."""
    return count(row, "num_finished")


def count(row: dict[str, Any], what: str) -> int:
    """Sum a count over all workers."""
    return sum(worker[what] for worker in (row["router"] or {}).get("workers", []))


def profile(run: Path) -> dict[str, float]:
    """Figures between the first and the last sample in which rollouts finished and all processes
    ran.
    """
    busy = [row for row in rows(run / "telemetry.jsonl") if num_finished(row)]
    first = busy[0]
    whole = [row for row in busy if set(roles(row)) >= set(roles(first))]
    last = max(whole, key=lambda row: (num_finished(row), -row["time_s"]))
    wall_s = last["time_s"] - first["time_s"]
    num_calls = count(last, "num_calls") - count(first, "num_calls")
    cpu_s = {role: cpu_of(last, role) - cpu_of(first, role) for role in roles(last)}
    return {
        "wall_s": wall_s,
        "rollouts_per_s": (num_finished(last) - num_finished(first)) / wall_s,
        "calls_per_s": num_calls / wall_s,
        "cpu_ms_per_call": 1e3 * sum(cpu_s.values()) / num_calls,
        "cpu_ms_per_call_without_trainer": 1e3
        * sum(s for role, s in cpu_s.items() if role != "trainer")
        / num_calls,
        **{f"cpu_ms_per_call.{role}": 1e3 * s / num_calls for role, s in cpu_s.items()},
        **{f"busy_share.{role}": s / wall_s for role, s in cpu_s.items()},
    }


def roles(row: dict[str, Any]) -> list[str]:
    """Return the processes of a sample."""
    return [process["role"] for process in row["processes"]]


def cpu_of(row: dict[str, Any], role: str) -> float:
    """CPU seconds of one process until this sample."""
    return float(sum(p["cpu_s"] for p in row["processes"] if p["role"] == role))


def worker_idle_rss_mb(run: Path) -> float:
    """Resident memory of an idle worker with the demo's tokenizer."""
    config = ["--config", str(run / "config.json")]
    router = MeshProcess("router", *config)
    try:
        worker = MeshProcess("worker", *config, "--router", router.address, "--worker-id", "idle")
        try:
            return float(psutil.Process(worker.process.pid).memory_info().rss) / MB
        finally:
            worker.end()
    finally:
        router.end()


class MeshProcess:
    """One process of a mesh, started as launch starts it."""

    def __init__(self, *argv: str) -> None:
        reading, writing = os.pipe()
        words = [sys.executable, "-m", "rollmesh.cli.main", *argv, "--ready-fd", str(writing)]
        self.process = subprocess.Popen(words, pass_fds=[writing])
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            self.address = msgspec.json.decode(pipe.readline(), type=Ready).address

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


if __name__ == "__main__":
    main()
