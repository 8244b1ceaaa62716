"""Reference implementation of weighted max-min shares: exact fractions, by subsets of claims.

- The lowest level is that of the subset of claims with the fewest reachable GPUs for its weight; it
  gets exactly that, and the others share the rest.
- Exponential; shares no code with shares.py.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations

from rollmesh.scheduler.planning.shares import IndexedPool, ShareBounds


def exact_shares(claims: Sequence[ShareBounds], pools: Sequence[IndexedPool]) -> list[Fraction]:
    """Shares of claims without floors."""
    got = [Fraction(0)] * len(claims)
    fixed: frozenset[int] = frozenset()
    while len(fixed) < len(claims):
        rest = frozenset(range(len(claims))) - fixed
        most = _most(claims, pools, fixed)

        def level(some: frozenset[int], most: Fraction = most) -> Fraction:
            with_them = _most(claims, pools, fixed | some) - most  # noqa: B023 - used at once
            return with_them / sum(Fraction(claims[each].weight) for each in some)

        least = min(map(level, _subsets(rest)))
        tight = frozenset().union(*(some for some in _subsets(rest) if level(some) == least))
        for each in tight:
            got[each] = least * Fraction(claims[each].weight)
        fixed |= tight
    return got


def _most(
    claims: Sequence[ShareBounds], pools: Sequence[IndexedPool], some: frozenset[int]
) -> Fraction:
    """GPUs that these claims can have together: what a subset can reach, and the caps of the
    others."""
    bounds = [sum((Fraction(claims[each].cap_gpus) for each in some), Fraction(0))]
    for served in _subsets(some):
        reached = sum(pool.num_gpus for pool in pools if not served.isdisjoint(pool.takers))
        capped = sum((Fraction(claims[each].cap_gpus) for each in some - served), Fraction(0))
        bounds.append(reached + capped)
    return min(bounds)


def _subsets(of: frozenset[int]) -> Iterator[frozenset[int]]:
    for size in range(1, len(of) + 1):
        yield from map(frozenset, combinations(sorted(of), size))
