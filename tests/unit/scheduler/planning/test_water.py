"""Shares that go on from those of the last plan: near max-min, filled anew only where needed."""

import copy
import random

import pytest

from rollmesh.scheduler.planning import water as module
from rollmesh.scheduler.planning.shares import Pool, Share
from rollmesh.scheduler.planning.water import Basin, Water, refill
from tests.unit.scheduler.planning.exact_shares import exact_shares

NUM_BASINS, BASIN_GPUS = 60, 8
NEAR = 0.1
"""Of what claims have, in the mean."""


class Market:
    """Claims that come, go and change, each on a few basins."""

    def __init__(self, seed: int, num_claims: int = 30) -> None:
        self._chance = random.Random(seed)
        self._num_come = 0
        self.shares: dict[str, Share] = {}
        self.places: dict[str, list[int]] = {}
        for _ in range(num_claims):
            self.come()

    def come(self) -> None:
        name, self._num_come = f"p{self._num_come}", self._num_come + 1
        self.places[name] = self._chance.sample(range(NUM_BASINS), 8)
        self.change(name)

    def change(self, name: str) -> None:
        cap = float(self._chance.choice((8, 16, 64)))
        self.shares[name] = Share(self._chance.choice((1.0, 1.0, 2.0)), 0.0, cap)

    def happen(self) -> None:
        """One goes, one comes, one wants something else."""
        gone = self._chance.choice(list(self.shares))
        del self.shares[gone], self.places[gone]
        self.come()
        self.change(self._chance.choice(list(self.shares)))

    def basins(self) -> dict[int, Basin]:
        takers = {
            first: tuple(name for name, places in self.places.items() if first in places)
            for first in range(NUM_BASINS)
        }
        return {first: Basin(BASIN_GPUS, names) for first, names in takers.items() if names}

    def refill(self, old: Water | None) -> Water:
        """Until it is at rest."""
        water = refill(old, dict(self.shares), self.basins())
        while water.restless:
            water = refill(water, dict(self.shares), self.basins())
        return water


def check_bounds(water: Water) -> None:
    for name, got in water.got.items():
        parts = [each[name] for each in water.parts.values() if name in each]
        assert got == pytest.approx(sum(parts), abs=1e-6)
        assert got <= water.shares[name].cap_gpus + 1e-6
    assert water.parts.keys() == water.basins.keys()
    for first, basin in water.basins.items():
        assert tuple(water.parts[first]) == basin.takers
        assert sum(water.parts[first].values()) <= basin.num_gpus + 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_after_many_changes_shares_are_near_those_that_are_filled_to_the_last_drop(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    market = Market(seed)
    water = market.refill(None)
    for _ in range(40):
        market.happen()
        water = market.refill(water)
        check_bounds(water)
    monkeypatch.setattr(module, "ROUGH", 1e-7)
    exact = market.refill(None)
    off = [abs(water.got[name] - got) for name, got in exact.got.items()]
    assert sum(off) < NEAR * sum(exact.got.values())


def test_those_that_are_filled_to_the_last_drop_are_those_of_exact_fractions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ROUGH", 1e-9)
    for seed in range(40):
        chance = random.Random(seed)
        names = [f"p{number}" for number in range(chance.randint(1, 4))]
        shares = {name: Share(float(chance.randint(1, 8)), 0.0, 99.0) for name in names}
        takers = [sorted(chance.sample(names, chance.randint(1, len(names)))) for _ in range(5)]
        basins = {first: Basin(chance.randint(1, 8), tuple(t)) for first, t in enumerate(takers)}
        pools = [Pool(b.num_gpus, tuple(map(names.index, b.takers))) for b in basins.values()]
        water = refill(None, shares, basins)
        while water.restless:
            water = refill(water, shares, basins)
        exact = exact_shares(list(shares.values()), pools)
        assert [water.got[name] for name in names] == pytest.approx(list(map(float, exact)))


def test_what_has_nothing_to_do_with_a_change_is_not_touched() -> None:
    shares = {name: Share(1.0, 0.0, 99.0) for name in "abcd"}
    basins = {0: Basin(8, ("a", "b")), 8: Basin(8, ("c", "d"))}
    before = refill(None, shares, basins)
    after = refill(before, shares | {"a": Share(3.0, 0.0, 99.0)}, basins)
    assert dict(after.got) == pytest.approx({"a": 6.0, "b": 2.0, "c": 4.0, "d": 4.0})
    assert after.parts[0] != before.parts[0]
    assert after.parts[8] is before.parts[8]


def test_the_water_of_the_last_plan_is_left_as_it_was() -> None:
    market = Market(1)
    old = refill(None, dict(market.shares), market.basins())
    before = copy.deepcopy(old)
    market.happen()
    refill(old, dict(market.shares), market.basins())
    assert old == before


def test_what_is_not_at_rest_goes_on_in_the_next_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    market = Market(2)
    rested = market.refill(None)
    monkeypatch.setattr(module, "NUM_ROUNDS", 1)
    shares, basins = dict(market.shares), market.basins()
    assert refill(None, shares, basins).restless
    assert market.refill(None) == rested


def test_who_has_left_leaves_nothing() -> None:
    shares = {name: Share(1.0, 0.0, 99.0) for name in "ab"}
    before = refill(None, shares, {0: Basin(8, ("a", "b")), 8: Basin(8, ("b",))})
    del shares["b"]
    after = refill(before, shares, {0: Basin(8, ("a",))})
    assert (dict(after.got), dict(after.parts)) == ({"a": 8.0}, {0: {"a": 8.0}})
    assert refill(after, {}, {}).got == {}
