"""The rank-sum test of Mann and Whitney (1947): are the values of one group larger than another's?

    U = how often a value of the first is larger than one of the second, over all pairs; ties half
    z = (|U - mean| - 1/2) / sd       mean = n m / 2
    sd^2 = n m / 12 * ((N + 1) - sum(t^3 - t) / (N (N - 1)))    t: sizes of the groups of equal ones

Two-sided, by the normal approximation with its correction for ties and continuity; good from some
eight values on each side. It asks for no distribution, which lengths with long tails have not.
Invariant: swapping the groups swaps `share_larger` with its complement and nothing else. Pure;
driven by bias.py.
"""

import itertools
import math
from collections.abc import Sequence

import msgspec


class RankSum(msgspec.Struct, frozen=True):
    """What the test says."""

    share_larger: float
    """Of all pairs those in which the first group's value is the larger; a tie is half a pair."""
    p: float
    """How probable a difference as large is where there is none."""


def rank_sum(first: Sequence[float], second: Sequence[float]) -> RankSum | None:
    """Of two groups; None where one of them is empty."""
    num_first, num_second = len(first), len(second)
    if not num_first or not num_second:
        return None
    values = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    num, num_pairs = len(values), num_first * num_second
    rank, ranks_of_first, ties = 1, 0.0, 0
    for _, same in itertools.groupby(values, lambda each: each[0]):
        of = [group for _, group in same]
        ranks_of_first += of.count(0) * (rank + (len(of) - 1) / 2)
        rank += len(of)
        ties += len(of) ** 3 - len(of)
    larger = ranks_of_first - num_first * (num_first + 1) / 2
    variance = num_pairs / 12 * (num + 1 - ties / (num * (num - 1)))
    if variance <= 0.0:
        return RankSum(larger / num_pairs, 1.0)
    z = max(0.0, abs(larger - num_pairs / 2) - 0.5) / math.sqrt(variance)
    return RankSum(larger / num_pairs, math.erfc(z / math.sqrt(2.0)))
