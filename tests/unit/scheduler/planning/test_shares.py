"""Shares are weighted max-min, exactly in small fleets; in large ones updates stay near it and
touch only what changed."""

import copy
import random

import pytest

from rollmesh.scheduler.planning import shares as module
from rollmesh.scheduler.planning.shares import (
    FairShares,
    GpuPool,
    IndexedPool,
    ShareBounds,
    max_min,
    update_shares,
)
from tests.unit.scheduler.planning.exact_shares import exact_shares

NEAR_GPUS = 0.02
CHAINS = [847, 1160, 1287, 1485]
"""Seeds where claims at their cap block each other in a chain."""


def market(seed: int) -> tuple[list[ShareBounds], list[IndexedPool]]:
    chance = random.Random(seed)
    num = chance.randint(1, 4)
    claims = [
        ShareBounds(float(chance.randint(1, 8)), 0.0, float(chance.randint(0, 12)))
        for _ in range(num)
    ]
    pools = {
        tuple(sorted(chance.sample(range(num), chance.randint(1, num)))): chance.randint(1, 8)
        for _ in range(chance.randint(1, 5))
    }
    return claims, [IndexedPool(num_gpus, takers) for takers, num_gpus in pools.items()]


def test_shares_are_those_of_exact_fractions() -> None:
    off = []
    for seed in [*range(200), *CHAINS]:
        claims, pools = market(seed)
        pairs = zip(max_min(claims, pools), exact_shares(claims, pools), strict=True)
        off.append(max(abs(one - float(other)) for one, other in pairs))
    assert max(off) < NEAR_GPUS


def test_gpus_that_only_one_can_use_leave_the_others_more_of_the_rest() -> None:
    claims = [ShareBounds(1.0, 0.0, 99.0), ShareBounds(1.0, 0.0, 99.0)]
    assert max_min(claims, [IndexedPool(4, (0,)), IndexedPool(4, (0, 1))]) == [4.0, 4.0]


def test_gpus_that_one_claim_cannot_fill_go_to_the_others_by_weight() -> None:
    claims = [ShareBounds(1.0, 0.0, 1.0), ShareBounds(1.0, 0.0, 99.0), ShareBounds(3.0, 0.0, 99.0)]
    got = max_min(claims, [IndexedPool(9, (0, 1, 2))])
    assert got == pytest.approx([1.0, 2.0, 6.0], abs=NEAR_GPUS)


def test_a_floor_is_met_before_weights_count() -> None:
    claims = [ShareBounds(1.0, 5.0, 99.0), ShareBounds(9.0, 0.0, 99.0)]
    assert max_min(claims, [IndexedPool(8, (0, 1))]) == [5.0, 3.0]


def test_floors_that_do_not_fit_are_cut_in_proportion() -> None:
    claims = [ShareBounds(1.0, 6.0, 99.0), ShareBounds(9.0, 2.0, 99.0), ShareBounds(9.0, 0.0, 99.0)]
    assert max_min(claims, [IndexedPool(4, (0, 1, 2))]) == [3.0, 1.0, 0.0]


def test_a_claim_at_its_cap_makes_room_through_others_at_their_cap() -> None:
    """The first leaves the second's pool for its own, and the second leaves the first pool to the
    third."""
    claims = [ShareBounds(1.0, 0.0, 2.0), ShareBounds(3.0, 0.0, 1.0), ShareBounds(1.0, 0.0, 1.0)]
    got = max_min(claims, [IndexedPool(1, (0, 1, 2)), IndexedPool(1, (0, 1)), IndexedPool(2, (0,))])
    assert got == pytest.approx([2.0, 1.0, 1.0], abs=NEAR_GPUS)


def test_a_chain_of_pools_converges() -> None:
    """Each pool is shared with the next one only; the even spread reaches through all of them."""
    num = 12
    claims = [ShareBounds(1.0, 0.0, 99.0)] * num
    pools = [IndexedPool(1, (each, each + 1)) for each in range(num - 1)]
    got = max_min(claims, pools)
    assert all(abs(each - (num - 1) / num) < NEAR_GPUS for each in got)


def test_no_claims_or_no_pools_give_no_gpus() -> None:
    assert max_min([], []) == []
    assert max_min([ShareBounds(1.0, 1.0, 4.0)], []) == [0.0]


NUM_POOLS, POOL_GPUS = 60, 8
MAX_MEAN_ERROR = 0.1
"""Upper bound on the mean error, as a fraction of the GPUs that the claims have."""


class Market:
    """Claims that are added, removed and changed, each on a few pools."""

    def __init__(self, seed: int, num_claims: int = 30) -> None:
        self._chance = random.Random(seed)
        self._num_added = 0
        self.shares: dict[str, ShareBounds] = {}
        self.places: dict[str, list[int]] = {}
        for _ in range(num_claims):
            self.add()

    def add(self) -> None:
        name, self._num_added = f"p{self._num_added}", self._num_added + 1
        self.places[name] = self._chance.sample(range(NUM_POOLS), 8)
        self.change(name)

    def change(self, name: str) -> None:
        cap = float(self._chance.choice((8, 16, 64)))
        self.shares[name] = ShareBounds(self._chance.choice((1.0, 1.0, 2.0)), 0.0, cap)

    def change_claims(self) -> None:
        """Remove one claim, add one, change one."""
        gone = self._chance.choice(list(self.shares))
        del self.shares[gone], self.places[gone]
        self.add()
        self.change(self._chance.choice(list(self.shares)))

    def pools(self) -> dict[int, GpuPool]:
        takers = {
            first: tuple(name for name, places in self.places.items() if first in places)
            for first in range(NUM_POOLS)
        }
        return {first: GpuPool(POOL_GPUS, names) for first, names in takers.items() if names}

    def settle(self, old: FairShares | None) -> FairShares:
        """Update until no pool is unsettled."""
        fair_shares = update_shares(old, dict(self.shares), self.pools())
        while fair_shares.unsettled:
            fair_shares = update_shares(fair_shares, dict(self.shares), self.pools())
        return fair_shares


def check_bounds(fair_shares: FairShares) -> None:
    for name, got in fair_shares.got.items():
        parts = [each[name] for each in fair_shares.parts.values() if name in each]
        assert got == pytest.approx(sum(parts), abs=1e-6)
        assert got <= fair_shares.shares[name].cap_gpus + 1e-6
    assert fair_shares.parts.keys() == fair_shares.pools.keys()
    for first, pool in fair_shares.pools.items():
        assert tuple(fair_shares.parts[first]) == pool.takers
        assert sum(fair_shares.parts[first].values()) <= pool.num_gpus + 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_after_many_changes_updated_shares_are_near_the_exact_ones(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    market = Market(seed)
    fair_shares = market.settle(None)
    for _ in range(40):
        market.change_claims()
        fair_shares = market.settle(fair_shares)
        check_bounds(fair_shares)
    monkeypatch.setattr(module, "UPDATE_TOLERANCE", 1e-7)
    exact = market.settle(None)
    off = [abs(fair_shares.got[name] - got) for name, got in exact.got.items()]
    assert sum(off) < MAX_MEAN_ERROR * sum(exact.got.values())


def test_fully_converged_updates_equal_exact_fractions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "UPDATE_TOLERANCE", 1e-9)
    for seed in range(40):
        chance = random.Random(seed)
        names = [f"p{number}" for number in range(chance.randint(1, 4))]
        shares = {name: ShareBounds(float(chance.randint(1, 8)), 0.0, 99.0) for name in names}
        takers = [sorted(chance.sample(names, chance.randint(1, len(names)))) for _ in range(5)]
        pools = {first: GpuPool(chance.randint(1, 8), tuple(t)) for first, t in enumerate(takers)}
        indexed = [
            IndexedPool(each.num_gpus, tuple(map(names.index, each.takers)))
            for each in pools.values()
        ]
        fair_shares = update_shares(None, shares, pools)
        while fair_shares.unsettled:
            fair_shares = update_shares(fair_shares, shares, pools)
        exact = exact_shares(list(shares.values()), indexed)
        assert [fair_shares.got[name] for name in names] == pytest.approx(list(map(float, exact)))


def test_pools_unrelated_to_a_change_are_not_touched() -> None:
    shares = {name: ShareBounds(1.0, 0.0, 99.0) for name in "abcd"}
    pools = {0: GpuPool(8, ("a", "b")), 8: GpuPool(8, ("c", "d"))}
    before = update_shares(None, shares, pools)
    after = update_shares(before, shares | {"a": ShareBounds(3.0, 0.0, 99.0)}, pools)
    assert dict(after.got) == pytest.approx({"a": 6.0, "b": 2.0, "c": 4.0, "d": 4.0})
    assert after.parts[0] != before.parts[0]
    assert after.parts[8] is before.parts[8]


def test_shares_of_the_last_plan_are_not_modified() -> None:
    market = Market(1)
    old = update_shares(None, dict(market.shares), market.pools())
    before = copy.deepcopy(old)
    market.change_claims()
    update_shares(old, dict(market.shares), market.pools())
    assert old == before


def test_unsettled_pools_continue_in_the_next_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    market = Market(2)
    rested = market.settle(None)
    monkeypatch.setattr(module, "NUM_UPDATE_ROUNDS", 1)
    shares, pools = dict(market.shares), market.pools()
    assert update_shares(None, shares, pools).unsettled
    assert market.settle(None) == rested


def test_a_removed_claim_leaves_no_shares() -> None:
    shares = {name: ShareBounds(1.0, 0.0, 99.0) for name in "ab"}
    before = update_shares(None, shares, {0: GpuPool(8, ("a", "b")), 8: GpuPool(8, ("b",))})
    del shares["b"]
    after = update_shares(before, shares, {0: GpuPool(8, ("a",))})
    assert (dict(after.got), dict(after.parts)) == ({"a": 8.0}, {0: {"a": 8.0}})
    assert update_shares(after, {}, {}).got == {}
