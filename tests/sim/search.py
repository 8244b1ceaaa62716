"""Search for a seed that breaks the simulated mesh, among many more than the tests have time for
(`make chaos`).

    python -m tests.sim.search [--first N] [--seeds N] [--seconds N]

Prints each failing seed with what it found, and at the end seeds, faults and seeds per second;
exits with 1 if one failed. Add such a seed to KEPT_SEEDS of test_mesh.py before it is fixed.
"""

import argparse
import collections
import os
import sys
import time

from tests.sim.seeds import open_pool

NICENESS = 15
EACH_S = 30.0


def print_now(line: str) -> None:
    """Print at once, so that an interrupted search has printed what it found."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run the whole search."""
    parser = argparse.ArgumentParser(description="Look for seeds that break the mesh.")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most so long")
    options = parser.parse_args()
    os.nice(NICENESS)
    started_s = printed_s = time.monotonic()
    failed: list[int] = []
    faults: collections.Counter[str] = collections.Counter()
    num = 0
    with open_pool() as pool:
        for seed, report, fault in pool.run(range(options.first, options.first + options.seeds)):
            num += 1
            if report is None:
                failed.append(seed)
                print_now(f"seed {seed}: {fault}")
            else:
                faults.update(report.faults)
            now_s = time.monotonic()
            if now_s - started_s > options.seconds:
                break
            if now_s - printed_s > EACH_S:
                printed_s = now_s
                print_now(f"{num} seeds, {num / (now_s - started_s):.1f} a second")
    seconds = time.monotonic() - started_s
    print_now(f"{num} seeds in {seconds:.0f} s, {num / seconds:.1f} a second")
    print_now(f"failed: {failed or 'none'}")
    print_now(", ".join(f"{number} {fault}" for fault, number in sorted(faults.items())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
