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
    return got


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


def _fill(claims: Sequence[Share], elsewhere: Sequence[float], num_gpus: float) -> list[float]:
    """What each gets of the pool, having something elsewhere."""
    rooms = [max(0.0, c.cap_gpus - has) for c, has in zip(claims, elsewhere, strict=True)]
    if sum(rooms) <= num_gpus:
        return rooms
    needs = [
        min(room, max(0.0, claim.floor_gpus - has))
        for claim, has, room in zip(claims, elsewhere, rooms, strict=True)
    ]
    if sum(needs) > num_gpus:
        cut = num_gpus / sum(needs)
        return [need * cut for need in needs]
    level = _level(claims, elsewhere, needs, rooms, num_gpus)
    return [
        max(need, min(room, claim.weight * level - has))
        for claim, has, need, room in zip(claims, elsewhere, needs, rooms, strict=True)
    ]


def _level(
    claims: Sequence[Share],
    elsewhere: Sequence[float],
    needs: Sequence[float],
    rooms: Sequence[float],
    num_gpus: float,
) -> float:
    """How high the water stands when the pool is empty: it rises from one bend to the next."""
    bends = []
    for claim, has, need, room in zip(claims, elsewhere, needs, rooms, strict=True):
        if room > need:
            bends.append(((has + need) / claim.weight, claim.weight))
            bends.append(((has + room) / claim.weight, -claim.weight))
    bends.sort()
    left, level, weight = num_gpus - sum(needs), 0.0, 0.0
    for bend, change in bends:
        if weight > 0.0 and (bend - level) * weight >= left:
            return level + left / weight
        left -= (bend - level) * weight
        level, weight = bend, weight + change
    return level
