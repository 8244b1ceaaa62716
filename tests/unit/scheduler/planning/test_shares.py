"""Shares are weighted max-min over the GPUs that each can use, as exact fractions have it."""

import random

import pytest

from rollmesh.scheduler.planning.shares import Pool, Share, max_min
from tests.unit.scheduler.planning.exact_shares import exact_shares

NEAR_GPUS = 0.02
CHAINS = [847, 1160, 1287, 1485]
"""Seeds where those that have their cap stand in each other's way in a chain."""


def market(seed: int) -> tuple[list[Share], list[Pool]]:
    chance = random.Random(seed)
    num = chance.randint(1, 4)
    claims = [
        Share(float(chance.randint(1, 8)), 0.0, float(chance.randint(0, 12))) for _ in range(num)
    ]
    pools = {
        tuple(sorted(chance.sample(range(num), chance.randint(1, num)))): chance.randint(1, 8)
        for _ in range(chance.randint(1, 5))
    }
    return claims, [Pool(num_gpus, takers) for takers, num_gpus in pools.items()]


def test_shares_are_those_of_exact_fractions() -> None:
    off = []
    for seed in [*range(200), *CHAINS]:
        claims, pools = market(seed)
        pairs = zip(max_min(claims, pools), exact_shares(claims, pools), strict=True)
        off.append(max(abs(one - float(other)) for one, other in pairs))
    assert max(off) < NEAR_GPUS


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


def test_who_has_its_cap_makes_room_where_others_want_nothing_more_either() -> None:
    """The first leaves the second's pool for its own, the second the first pool to the third."""
    claims = [Share(1.0, 0.0, 2.0), Share(3.0, 0.0, 1.0), Share(1.0, 0.0, 1.0)]
    got = max_min(claims, [Pool(1, (0, 1, 2)), Pool(1, (0, 1)), Pool(2, (0,))])
    assert got == pytest.approx([2.0, 1.0, 1.0], abs=NEAR_GPUS)


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
