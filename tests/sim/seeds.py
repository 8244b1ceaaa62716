"""Run many seeds of the simulator on all cores.

A result depends on the seed alone: neither the number of processes nor their order changes it.
Results are returned in the order of the seeds.
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


class SeedResult(NamedTuple):
    """Result of one seed."""

    seed: int
    report: SimReport | None
    fault: str
    """The traceback if the run broke; '' if it completed."""


class SeedPool:
    """Runs seeds in several processes."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def run(self, seeds: Iterable[int]) -> Iterator[SeedResult]:
        """Yield the results in the order of the seeds, each as soon as possible."""
        return self._pool.map(run_seed, seeds, chunksize=SEEDS_PER_PARCEL)


@contextmanager
def open_pool() -> Iterator[SeedPool]:
    """Open one process per core; at the end of the block, seeds that have not begun are
    cancelled.
    """
    # A forked child would inherit the threads and sockets of its parent.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(len(os.sched_getaffinity(0)), context, _make_ready)
    try:
        yield SeedPool(pool)
    finally:
        pool.shutdown(cancel_futures=True)


def _make_ready() -> None:
    # A simulation leaves little garbage; scanning all imported objects for it took a sixth of the
    # time.
    gc.freeze()
    gc.set_threshold(20_000)


def run_seed(seed: int) -> SeedResult:
    """Run one seed; nothing is raised."""
    try:
        return SeedResult(seed, simulate(seed), "")
    except Exception:  # noqa: BLE001 - door: a seed's failure is a finding
        return SeedResult(seed, None, traceback.format_exc())
