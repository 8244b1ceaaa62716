"""Memory of a trainer: waiting between steps, saving, and resuming.

    python -m benchmarks.trainer_memory [--quick] [--json] [--check]

Each case is a process on the CPU: 200 steps with sequences of 64 to 4,096 tokens, never of the same
lengths; a model that is saved; a journal of which nothing was taken, read by a new client. Resident
memory and peak are the kernel's counts.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lib.report import Goal, parser, report

FEW_STEPS, MANY_STEPS, QUICK_STEPS = 20, 200, 60
LONGEST, QUICK_LONGEST = 4096, 1024
JOURNAL_MB, QUICK_JOURNAL_MB = 500, 100
MODEL_MB, QUICK_MODEL_MB = 400, 100
MB = 1e6

GOALS = [
    Goal("steps.resting_growth", "<=", 1.05),
    Goal("steps.resting_over_idle", "<=", 1.15),
    Goal("save.copies_of_the_model", "<=", 1.1),
    Goal("resume.peak_over_idle_mb", "<=", 64.0),
]


def run_child(*argv: str) -> list[dict[str, Any]]:
    """Run a module of this repository; return the JSON lines that it prints."""
    argv_all = [sys.executable, "-m", *argv]
    done = subprocess.run(argv_all, check=True, stdout=subprocess.PIPE, env=os.environ)
    return [json.loads(line) for line in done.stdout.splitlines()]


def steps(folder: Path, is_quick: bool) -> dict[str, float]:
    """Memory of a waiting trainer: before the first step, after a few, after many."""
    many, longest = (QUICK_STEPS, QUICK_LONGEST) if is_quick else (MANY_STEPS, LONGEST)
    rests = [str(each) for each in (0, FEW_STEPS, many)]
    idle, few, last = run_child("benchmarks.lib.trainer_run", str(folder), str(longest), *rests)
    return {
        "steps.number": float(last["num_steps"]),
        "steps.idle_mb": idle["rss_bytes"] / MB,
        "steps.resting_after_few_mb": few["rss_bytes"] / MB,
        "steps.resting_after_many_mb": last["rss_bytes"] / MB,
        "steps.resting_growth": last["rss_bytes"] / few["rss_bytes"],
        "steps.resting_over_idle": last["rss_bytes"] / idle["rss_bytes"],
        "steps.new_objects": float(last["num_objects"] - few["num_objects"]),
    }


def save(folder: Path, is_quick: bool) -> dict[str, float]:
    """Copies of the model in memory while a checkpoint is written."""
    size_mb = QUICK_MODEL_MB if is_quick else MODEL_MB
    [figures] = run_child("benchmarks.lib.trainer_cases", "save", str(folder), str(size_mb))
    return {f"save.{name}": value for name, value in figures.items()}


def resume(folder: Path, is_quick: bool) -> dict[str, float]:
    """Memory of a client that resumes from the journal of another."""
    size_mb = QUICK_JOURNAL_MB if is_quick else JOURNAL_MB
    run_child("benchmarks.lib.trainer_cases", "journal", str(folder), str(size_mb))
    [figures] = run_child("benchmarks.lib.trainer_cases", "resume", str(folder), str(size_mb))
    return {f"resume.{name}": value for name, value in figures.items()}


def main() -> None:
    """Measure and report."""
    options = parser("trainer_memory").parse_args()
    figures: dict[str, float] = {}
    for case in (steps, save, resume):
        with tempfile.TemporaryDirectory() as folder:
            figures |= case(Path(folder), options.quick)
    report(options, figures, GOALS)


if __name__ == "__main__":
    main()
