"""Search for a seed that breaks the simulated fleet, among many more than the tests have time for.

    python -m tests.sim.scheduler_search [--first N] [--seeds N] [--seconds N]

Prints each failing seed with what it found, and at the end how often each fault was injected; exits
with 1 if one failed. Add such a seed to KEPT_SEEDS of test_scheduler_wild.py before it is fixed.
"""

import argparse
import collections
import multiprocessing
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor

from rollmesh.testing.scheduler_sim.faults import WILD
from rollmesh.testing.scheduler_sim.fleet import FleetReport, simulate

NICENESS = 15
SEEDS_PER_PARCEL = 5


def print_now(line: str) -> None:
    """Print at once, so that an interrupted search has printed what it found."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run_seed(seed: int) -> tuple[int, FleetReport | None, str]:
    """Run one seed and return its result; nothing is raised."""
    try:
        return seed, simulate(seed, faults=WILD), ""
    except Exception:  # noqa: BLE001 - door: a seed's failure is a finding
        return seed, None, traceback.format_exc()


def main() -> int:
    """Run the whole search."""
    parser = argparse.ArgumentParser(description="Look for seeds that break the shared fleet.")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most so long")
    options = parser.parse_args()
    os.nice(NICENESS)
    began_s, num, failed = time.monotonic(), 0, list[int]()
    faults = collections.Counter[str]()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), spawn) as pool:
        seeds = range(options.first, options.first + options.seeds)
        for seed, report, fault in pool.map(run_seed, seeds, chunksize=SEEDS_PER_PARCEL):
            num += 1
            if report is None:
                failed.append(seed)
                print_now(f"seed {seed}: {fault}")
            else:
                faults.update(report.faults)
            if time.monotonic() - began_s > options.seconds:
                pool.shutdown(cancel_futures=True)
                break
    print_now(f"{num} seeds in {time.monotonic() - began_s:.0f} s, failed: {failed or 'none'}")
    print_now(", ".join(f"{number} {fault}" for fault, number in sorted(faults.items())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
