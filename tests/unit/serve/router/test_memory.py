"""A ledger's memory is flat: of groups that have ended nothing is left but short notes."""

import gc
import sys

import pytest

from benchmarks._ledger_life import Life
from rollmesh.serve.router.agenda import SPARE_ENTRIES
from rollmesh.serve.router.counts import cache_entries, entries, held
from rollmesh.serve.router.lives import MAX_ENDS

NUM_GROUPS = 10_000
"""At a time; a million rollouts go through one ledger in `python -m benchmarks.scale`."""
BLOCKS_PER_GROUP = 0.2
"""Of Python's allocator: a group that is kept, or its name alone, is several."""


def num_blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


@pytest.mark.usefixtures("young_heap")
def test_eighty_thousand_rollouts_through_one_ledger_leave_nothing() -> None:
    life, left = Life(), []
    for _ in range(2):
        life.run(NUM_GROUPS)
        life.rest()
        left.append(num_blocks())
    assert life.num_ended == life.num_asked == 2 * NUM_GROUPS
    counts = life.ledger.book.num
    assert counts["workers_lost"] > 5
    assert counts["requeues"] > 50
    assert set(entries(life.ledger).values()) | set(held(life.ledger).values()) == {0}
    caches = cache_entries(life.ledger, 0)
    names = ("clients", "workers", "lost_groups", "notes", "loading_workers")
    assert [caches[name] for name in names] == [0] * len(names)
    assert caches["ended_workers"] <= MAX_ENDS
    assert caches["agenda"] <= 2 * SPARE_ENTRIES
    assert left[1] - left[0] < BLOCKS_PER_GROUP * NUM_GROUPS
