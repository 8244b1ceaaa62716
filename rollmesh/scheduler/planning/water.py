"""Shares of a large fleet, from plan to plan: only what has changed is filled again.

Like shares.py, of basins: pools that have names (their first GPU), of claims that have names (their
pipeline). A plan begins with the water of the last one. Basins that are other than they were, and
all of claims that are, are filled again, exactly, around what their claims have elsewhere; so are
the neighbours of those that move by more than ROUGH of what they have in all. Nobody who has its
cap is moved about between basins, as shares.py does, so that it comes to rest.

Water is a part of the planner's state, like credits: a plan hands the new one out and leaves the
old one as it is, and the same state gives the same plan. A plan that begins without fills from
nothing, each basin NUM_ROUNDS times in the mean at most; what is not at rest then goes on in the
next plan. In a fleet of 10,000 GPUs shares are off by a sixth of a bundle in the
mean, and single claims by two.

Invariants: nobody has more than its cap, no basin gives more than it holds. Driven by fair.py.
"""

from collections.abc import Mapping
from typing import NamedTuple

from rollmesh.scheduler.planning.shares import Share, fill

ROUGH = 0.03
"""Of a claim's GPUs: nobody in a large fleet is told apart by so little."""
NUM_ROUNDS = 3
"""So often all basins are filled in one plan, at most."""


class Basin(NamedTuple):
    """GPUs that are the same to all."""

    num_gpus: int
    takers: tuple[str, ...]
    """Pipelines."""


class Water(NamedTuple):
    """What the shares of a plan were made of; never changed."""

    shares: Mapping[str, Share] = {}
    basins: Mapping[int, Basin] = {}
    parts: Mapping[int, Mapping[str, float]] = {}
    """By basin and claim, GPUs."""
    got: Mapping[str, float] = {}
    """By claim, the GPUs of all its parts."""
    basins_of: Mapping[str, tuple[int, ...]] = {}
    """By claim, where it is a taker."""
    restless: tuple[int, ...] = ()
    """Basins that are to be filled again."""


class _Filling:
    """Old water upon its way to new."""

    def __init__(self, old: Water, shares: dict[str, Share], basins: dict[int, Basin]) -> None:
        self._shares = shares
        self._basins = basins
        self._parts = dict(old.parts)
        self._got = {name: old.got.get(name, 0.0) for name in shares}
        self._basins_of = {name: old.basins_of.get(name, ()) for name in shares}
        self._num_left = NUM_ROUNDS * len(basins)
        self._waiting = dict.fromkeys(each for each in old.restless if each in basins)
        self._reshape(old)
        for name, share in shares.items():
            if old.shares.get(name) != share:
                self._waiting.update(dict.fromkeys(self._basins_of[name]))

    def _reshape(self, old: Water) -> None:
        """Who goes on in a basin has there what it had."""
        basins, got = self._basins, self._got
        gone = old.basins.keys() - basins.keys()
        changed = [first for first, each in basins.items() if old.basins.get(first) != each]
        for first in sorted([*gone, *changed]):
            had = self._parts.pop(first, {})
            takers = basins[first].takers if first in basins else ()
            for name, part in had.items():
                if name in got and name not in takers:
                    got[name] -= part
                    self._basins_of[name] = _without(self._basins_of[name], first)
            for name in takers:
                if name not in had:
                    self._basins_of[name] = tuple(sorted({*self._basins_of[name], first}))
            if first in basins:
                self._parts[first] = {name: had.get(name, 0.0) for name in takers}
                self._waiting[first] = None

    def settle(self) -> Water:
        """Until nothing moves, or it has lasted too long."""
        while self._waiting and self._num_left > 0:
            first = next(iter(self._waiting))
            del self._waiting[first]
            self._num_left -= 1
            self._refill(first)
        restless = tuple(self._waiting)
        return Water(self._shares, self._basins, self._parts, self._got, self._basins_of, restless)

    def _refill(self, first: int) -> None:
        basin, had, got = self._basins[first], self._parts[first], self._got
        elsewhere = [max(0.0, got[name] - part) for name, part in had.items()]
        shares = [self._shares[name] for name in basin.takers]
        filled = _even(shares, elsewhere, basin.num_gpus)
        if filled is None:
            filled, _ = fill(shares, elsewhere, basin.num_gpus)
        self._parts[first] = dict(zip(basin.takers, filled, strict=True))
        for (name, part), has, now in zip(had.items(), elsewhere, filled, strict=True):
            got[name] = has + now
            if abs(now - part) > ROUGH * (has + now):
                self._waiting.update(dict.fromkeys(self._basins_of[name]))
        self._waiting.pop(first, None)


def _without(places: tuple[int, ...], first: int) -> tuple[int, ...]:
    return tuple(each for each in places if each != first)


def _even(shares: list[Share], elsewhere: list[float], num_gpus: int) -> list[float] | None:
    """The parts, where nobody's floor, cap or share elsewhere is in the way: the most cases."""
    level = (num_gpus + sum(elsewhere)) / sum([each.weight for each in shares])
    filled = []
    for (weight, floor, cap), has in zip(shares, elsewhere, strict=True):
        gpus = weight * level
        if gpus < has or gpus < floor or gpus >= cap:
            return None
        filled.append(gpus - has)
    return filled


def refill(old: Water | None, shares: dict[str, Share], basins: dict[int, Basin]) -> Water:
    """The water of these claims and basins; `got` is nobody's but theirs."""
    return _Filling(old or Water(), shares, basins).settle()
