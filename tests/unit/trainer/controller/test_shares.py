"""Shares: each row once, groups whole, heads even."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.core.errors import DispatchError
from rollmesh.trainer.controller.dispatch import HeadShare, deal_rows


@st.composite
def _dealable(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Lengths, groups in any order, and a number of heads."""
    groups = draw(st.lists(st.integers(0, 7), min_size=1, max_size=40))
    lengths = draw(st.lists(st.integers(0, 9999), min_size=len(groups), max_size=len(groups)))
    return lengths, groups, draw(st.integers(1, 6))


def _groups_of(share: HeadShare, groups: list[int]) -> list[int]:
    """The groups in a share, each as often as its rows come together."""
    told: list[int] = []
    for place, row in enumerate(share.rows):
        is_new = (
            not place or place == share.num_real or groups[row] != groups[share.rows[place - 1]]
        )
        told += [groups[row]] if is_new else []
    return told


@given(_dealable())
def test_every_row_is_at_exactly_one_head(dealable: tuple[list[int], list[int], int]) -> None:
    lengths, groups, num_heads = dealable
    shares = deal_rows(lengths, groups, num_heads, "pad")
    dealt = [row for share in shares for row in share.rows[: share.num_real]]
    assert sorted(dealt) == list(range(len(groups)))
    assert len(shares) == num_heads


@given(_dealable())
def test_a_group_stands_together_in_its_order(dealable: tuple[list[int], list[int], int]) -> None:
    lengths, groups, num_heads = dealable
    for share in deal_rows(lengths, groups, num_heads, "pad"):
        real = share.rows[: share.num_real]
        told = _groups_of(HeadShare(real, len(real)), groups)
        assert max(Counter(told).values(), default=1) == 1
        for group in told:
            rows = [row for row in range(len(groups)) if groups[row] == group]
            assert [row for row in real if groups[row] == group] == rows


@given(_dealable())
def test_all_heads_have_as_many_groups(dealable: tuple[list[int], list[int], int]) -> None:
    lengths, groups, num_heads = dealable
    shares = deal_rows(lengths, groups, num_heads, "pad")
    assert len({len(_groups_of(share, groups)) for share in shares}) == 1
    assert sum(len(_groups_of(share, groups)) for share in shares) < len(set(groups)) + num_heads


@given(_dealable())
def test_heads_differ_by_no_more_than_the_longest_group_from_the_shortest(
    dealable: tuple[list[int], list[int], int],
) -> None:
    lengths, groups, num_heads = dealable
    sums: Counter[int] = Counter()
    for length, group in zip(lengths, groups, strict=True):
        sums[group] += length
    shares = deal_rows(lengths, groups, num_heads, "pad")
    loads = [sum(lengths[row] for row in share.rows) for share in shares]
    assert max(loads) - min(loads) <= max(sums.values()) - min(sums.values())


@given(_dealable())
def test_padding_repeats_the_shortest_group_whole(
    dealable: tuple[list[int], list[int], int],
) -> None:
    lengths, groups, num_heads = dealable
    sums: Counter[int] = Counter()
    for length, group in zip(lengths, groups, strict=True):
        sums[group] += length
    for share in deal_rows(lengths, groups, num_heads, "pad"):
        padding = share.rows[share.num_real :]
        if padding:
            assert sums[groups[padding[0]]] == min(sums.values())
            assert list(padding) == [
                r for r in range(len(groups)) if groups[r] == groups[padding[0]]
            ]


@given(_dealable())
def test_refusing_is_for_groups_that_do_not_divide(
    dealable: tuple[list[int], list[int], int],
) -> None:
    lengths, groups, num_heads = dealable
    if len(set(groups)) % num_heads:
        with pytest.raises(DispatchError, match="do not divide"):
            deal_rows(lengths, groups, num_heads, "refuse")
    else:
        shares = deal_rows(lengths, groups, num_heads, "refuse")
        assert shares == deal_rows(lengths, groups, num_heads, "pad")
        assert all(len(share.rows) == share.num_real for share in shares)


@given(_dealable(), st.integers(1, 4))
def test_all_heads_have_as_many_groups_of_every_part(
    dealable: tuple[list[int], list[int], int], num_parts: int
) -> None:
    lengths, groups, num_heads = dealable
    parts = [group % num_parts for group in groups]
    shares = deal_rows(lengths, groups, num_heads, "pad", parts)
    told = [Counter(g % num_parts for g in _groups_of(share, groups)) for share in shares]
    assert all(each == told[0] for each in told)
    real = [row for share in shares for row in share.rows[: share.num_real]]
    assert sorted(real) == list(range(len(groups)))
    for part, num in told[0].items():
        assert 0 <= num * num_heads - len({g for g in groups if g % num_parts == part}) < num_heads


@given(_dealable(), st.integers(1, 4))
def test_parts_leave_heads_as_even_as_they_were(
    dealable: tuple[list[int], list[int], int], num_parts: int
) -> None:
    lengths, groups, num_heads = dealable
    sums: Counter[int] = Counter()
    for length, group in zip(lengths, groups, strict=True):
        sums[group] += length
    shares = deal_rows(lengths, groups, num_heads, "pad", [group % num_parts for group in groups])
    loads = [sum(lengths[row] for row in share.rows) for share in shares]
    assert max(loads) - min(loads) <= max(sums.values()) - min(sums.values())


def test_padding_of_one_part_counts_when_the_next_is_dealt() -> None:
    lengths = [100, *[50, 40, 1] * 3]
    shares = deal_rows(lengths, range(10), 3, "pad", [0, *[1] * 3, *[2] * 3, *[3] * 3])
    loads = [sum(lengths[row] for row in share.rows) for share in shares]
    assert max(loads) - min(loads) <= 50 - 1


def test_the_longest_goes_to_whom_has_least() -> None:
    shares = deal_rows([8, 7, 6, 5, 4, 3], range(6), 2, "refuse")
    assert shares == (HeadShare((0, 3, 4), 3), HeadShare((1, 2, 5), 3))


def test_padding_weighs_nothing() -> None:
    first, second, third = deal_rows([5, 3, 9, 4], range(4), 3, "pad")
    assert (first.row_weights(), second.row_weights(), third.row_weights()) == (
        [1.0, 0.0],
        [1.0, 0.0],
        [1.0, 1.0],
    )


def test_pairs_are_padded_with_a_pair() -> None:
    shares = deal_rows([1, 1, 5, 5, 2, 2], [0, 0, 1, 1, 2, 2], 2, "pad")
    assert shares == (HeadShare((2, 3, 0, 1), 2), HeadShare((0, 1, 4, 5), 4))


def test_no_rows_are_refused_in_one_line() -> None:
    with pytest.raises(DispatchError, match="no rows"):
        deal_rows([], [], 2, "pad")
