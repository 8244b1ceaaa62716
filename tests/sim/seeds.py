"""Many seeds of the simulator, on all cores.

Owns the processes. Invariant: what a seed comes to depends on the seed alone, so neither the number
of processes nor their order changes what is found; it is told in the order of the seeds. Driven by
test_mesh.py and search.py.
"""

import gc
import multiprocessing
import os
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from rollmesh.testing.mesh_sim.mesh import SimReport, simulate

SEEDS_PER_PARCEL = 5


class Ended(NamedTuple):
    """What a seed came to."""

    seed: int
    report: SimReport | None
    fault: str
    """Where it broke, as Python says it; '' if it came to rest."""


class Cores:
    """One process for each."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def run(self, seeds: Iterable[int]) -> Iterator[Ended]:
        """Each of them, as soon as those before it have ended."""
        return self._pool.map(run_seed, seeds, chunksize=SEEDS_PER_PARCEL)


@contextmanager
def open_cores() -> Iterator[Cores]:
    """Their processes end with the block; seeds that have not begun by then never do."""
    # A forked child would inherit whatever threads and sockets its parent has.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(len(os.sched_getaffinity(0)), context, _make_ready)
    try:
        yield Cores(pool)
    finally:
        pool.shutdown(cancel_futures=True)


def _make_ready() -> None:
    # A simulation leaves little garbage; to look for it in all that is imported took a sixth.
    gc.freeze()
    gc.set_threshold(20_000)


def run_seed(seed: int) -> Ended:
    """Run it; nothing is raised."""
    try:
        return Ended(seed, simulate(seed), "")
    except Exception:  # noqa: BLE001 - door: a seed's failure is a finding
        return Ended(seed, None, traceback.format_exc())
