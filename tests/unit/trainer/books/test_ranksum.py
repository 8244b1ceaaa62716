"""The rank-sum test is that of the books."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.trainer.books.ranksum import rank_sum

VALUES = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=20)


def pairs_won(first: Sequence[float], second: Sequence[float]) -> float:
    """As the definition has it."""
    won = sum((a > b) + (a == b) / 2 for a, b in itertools.product(first, second))
    return won / (len(first) * len(second))


@given(first=VALUES, second=VALUES)
def test_the_share_of_pairs_is_counted_with_ties_as_halves(
    first: list[float], second: list[float]
) -> None:
    found, swapped = rank_sum(first, second), rank_sum(second, first)
    assert found is not None
    assert swapped is not None
    assert found.share_larger == pytest.approx(pairs_won(first, second))
    assert swapped.share_larger == pytest.approx(1.0 - found.share_larger)
    assert swapped.p == pytest.approx(found.p)


def test_the_probability_is_that_of_shuffled_groups() -> None:
    """Against a permutation test, which assumes nothing."""
    chance = random.Random(0)
    first = [float(chance.randint(2, 12)) for _ in range(20)]
    second = [float(chance.randint(0, 10)) for _ in range(25)]
    found = rank_sum(first, second)
    assert found is not None
    both, num_as_far = first + second, 0
    far = abs(found.share_larger - 0.5)
    for _ in range(4000):
        chance.shuffle(both)
        shuffled = rank_sum(both[:20], both[20:])
        assert shuffled is not None
        num_as_far += abs(shuffled.share_larger - 0.5) >= far - 1e-12
    assert found.p == pytest.approx(num_as_far / 4000, rel=0.25)


def test_a_textbook_example() -> None:
    """U = 11 of 36 pairs; sd = sqrt(6 * 6 / 12 * 13); z = (18 - 11 - 1/2) / sd = 1.0408."""
    found = rank_sum([1, 2, 4, 5, 8, 12], [3, 6, 7, 9, 10, 11])
    assert found is not None
    assert found.share_larger == pytest.approx(11 / 36)
    assert found.p == pytest.approx(0.2980, abs=1e-4)


def test_equal_values_differ_in_nothing() -> None:
    found = rank_sum([1.0] * 9, [1.0] * 9)
    assert found is not None
    assert (found.share_larger, found.p) == (0.5, 1.0)
    assert rank_sum([], [1.0]) is None
