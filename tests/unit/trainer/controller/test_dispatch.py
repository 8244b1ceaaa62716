"""Dispatch: no row is lost, doubled or read; everything else goes to every head.

Shares: each row once, groups whole, heads even.
"""

from collections import Counter
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.core.errors import DispatchError
from rollmesh.tensors.handles import RTensor
from rollmesh.trainer.controller.dispatch import (
    ROW_WEIGHTS,
    Arguments,
    Dispatch,
    DispatchRule,
    HeadShare,
    Uneven,
    deal_rows,
    dispatch_locally,
    length_of,
    split_call,
)
from tests.unit.trainer.controller.handles import handle


class Pair(NamedTuple):
    chosen: list[RTensor]
    scale: float


class Batch(msgspec.Struct):
    rows: list[dict[str, RTensor]]
    name: str = "b"


def rows_of(*lengths: int) -> list[dict[str, RTensor]]:
    return [{"token_ids": handle(length), "values": handle(length, 8)} for length in lengths]


def at_heads(dispatch: Dispatch, name: str) -> list[Any]:
    return [part.kwargs[name] for part in dispatch.parts]


@given(st.lists(st.integers(0, 999), min_size=1, max_size=30), st.integers(1, 5))
def test_rows_are_partitioned_without_duplication(lengths: list[int], num_heads: int) -> None:
    rows = rows_of(*lengths)
    dispatch = split_call(Arguments((rows,)), num_heads, DispatchRule(uneven="pad"))
    assert dispatch.shares is not None
    dealt = [
        each
        for part, share in zip(dispatch.parts, dispatch.shares, strict=True)
        for each in part.args[0][: share.num_real]
    ]
    assert sorted(each["token_ids"].shard_id for each in dealt) == [
        row["token_ids"].shard_id for row in rows
    ]


def test_every_head_gets_rows_of_every_part() -> None:
    rows = rows_of(9, 8, 2, 1)
    whole = split_call(Arguments((rows,)), 2, DispatchRule()).shares
    apart = split_call(Arguments((rows,)), 2, DispatchRule(parts=["a", "b", "b", "a"])).shares
    assert whole is not None
    assert apart is not None
    assert [set(share.rows) for share in whole] == [{0, 3}, {1, 2}]
    assert [set(share.rows) for share in apart] == [{0, 2}, {1, 3}]


def test_parts_that_are_not_one_per_row_are_refused() -> None:
    with pytest.raises(DispatchError, match="parts: 1 are given for 2 rows"):
        split_call(Arguments((rows_of(1, 2),)), 2, DispatchRule(parts=[0]))


def test_argument_without_rows_goes_unchanged_to_every_head() -> None:
    settings, alone, plain = {"rate": 0.1}, handle(3), [0.9, 0.95]
    arguments = Arguments((rows_of(4, 4),), {"settings": settings, "mean": alone, "betas": plain})
    dispatch = split_call(arguments, 2, DispatchRule())
    assert all(each is settings for each in at_heads(dispatch, "settings"))
    assert all(each is alone for each in at_heads(dispatch, "mean"))
    assert all(each is plain for each in at_heads(dispatch, "betas"))


def test_a_call_without_rows_is_the_same_at_every_head() -> None:
    arguments = Arguments((1, "x"), {"mean": handle(3)})
    assert split_call(arguments, 3, DispatchRule()) == Dispatch((arguments,) * 3, None)


def test_columns_are_split_alike_wherever_they_are_nested() -> None:
    ids, values, scores = ([handle(n) for n in (9, 1, 8, 2)] for _ in range(3))
    arguments = Arguments(({"ids": ids, "deep": (Pair(values, 0.5),)},), {"scores": scores})
    dispatch = split_call(arguments, 2, DispatchRule())
    assert dispatch.shares is not None
    for part, share in zip(dispatch.parts, dispatch.shares, strict=True):
        pair = part.args[0]["deep"][0]
        assert part.args[0]["ids"] == [ids[row] for row in share.rows]
        assert pair == Pair([values[row] for row in share.rows], 0.5)
        assert part.kwargs["scores"] == [scores[row] for row in share.rows]
    assert [sorted(share.rows) for share in dispatch.shares] == [[0, 1], [2, 3]]


def test_rows_within_a_struct_are_split_without_changing_the_struct() -> None:
    batch = Batch(rows_of(5, 4))
    dispatch = split_call(Arguments((batch,)), 2, DispatchRule())
    assert [part.args[0] for part in dispatch.parts] == [
        Batch([batch.rows[0]]),
        Batch([batch.rows[1]]),
    ]
    assert len(batch.rows) == 2


def test_rows_of_pairs_stay_pairs() -> None:
    rows = rows_of(1, 2, 30, 40, 5, 6, 7, 8)
    dispatch = split_call(Arguments((rows,)), 2, DispatchRule(group_size=2))
    assert dispatch.shares is not None
    for share in dispatch.shares:
        pairs = list(zip(share.rows[::2], share.rows[1::2], strict=True))
        assert all(second == first + 1 and not first % 2 for first, second in pairs)


def test_rows_that_do_not_divide_into_pairs_are_refused() -> None:
    with pytest.raises(DispatchError, match="3 rows do not divide into groups of 2"):
        split_call(Arguments((rows_of(1, 2, 3),)), 1, DispatchRule(group_size=2))


def test_siblings_stay_at_one_head_whatever_their_number() -> None:
    groups = ["a", "b", "a", "c", "a", "d"]
    dispatch = split_call(Arguments((rows_of(3, 9, 3, 8, 3, 1),)), 2, DispatchRule(groups=groups))
    assert dispatch.shares is not None
    groups_by_head = [{groups[row] for row in share.rows} for share in dispatch.shares]
    assert groups_by_head[0].isdisjoint(groups_by_head[1])
    assert groups_by_head[0] | groups_by_head[1] == set(groups)


def test_an_uneven_number_is_refused_unless_padding_is_chosen() -> None:
    with pytest.raises(DispatchError, match="3 rows do not divide by 2 heads"):
        split_call(Arguments((rows_of(1, 2, 3),)), 2, DispatchRule())


def test_padding_is_sent_to_the_heads_as_rows_of_weight_0() -> None:
    dispatch = split_call(Arguments((rows_of(3, 2, 1),)), 2, DispatchRule(uneven="pad"))
    assert at_heads(dispatch, "row_weights") == [[1.0, 0.0], [1.0, 1.0]]
    assert [len(part.args[0]) for part in dispatch.parts] == [2, 2]


def test_heads_without_a_row_get_only_padding() -> None:
    dispatch = split_call(Arguments((rows_of(7),)), 3, DispatchRule(uneven="pad"))
    assert at_heads(dispatch, "row_weights") == [[1.0], [0.0], [0.0]]


def test_row_weights_of_the_callers_own_are_not_overwritten() -> None:
    with pytest.raises(DispatchError, match="row_weights"):
        split_call(Arguments((rows_of(7),), {"row_weights": [1.0]}), 1, DispatchRule(uneven="pad"))


def test_columns_of_other_lengths_are_named() -> None:
    columns = {"ids": [handle(1), handle(1)], "images": [handle(1)]}
    with pytest.raises(DispatchError, match="2 in argument 0, 1 in argument 0"):
        split_call(Arguments((columns,)), 1, DispatchRule())


def test_a_row_may_lack_a_tensor() -> None:
    images = [None, handle(3, 4)]
    dispatch = split_call(Arguments((rows_of(2, 2),), {"images": images}), 2, DispatchRule())
    assert at_heads(dispatch, "images") == [[None], [images[1]]]


@pytest.mark.parametrize(
    ("name", "rule"),
    [("lengths", DispatchRule(lengths=[1])), ("groups", DispatchRule(groups="ab"))],
)
def test_values_given_for_rows_apply_to_each_row(name: str, rule: DispatchRule) -> None:
    with pytest.raises(DispatchError, match=f"{name}: . are given for 3 rows"):
        split_call(Arguments((rows_of(1, 2, 3),)), 1, rule)


def test_given_lengths_take_precedence() -> None:
    dispatch = split_call(Arguments((rows_of(1, 1, 1, 1),)), 2, DispatchRule(lengths=[9, 1, 1, 8]))
    assert dispatch.shares is not None
    assert [sorted(share.rows) for share in dispatch.shares] == [[0, 2], [1, 3]]


def test_length_of_a_row_ignores_its_images() -> None:
    assert length_of({"token_ids": handle(7), "mask": handle(7), "pixels": handle(500, 8)}) == 7
    assert length_of([handle(3, 4), handle(2, 2)]) == 12
    assert length_of(handle()) == 1
    assert length_of({"none": None}) == 0


@pytest.mark.parametrize("uneven", ["refuse", "pad"])
def test_rows_that_are_already_split_are_kept_with_equal_weights(uneven: Uneven) -> None:
    whole = Arguments(([handle(3), handle(5)], 0.5), {"name": "x"})
    left, num_rows = dispatch_locally(whole, DispatchRule(uneven=uneven), RTensor)
    weights = {ROW_WEIGHTS: [1.0, 1.0]} if uneven == "pad" else {}
    assert (left.args, left.kwargs, num_rows) == (whole.args, whole.kwargs | weights, 2)
    assert dispatch_locally(Arguments((1, [2.0])), DispatchRule(uneven=uneven), RTensor)[1] == 0
    with pytest.raises(DispatchError, match="2 rows do not divide into groups of 3"):
        dispatch_locally(whole, DispatchRule(group_size=3, uneven=uneven), RTensor)


@st.composite
def _dealable(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Random lengths, groups in any order, and a number of heads."""
    groups = draw(st.lists(st.integers(0, 7), min_size=1, max_size=40))
    lengths = draw(st.lists(st.integers(0, 9999), min_size=len(groups), max_size=len(groups)))
    return lengths, groups, draw(st.integers(1, 6))


def _groups_of(share: HeadShare, groups: list[int]) -> list[int]:
    """The groups in a share, once for each run of neighbouring rows."""
    found: list[int] = []
    for place, row in enumerate(share.rows):
        is_new = (
            not place or place == share.num_real or groups[row] != groups[share.rows[place - 1]]
        )
        found += [groups[row]] if is_new else []
    return found


@given(_dealable())
def test_every_row_is_at_exactly_one_head(dealable: tuple[list[int], list[int], int]) -> None:
    lengths, groups, num_heads = dealable
    shares = deal_rows(lengths, groups, num_heads, "pad")
    dealt = [row for share in shares for row in share.rows[: share.num_real]]
    assert sorted(dealt) == list(range(len(groups)))
    assert len(shares) == num_heads


@given(_dealable())
def test_a_group_stays_together_in_order(dealable: tuple[list[int], list[int], int]) -> None:
    lengths, groups, num_heads = dealable
    for share in deal_rows(lengths, groups, num_heads, "pad"):
        real = share.rows[: share.num_real]
        found = _groups_of(HeadShare(real, len(real)), groups)
        assert max(Counter(found).values(), default=1) == 1
        for group in found:
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
    counts = [Counter(g % num_parts for g in _groups_of(share, groups)) for share in shares]
    assert all(each == counts[0] for each in counts)
    real = [row for share in shares for row in share.rows[: share.num_real]]
    assert sorted(real) == list(range(len(groups)))
    for part, num in counts[0].items():
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


def test_the_longest_row_goes_to_the_head_with_least() -> None:
    shares = deal_rows([8, 7, 6, 5, 4, 3], range(6), 2, "refuse")
    assert shares == (HeadShare((0, 3, 4), 3), HeadShare((1, 2, 5), 3))


def test_padding_has_no_weight() -> None:
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
