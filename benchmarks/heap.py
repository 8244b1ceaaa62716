"""Layouts of the C library's heap, compared under the load of browser agents with screenshots.

    python -m benchmarks.heap            every layout, each in its own process
    python -m benchmarks.heap --preload /usr/lib/x86_64-linux-gnu/libjemalloc.so.2

- Four rollouts of 45 turns (15 for --quick) run in threads. Each turn keeps a new screenshot of 0.5
  MB. A body with all screenshots arrives in reads of 256 KiB, is joined, read without a copy, and
  freed. 200 small objects stay.
- Figures are peak and resting memory above the start, CPU time, and the longest trim.
- Only Python and malloc run, no code of the worker. docs/explanation/memory.md has the results.
"""

import ctypes
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.lib.report import parser, report
from rollmesh.core.heap import Heap
from rollmesh.core.metrics import rss_bytes

NUM_LANES, NUM_TURNS, QUICK_TURNS = 4, 45, 15
SHOT_BYTES, READ_BYTES = 500_000, 256 * 1024
TRIM_TURNS = 5
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
AS_IT_IS = "as it is"
LAYOUTS = {
    AS_IT_IS: {},
    "trim": {},
    "one arena, trim": {M_ARENA_MAX: 1},
    "threshold 128 KiB": {M_MMAP_THRESHOLD: 128 * 1024},
    "threshold 128 KiB, one arena, trim": {M_MMAP_THRESHOLD: 128 * 1024, M_ARENA_MAX: 1},
    "threshold 384 KiB, one arena, trim": {M_MMAP_THRESHOLD: 384 * 1024, M_ARENA_MAX: 1},
    "threshold 1 MiB, one arena, trim": {M_MMAP_THRESHOLD: 2**20, M_ARENA_MAX: 1},
    "threshold 1 MiB, trim": {M_MMAP_THRESHOLD: 2**20},
    "threshold 4 MiB, kept end, one arena, trim": {
        M_MMAP_THRESHOLD: 2**22,
        M_TRIM_THRESHOLD: 2**30,
        M_ARENA_MAX: 1,
    },
}


class PeakWatcher:
    """The largest resident memory, sampled by a thread."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(0.01):
            self.num_bytes = max(self.num_bytes, rss_bytes())


def turn(rng: random.Random, shots: list[bytes], small: list[bytes]) -> None:
    """Run one turn of a rollout."""
    shots.append(rng.randbytes(SHOT_BYTES))
    body = b'"'.join(shots)
    reads = [body[at : at + READ_BYTES] for at in range(0, len(body), READ_BYTES)]
    body = b"".join(reads)
    reads.clear()
    view = memoryview(body)
    for number in range(len(shots)):
        start = number * (SHOT_BYTES + 1)
        hashlib.blake2b(view[start : start + SHOT_BYTES], digest_size=16).digest()
    small.extend(bytes(rng.randrange(20, 400)) for _ in range(200))


def load(layout: str, num_turns: int) -> dict[str, float]:
    """Run the load with one layout in this process; return its figures."""
    mallopt = ctypes.CDLL(None).mallopt
    for name, value in LAYOUTS[layout].items():
        assert mallopt(name, value) == 1
    heap, trims_s = Heap(), [0.0]
    start_bytes, peak = rss_bytes(), PeakWatcher()
    rngs = [random.Random(lane) for lane in range(NUM_LANES)]
    shots: list[list[bytes]] = [[] for _ in rngs]
    small: list[list[bytes]] = [[] for _ in rngs]
    with ThreadPoolExecutor(NUM_LANES) as pool:
        for number in range(num_turns):
            list(pool.map(turn, rngs, shots, small))
            if "trim" in layout and number % TRIM_TURNS == TRIM_TURNS - 1:
                trims_s.append(heap.trim() or 0.0)
        left = small[0][::50]  # small objects that stay
        shots, small = [], []
        if "trim" in layout:
            trims_s.append(heap.trim() or 0.0)
    resting_bytes = rss_bytes()
    peak.close()
    assert left
    return {
        "peak_mb": (peak.num_bytes - start_bytes) / 1e6,
        "resting_mb": (resting_bytes - start_bytes) / 1e6,
        "cpu_s": time.process_time(),
        "longest_trim_ms": 1e3 * max(trims_s),
    }


def main() -> None:
    """Run the layouts and print their figures."""
    arguments = parser("heap")
    arguments.add_argument(
        "--layout", choices=LAYOUTS, help="run this layout only, in this process"
    )
    arguments.add_argument("--preload", default="", help="a library with its own malloc")
    options = arguments.parse_args()
    if options.layout:
        print(json.dumps(load(options.layout, QUICK_TURNS if options.quick else NUM_TURNS)))
        return
    figures: dict[str, float] = {}
    preloaded = {"LD_PRELOAD": options.preload} if options.preload else {}
    for layout in [AS_IT_IS] if options.preload else LAYOUTS:
        argv = [sys.executable, "-m", "benchmarks.heap", "--layout", layout]
        argv += ["--quick"] if options.quick else []
        environ = {**os.environ, **preloaded}
        child = subprocess.run(argv, env=environ, check=True, capture_output=True, text=True)
        found = json.loads(child.stdout).items()
        figures |= {f"{options.preload or layout}: {name}": value for name, value in found}
    report(options, figures, [])


if __name__ == "__main__":
    main()
