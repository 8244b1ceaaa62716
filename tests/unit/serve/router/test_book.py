"""The book stays true through seeded chaos, and is empty when all has ended."""

import functools
from collections import Counter

import pytest

from rollmesh.core.ids import GroupId
from rollmesh.serve.router.book import MAX_NOTES, Book
from rollmesh.wire.messages import GroupMoved, GroupState
from tests.unit.serve.router.chaos import NUM_GROUPS, Town

SEEDS = range(40)


@functools.cache
def lived(seed: int) -> Town:
    """A minute of chaos, then two of calm."""
    town = Town(seed)
    town.run(chaos_s=60.0, calm_s=120.0)
    return town


@pytest.mark.parametrize("seed", SEEDS)
def test_every_ask_ends_once_whatever_is_lost_doubled_late_or_dead(seed: int) -> None:
    town = lived(seed)
    assert town.num_asked == NUM_GROUPS
    assert town.open == {}
    assert set(town.ends.values()) == {1}
    assert town.ledger.book.groups == {}
    assert not any(town.ledger.book.has_ended(GroupId("r1", seq)) for seq in range(NUM_GROUPS))
    assert sum(worker.load for worker in town.ledger.crew.workers) == 0


def test_the_chaos_reaches_every_corner() -> None:
    num: Counter[str] = Counter()
    for seed in SEEDS:
        town = lived(seed)
        num.update(town.ledger.book.num)
        num["lives"] += town.num_restarts
    corners = ("workers_lost", "workers_revived", "requeues", "returns", "claims", "lives")
    assert all(num[corner] > 0 for corner in corners)


def test_notes_of_the_past_are_bounded() -> None:
    book = Book(note_s=3.0, now_s=0.0)
    for seq in range(MAX_NOTES + 10):
        book.note(GroupMoved(GroupId("r1", seq), GroupState.DONE, 1, ""), 1)
    kept = [seq for seq in range(MAX_NOTES + 10) if book.has_ended(GroupId("r1", seq))]
    assert kept == list(range(10, MAX_NOTES + 10))
    book.now_s = 3.0
    book.tear_old_notes()
    assert not any(book.has_ended(GroupId("r1", seq)) for seq in kept)
