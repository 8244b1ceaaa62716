"""Shares are weighted max-min over the GPUs that each can use, as exact fractions have it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.scheduler.planning.shares import Pool, Share, max_min
from tests.unit.scheduler.planning.exact_shares import exact_shares

NEAR_GPUS = 0.02


@st.composite
def markets(draw: st.DrawFn) -> tuple[list[Share], list[Pool]]:
    num = draw(st.integers(1, 4))
    weights, caps = st.integers(1, 8), st.integers(0, 12)
    claims = [Share(float(draw(weights)), 0.0, float(draw(caps))) for _ in range(num)]
    takers = st.sets(st.integers(0, num - 1), min_size=1).map(lambda some: tuple(sorted(some)))
    pools = draw(st.dictionaries(takers, st.integers(1, 8), min_size=1, max_size=5))
    return claims, [Pool(num_gpus, some) for some, num_gpus in pools.items()]


@settings(max_examples=60)
@given(markets())
def test_shares_are_those_of_exact_fractions(market: tuple[list[Share], list[Pool]]) -> None:
    claims, pools = market
    got = max_min(claims, pools)
    for one, other in zip(got, exact_shares(claims, pools), strict=True):
        assert abs(one - float(other)) < NEAR_GPUS


def test_gpus_that_only_one_can_use_leave_the_others_more_of_the_rest() -> None:
    claims = [Share(1.0, 0.0, 99.0), Share(1.0, 0.0, 99.0)]
    assert max_min(claims, [Pool(4, (0,)), Pool(4, (0, 1))]) == [4.0, 4.0]


def test_what_one_cannot_fill_goes_to_the_others_by_weight() -> None:
    claims = [Share(1.0, 0.0, 1.0), Share(1.0, 0.0, 99.0), Share(3.0, 0.0, 99.0)]
    got = max_min(claims, [Pool(9, (0, 1, 2))])
    assert got == pytest.approx([1.0, 2.0, 6.0], abs=NEAR_GPUS)


def test_a_floor_is_met_before_weights_count() -> None:
    claims = [Share(1.0, 5.0, 99.0), Share(9.0, 0.0, 99.0)]
    assert max_min(claims, [Pool(8, (0, 1))]) == [5.0, 3.0]


def test_floors_that_do_not_fit_are_cut_in_proportion() -> None:
    claims = [Share(1.0, 6.0, 99.0), Share(9.0, 2.0, 99.0), Share(9.0, 0.0, 99.0)]
    assert max_min(claims, [Pool(4, (0, 1, 2))]) == [3.0, 1.0, 0.0]


def test_a_chain_of_neighbours_comes_to_rest() -> None:
    """Each pool is shared with the next one alone, and the even spread reaches through them all."""
    num = 12
    claims = [Share(1.0, 0.0, 99.0)] * num
    pools = [Pool(1, (each, each + 1)) for each in range(num - 1)]
    got = max_min(claims, pools)
    assert all(abs(each - (num - 1) / num) < NEAR_GPUS for each in got)


def test_nobody_wants_anything_of_no_gpus() -> None:
    assert max_min([], []) == []
    assert max_min([Share(1.0, 1.0, 4.0)], []) == [0.0]
