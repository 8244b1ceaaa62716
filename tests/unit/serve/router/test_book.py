"""The book stays true through seeded chaos, and is empty when all has ended."""

import functools
from collections import Counter

import pytest

from rollmesh.core.ids import GroupId
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
    assert not any(GroupId("r1", seq) in town.ledger.book.notes for seq in range(NUM_GROUPS))
    assert sum(worker.load for worker in town.ledger.crew.workers) == 0


def test_the_chaos_reaches_every_corner() -> None:
    num: Counter[str] = Counter()
    for seed in SEEDS:
        town = lived(seed)
        num.update(town.ledger.book.num)
        num["lives"] += town.num_restarts
    corners = ("workers_lost", "workers_revived", "requeues", "returns", "claims", "lives")
    assert all(num[corner] > 0 for corner in corners)
