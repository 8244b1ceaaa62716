"""Weighted max-min: what each claim ideally has of pools of GPUs that not all claims can use.

A pool is a set of GPUs with the same claims upon it; GPUs are as good as liquid here. A claim rises
with the water, `weight` times its level, from its floor to its cap, and wherever it stands in a
pool nobody in that pool has more than it for its weight, unless by a floor. Where all floors do not
fit, they are cut in proportion.

The answer is found pool by pool: each is filled again, exactly, around what its claims have
elsewhere, until nothing moves by more than the tolerance. The even spread is the one minimum of
sum(gpus^2 / weight) over what the pools allow, and each filling comes closer to it (Fujishige 1980,
lexicographically optimal bases); with one pool it is there at once.

Invariants: never more than the cap, nor than the pools hold; the same input gives the same answer.
A large fleet is filled at most NUM_FILLS times and may be off by a little. Driven by the policies.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

TOLERANCE_GPUS = 1e-4
NUM_FILLS = 20_000
"""Visits of a claim to a pool, at most, once each pool has been filled twice."""


SPILL = 1e-4
"""Of a GPU that nobody can use: who has its cap takes it all the same, so that its other pools are
left to others, and drops it in the end."""


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


def max_min(claims: Sequence[Share], pools: Sequence[Pool]) -> list[float]:
    """The GPUs of each claim."""
    got = [0.0] * len(claims)
    parts = [[0.0] * len(pool.takers) for pool in pools]
    pools_of: list[list[int]] = [[] for _ in claims]
    for index, pool in enumerate(pools):
        for taker in pool.takers:
            pools_of[taker].append(index)
    waiting = deque(range(len(pools)))
    is_waiting = [True] * len(pools)
    num_left = NUM_FILLS + 2 * sum(len(pool.takers) for pool in pools)
    while waiting and num_left > 0:
        index = waiting.popleft()
        is_waiting[index] = False
        num_left -= len(pools[index].takers)
        for taker in _refill(claims, pools[index], parts[index], got):
            for other in pools_of[taker]:
                if other != index and not is_waiting[other]:
                    is_waiting[other] = True
                    waiting.append(other)
    return [min(claim.cap_gpus, gpus) for claim, gpus in zip(claims, got, strict=True)]


def _refill(claims: Sequence[Share], pool: Pool, part: list[float], got: list[float]) -> list[int]:
    """Fill one pool anew; returns whose share has moved."""
    elsewhere = [got[taker] - held for taker, held in zip(pool.takers, part, strict=True)]
    filled = _fill([claims[taker] for taker in pool.takers], elsewhere, pool.num_gpus)
    moved = []
    for place, taker in enumerate(pool.takers):
        if abs(filled[place] - part[place]) > TOLERANCE_GPUS:
            moved.append(taker)
        got[taker] = elsewhere[place] + filled[place]
        part[place] = filled[place]
    return moved


def _fill(claims: Sequence[Share], elsewhere: Sequence[float], num_gpus: int) -> list[float]:
    """What each gets of the pool, all of which is given, having something elsewhere."""
    needs = [max(0.0, claim.floor_gpus - has) for claim, has in zip(claims, elsewhere, strict=True)]
    wanted = sum(needs)
    if wanted > num_gpus:
        return [need * num_gpus / wanted for need in needs]
    level = _level(claims, elsewhere, needs, num_gpus - wanted)
    return [
        max(need, _height(claim, level) - has)
        for claim, has, need in zip(claims, elsewhere, needs, strict=True)
    ]


def _height(claim: Share, level: float) -> float:
    """How much it has in all when the water stands there: little more, once it has its cap."""
    gpus = claim.weight * level
    return gpus if gpus <= claim.cap_gpus else claim.cap_gpus + SPILL * (gpus - claim.cap_gpus)


def _level(
    claims: Sequence[Share], elsewhere: Sequence[float], needs: Sequence[float], left: float
) -> float:
    """How high the water stands when so much is poured in: it rises from one bend to the next."""
    bends = []
    for claim, has, need in zip(claims, elsewhere, needs, strict=True):
        cap, weight, has_first = claim.cap_gpus, claim.weight, has + need
        if has_first < cap:
            bends.append((has_first / weight, weight))
            bends.append((cap / weight, (SPILL - 1.0) * weight))
        else:
            bends.append(((cap + (has_first - cap) / SPILL) / weight, SPILL * weight))
    bends.sort()
    level, weight = 0.0, 0.0
    for bend, change in bends:
        if (bend - level) * weight >= left and weight > 0.0:
            break
        left -= (bend - level) * weight
        level, weight = bend, weight + change
    return level + left / weight
