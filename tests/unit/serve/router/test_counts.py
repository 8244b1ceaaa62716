"""A ledger's memory is flat: of groups that have ended nothing is left but short notes."""

import gc
import sys

import pytest

from benchmarks.scale import Life
from rollmesh.serve.router.group_table import MAX_NOTES, SPARE_ENTRIES
from rollmesh.serve.router.groups import MAX_ENDS
from rollmesh.serve.router.status import cache_entries, entries, held

NUM_GROUPS = 10_000
"""At a time; a million rollouts go through one ledger in `python -m benchmarks.scale`."""
BLOCKS_PER_END, SPARE_BLOCKS = 11, 20
"""Of Python's allocator, for each worker of whose end there is a note, and besides. A group that is
kept, or a client's name, is several."""


def num_blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


@pytest.mark.usefixtures("young_heap")
def test_eighty_thousand_rollouts_through_one_ledger_leave_nothing() -> None:
    incarnation = Life()
    left: list[int] = []
    num_ends: list[int] = []
    for _ in range(2):
        incarnation.run(NUM_GROUPS)
        busy = cache_entries(incarnation.ledger, 0)
        assert busy["notes"] <= MAX_NOTES
        assert busy["agenda"] <= 2 * SPARE_ENTRIES
        incarnation.rest()
        num_ends.append(incarnation.ledger.membership.num_ends)
        left.append(num_blocks())
    assert incarnation.num_ended == incarnation.num_asked == 2 * NUM_GROUPS
    counts = incarnation.ledger.table.num
    assert counts["workers_lost"] > 5
    assert counts["requeues"] > 50
    assert set(entries(incarnation.ledger).values()) | set(held(incarnation.ledger).values()) == {0}
    assert not incarnation.ledger.table.of_client
    caches = cache_entries(incarnation.ledger, 0)
    assert 0 < caches["ended_workers"] <= MAX_ENDS
    assert {name for name, number in caches.items() if number} == {"ended_workers"}
    assert left[1] - left[0] <= BLOCKS_PER_END * (num_ends[1] - num_ends[0]) + SPARE_BLOCKS
