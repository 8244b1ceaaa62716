"""Weighted max-min: what each claim ideally has of pools of GPUs that not all claims can use.

A pool is a set of GPUs with the same claims upon it; GPUs are as good as liquid here. A claim rises
with the water, `weight` times its level, from its floor to its cap, and wherever it stands in a
pool nobody in that pool has more than it for its weight, unless by a floor. Where all floors do not
fit, they are cut in proportion.

The answer is found pool by pool: each is filled again, exactly, around what its claims have
elsewhere, until nothing moves by more than the tolerance. The even spread is the one minimum of
sum(gpus^2 / weight) over what the pools allow, and each filling comes closer to it (Fujishige 1980,
lexicographically optimal bases); with one pool it is there at once. Whoever has its cap then draws
less where the water is low and more where it is high, and the filling goes on. In the end, of few
pools, whoever could have more at the cost of one who has more for its weight gets it, though others
go from pool to pool for it: where no such path is left, the spread is even.

Invariants: never more than the cap, nor than the pools hold; the same input gives the same answer.
A fleet of many pools is left before all is at rest: by a fifth of a bundle in the mean, and single
claims by a few bundles. Driven by the policies.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

TOLERANCE_GPUS = 1e-4
ROUGH_GPUS = 0.1
"""The same where there are more than FEW_POOLS: nobody there is told apart by so little."""
FEW_POOLS = 16
NEAR = 1e-3
"""GPUs that are not worth a path."""
NUM_PATHS = 200
NUM_FILLS = 20_000
"""Visits of a claim to a pool, at most."""
NUM_ROUGH_FILLS, NUM_ROUNDS = 2_000, 3
"""The same where there are more than FEW_POOLS; or so many rounds, where that is more."""


Step = tuple[int, int]
"""Out of a pool, by a claim that can go elsewhere."""


class Share(NamedTuple):
    """What one wants."""

    weight: float
    floor_gpus: float
    cap_gpus: float


class Pool(NamedTuple):
    """GPUs that are the same to all."""

    num_gpus: int
    takers: tuple[int, ...]
    """The claims, by their place in the list."""


class _Water:
    """The pools as they are filled."""

    def __init__(self, claims: Sequence[Share], pools: Sequence[Pool]) -> None:
        self.got = [0.0] * len(claims)
        self._claims = claims
        self._pools = pools
        self._parts = [dict.fromkeys(pool.takers, 0.0) for pool in pools]
        self._levels = [0.0] * len(pools)
        """How high it stands; inf: nobody wants the rest."""
        self._pools_of: list[list[int]] = [[] for _ in claims]
        for index, pool in enumerate(pools):
            for taker in pool.takers:
                self._pools_of[taker].append(index)
        self._neighbours = [dict.fromkeys(indexes) for indexes in self._pools_of]
        self._waiting = dict.fromkeys(range(len(pools)))
        self._level = 0.0
        self._tolerance = TOLERANCE_GPUS if len(pools) <= FEW_POOLS else ROUGH_GPUS
        self._num_left = NUM_FILLS
        if len(pools) > FEW_POOLS:
            num_visits = sum(len(pool.takers) for pool in pools)
            self._num_left = max(NUM_ROUGH_FILLS, NUM_ROUNDS * num_visits)

    def settle(self) -> None:
        """Until nothing moves, or it has lasted too long."""
        while self._waiting and self._num_left > 0:
            while self._waiting and self._num_left > 0:
                self._refill(next(iter(self._waiting)))
            for claim in range(len(self._claims)):
                if len(self._pools_of[claim]) > 1:
                    self._shift(claim)

    def even_out(self) -> None:
        """Until nobody could have more at the cost of one who has more for its weight."""
        for index in list(self._waiting):
            self._refill(index)
        for _ in range(NUM_PATHS):
            low = [
                each for each, c in enumerate(self._claims) if self.got[each] < c.cap_gpus - NEAR
            ]
            low.sort(key=self._height)
            if not any(self._raise(claim) for claim in low):
                break

    def _height(self, claim: int) -> float:
        return self.got[claim] / self._claims[claim].weight

    def _raise(self, claim: int) -> bool:
        """By the path to who has the most for its weight, or to room that nobody uses."""
        came = dict[int, Step | None].fromkeys(self._pools_of[claim])
        best, end, loser = 0.0, -1, -1
        unseen = list(came)
        for pool in unseen:
            if self._unused(pool) > NEAR:
                best, end, loser = math.inf, pool, -1
                break
            for other in self._others(pool, claim):
                if self._height(other) > best and self.got[other] > self._claims[other].floor_gpus:
                    best, end, loser = self._height(other), pool, other
                for step in self._pools_of[other]:
                    if step not in came:
                        came[step] = (pool, other)
                        unseen.append(step)
        return best > self._height(claim) and self._move(claim, came, end, loser)

    def _others(self, pool: int, claim: int) -> list[int]:
        return [each for each, part in self._parts[pool].items() if part > NEAR and each != claim]

    def _unused(self, pool: int) -> float:
        return self._pools[pool].num_gpus - sum(self._parts[pool].values())

    def _move(self, claim: int, came: dict[int, Step | None], end: int, loser: int) -> bool:
        """As much along the path as makes both ends even, or as there is."""
        path, pool = list[tuple[int, int, int]](), end
        while (step := came[pool]) is not None:
            path.append((*step, pool))
            pool = step[0]
        one = self._claims[claim]
        most = [self._parts[before][each] for before, each, _ in path]
        most.append(one.cap_gpus - self.got[claim])
        if loser < 0:
            most.append(self._unused(end))
        else:
            other = self._claims[loser]
            gap = self._height(loser) - self._height(claim)
            most.append(gap / (1.0 / one.weight + 1.0 / other.weight))
            most += [self._parts[end][loser], self.got[loser] - other.floor_gpus]
        amount = min(most)
        if amount <= NEAR:
            return False
        for before, each, after in path:
            self._give(before, each, -amount)
            self._give(after, each, amount)
        self._give(pool, claim, amount)
        if loser >= 0:
            self._give(end, loser, -amount)
        return True

    def _give(self, pool: int, claim: int, amount: float) -> None:
        self._parts[pool][claim] += amount
        self.got[claim] += amount

    def _refill(self, index: int) -> None:
        pool, parts, got = self._pools[index], self._parts[index], self.got
        self._num_left -= len(pool.takers)
        elsewhere = [got[taker] - parts[taker] for taker in pool.takers]
        filled = self._even(pool, elsewhere)
        if filled is None:
            claims = [self._claims[taker] for taker in pool.takers]
            filled, self._levels[index] = fill(claims, elsewhere, pool.num_gpus)
        else:
            self._levels[index] = self._level
        for taker, has, part in zip(pool.takers, elsewhere, filled, strict=True):
            if abs(part - parts[taker]) > self._tolerance:
                self._waiting.update(self._neighbours[taker])
            got[taker], parts[taker] = has + part, part
        self._waiting.pop(index, None)

    def _even(self, pool: Pool, elsewhere: Sequence[float]) -> list[float] | None:
        """The parts, where nobody's floor, cap or share elsewhere is in the way: the most cases."""
        claims, num_gpus = self._claims, pool.num_gpus
        level = (num_gpus + sum(elsewhere)) / sum([claims[each].weight for each in pool.takers])
        filled = []
        for taker, has in zip(pool.takers, elsewhere, strict=True):
            weight, floor, cap = claims[taker]
            gpus = weight * level
            if gpus < has or gpus < floor or gpus >= cap:
                return None
            filled.append(gpus - has)
        self._level = level
        return filled

    def _shift(self, claim: int) -> None:
        """Of one that has its cap, so much as makes the water as high in both pools."""
        share = self._claims[claim]
        if self.got[claim] < share.cap_gpus - TOLERANCE_GPUS:
            return
        pools = self._pools_of[claim]
        used = [each for each in pools if self._parts[each][claim] > TOLERANCE_GPUS]
        into = [each for each in pools if self._room(each) > TOLERANCE_GPUS]
        if not used or not into:
            return
        low, high = min(used, key=self._levels.__getitem__), max(into, key=self._levels.__getitem__)
        gap, amount = self._levels[high] - self._levels[low], self._parts[low][claim]
        if not gap > 0.0:
            return
        if gap < math.inf:
            amount = min(amount, gap / (1.0 / self._rising(low) + 1.0 / self._rising(high)))
        amount = min(amount, 0.5 * self._room(high))  # all of it would only turn the two about
        if amount > TOLERANCE_GPUS:
            self._parts[low][claim] -= amount
            self._parts[high][claim] += amount
            self._waiting.update(dict.fromkeys((high, low)))

    def _room(self, index: int) -> float:
        """GPUs for one who has its cap, if others there give way to it."""
        is_left = self._levels[index] == math.inf
        used = sum(self._parts[index].values()) if is_left else 0.0
        return self._pools[index].num_gpus - used

    def _rising(self, index: int) -> float:
        """GPUs that its water takes to rise by one."""
        claims = ((self._claims[each], self.got[each]) for each in self._pools[index].takers)
        return sum(c.weight for c, has in claims if has < c.cap_gpus) or 1e-9


def max_min(claims: Sequence[Share], pools: Sequence[Pool]) -> list[float]:
    """The GPUs of each claim."""
    water = _Water(claims, pools)
    water.settle()
    if len(pools) <= FEW_POOLS:
        water.even_out()
    return water.got


def fill(
    claims: Sequence[Share], elsewhere: Sequence[float], num_gpus: int
) -> tuple[list[float], float]:
    """What each gets of the pool, having something elsewhere; and how high the water stands."""
    rooms = [max(0.0, c.cap_gpus - has) for c, has in zip(claims, elsewhere, strict=True)]
    if sum(rooms) <= num_gpus:
        return rooms, math.inf
    needs = [
        min(room, max(0.0, claim.floor_gpus - has))
        for claim, has, room in zip(claims, elsewhere, rooms, strict=True)
    ]
    wanted = sum(needs)
    if wanted > num_gpus:
        return [need * num_gpus / wanted for need in needs], 0.0
    level = _level(claims, elsewhere, needs, num_gpus - wanted)
    return [
        max(need, min(room, claim.weight * level - has))
        for claim, has, need, room in zip(claims, elsewhere, needs, rooms, strict=True)
    ], level


def _level(
    claims: Sequence[Share], elsewhere: Sequence[float], needs: Sequence[float], left: float
) -> float:
    """How high the water stands when so much is poured in: it rises from one bend to the next."""
    bends = []
    for claim, has, need in zip(claims, elsewhere, needs, strict=True):
        if has + need < claim.cap_gpus:
            bends.append(((has + need) / claim.weight, claim.weight))
            bends.append((claim.cap_gpus / claim.weight, -claim.weight))
    bends.sort()
    level, weight = 0.0, 0.0
    for bend, change in bends:
        if weight > 0.0 and (bend - level) * weight >= left:
            return level + left / weight
        left -= (bend - level) * weight
        level, weight = bend, weight + change
    return level
