"""Merged answers: rows in order, every head's number counted, differences refused.

Encoded values: they arrive as they were sent, and anything else is a WireError.
"""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.core.errors import DispatchError, WireError
from rollmesh.trainer.controller.answers import (
    Reduce,
    Reduction,
    decode_values,
    encode_values,
    merge_answers,
    without_padding,
)
from rollmesh.trainer.controller.dispatch import Arguments, DispatchRule, HeadShare, split_call
from tests.unit.trainer.controller.handles import handle

SHARES = (HeadShare((0, 3), 2), HeadShare((2, 1), 2))


@given(st.lists(st.integers(0, 99), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 3))
def test_rows_come_back_in_the_order_they_were_given_in(
    lengths: list[int], num_heads: int, group_size: int
) -> None:
    rows = [handle(length) for length in lengths for _ in range(group_size)]
    dispatch = split_call(
        Arguments((rows,)), num_heads, DispatchRule(uneven="pad", group_size=group_size)
    )
    assert dispatch.shares is not None
    answers = [
        without_padding({"same": part.args[0]}, len(share.rows), share.num_real)
        for part, share in zip(dispatch.parts, dispatch.shares, strict=True)
    ]
    assert merge_answers(answers, dispatch.shares, Reduce()) == {"same": rows}


def test_numbers_of_all_heads_are_reduced() -> None:
    answers = [{"loss": 1.0, "num_tokens": 10}, {"loss": 4.0, "num_tokens": 30}]
    rules: dict[str, Reduction] = {"loss": "mean", "num_tokens": "sum"}
    joint = merge_answers(answers, None, Reduce(rules=rules, by="num_tokens"))
    assert joint == {"loss": 3.25, "num_tokens": 40}


@pytest.mark.parametrize(("rule", "expected"), [("sum", 6), ("mean", 2.0), ("max", 3), ("min", 1)])
def test_an_answer_that_is_a_number_is_reduced_as_stated(rule: Reduction, expected: float) -> None:
    assert merge_answers([1, 3, 2], None, Reduce(default=rule)) == expected


def test_mean_is_weighted_by_rows_without_padding() -> None:
    shares = (HeadShare((0, 1, 2), 3), HeadShare((3, 0, 0), 1))
    assert merge_answers([1.0, 5.0], shares, Reduce(default="mean")) == 2.0


def test_head_with_only_padding_does_not_affect_a_mean() -> None:
    shares = (HeadShare((0,), 1), HeadShare((0,), 0))
    assert merge_answers([1.5, math.nan], shares, Reduce(default="mean")) == 1.5


def test_a_mean_of_nothing_is_not_a_number() -> None:
    answers = [{"loss": 1.0, "n": 0}, {"loss": 2.0, "n": 0}]
    assert math.isnan(merge_answers(answers, None, Reduce(rules={"loss": "mean"}, by="n"))["loss"])


@pytest.mark.parametrize("rule", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("answers", [[math.nan, 1.0], [1.0, math.nan]])
def test_nan_of_one_head_is_in_the_result(rule: Reduction, answers: list[float]) -> None:
    assert math.isnan(merge_answers(answers, None, Reduce(default=rule)))


def test_a_number_without_a_rule_is_the_same_everywhere_or_named() -> None:
    assert merge_answers([{"step": 3}, {"step": 3}], None, Reduce()) == {"step": 3}
    with pytest.raises(DispatchError, match=r"'step' differs between heads: 3, 4"):
        merge_answers([{"step": 3}, {"step": 4}], None, Reduce())


def test_nan_of_all_heads_counts_as_equal() -> None:
    assert math.isnan(merge_answers([math.nan, math.nan], None, Reduce()))


def test_reduce_rule_without_a_number_is_refused() -> None:
    with pytest.raises(DispatchError, match="there is no number at los "):
        merge_answers([{"loss": 1.0}], None, Reduce(rules={"los": "mean"}, default="sum"))


def test_numbers_within_rows_are_not_reduced() -> None:
    answers = [{"scores": [0.0, 0.3]}, {"scores": [0.2, 0.1]}]
    assert merge_answers(answers, SHARES, Reduce()) == {"scores": [0.0, 0.1, 0.2, 0.3]}


def test_tuples_are_not_rows() -> None:
    answers = [{"norms": (1.0, 5.0)}, {"norms": (2.0, 4.0)}]
    rules: dict[str, Reduction] = {"norms.0": "max", "norms.1": "min"}
    assert merge_answers(answers, SHARES, Reduce(rules=rules)) == {"norms": (2.0, 4.0)}


def test_lists_of_a_call_without_rows_are_merged_by_item() -> None:
    assert merge_answers([[1, 2], [3, 4]], None, Reduce(default="sum")) == [4, 6]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([{"a": 1}, {"b": 1}], "the answer has other keys"),
        ([{"a": [1]}, {"a": [1, 2]}], "'a' at head 0 has 1 entries for 2 rows"),
        ([{"a": (1,)}, {"a": (1, 2)}], "'a' has another length"),
        ([1, "1"], "another type at each head: int, str"),
        ([None, 1], "another type at each head: NoneType, int"),
        ([{"a": handle(2)}, {"a": handle(2)}], "'a' is a tensor of no row"),
        ([{"a": {1}}, {"a": {1}}], "'a' is a set, which cannot be merged"),
        (["x", "y"], "the answer differs between heads: 'x', 'y'"),
    ],
)
def test_answers_that_cannot_be_merged_name_the_place(answers: list[Any], message: str) -> None:
    with pytest.raises(DispatchError, match=message):
        merge_answers(answers, SHARES, Reduce(default="sum"))


@pytest.mark.parametrize("weights", [{}, {"n": "x"}, {"n": -1}, {"n": math.nan}])
def test_a_weight_that_is_none_is_named(weights: dict[str, Any]) -> None:
    with pytest.raises(DispatchError, match="head 1 has no such number"):
        merge_answers([{"n": 1}, weights], None, Reduce(default="mean", by="n"))


def test_ranks_may_answer_none() -> None:
    assert merge_answers([None, None], SHARES, Reduce()) is None


def test_answers_for_padding_are_left_out_at_any_position() -> None:
    answer = {"a": [1, 2, 3], "b": ([4, 5, 6], 7), "c": None}
    assert without_padding(answer, 3, 2) == {"a": [1, 2], "b": ([4, 5], 7), "c": None}


def test_a_list_that_is_not_one_per_row_is_named_at_its_rank() -> None:
    with pytest.raises(DispatchError, match=r"the answer at 'a.0' has 2 entries for 3 rows"):
        without_padding({"a": ([1, 2],)}, 3, 3)


HANDLES = [handle(3), handle(2, 4, dtype="bfloat16"), handle()]

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.sampled_from(HANDLES)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=20,
)


class Batch(msgspec.Struct):
    rows: list[Any]
    name: str


@given(values)
def test_values_arrive_as_they_were_sent(value: Any) -> None:
    arrived = decode_values(encode_values(value))
    assert arrived == value
    assert type(arrived) is type(value)


def test_a_struct_arrives_as_the_dict_of_its_fields() -> None:
    assert decode_values(encode_values((Batch([HANDLES[0]], "b"),))) == (
        {"rows": [HANDLES[0]], "name": "b"},
    )


def test_a_handle_used_in_many_places_travels_once() -> None:
    once, often = encode_values([HANDLES[0]]), encode_values([HANDLES[0]] * 100)
    assert len(often) < len(once) + 100 * 8
    assert decode_values(often) == [HANDLES[0]] * 100


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"batch": [object()]}, r"\.batch\[0\] is a object; store tensors first"),
        (2**70, "cannot be sent"),
        ("\ud800", "cannot be sent"),
    ],
)
def test_unencodable_value_is_refused_at_the_sender(value: Any, message: str) -> None:
    with pytest.raises(WireError, match=message):
        encode_values(value)


def test_recursive_values_are_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(WireError, match="cannot be sent"):
        encode_values(endless)


@given(st.binary(max_size=64))
def test_garbage_is_a_wire_error(body: bytes) -> None:
    with pytest.raises(WireError):
        decode_values(body)


@given(values, st.data())
def test_damaged_bytes_are_a_wire_error_or_decode(value: Any, data: st.DataObject) -> None:
    good = bytearray(encode_values([value, *HANDLES]))
    good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(good[: data.draw(st.integers(0, len(good)))])
    try:
        arrived = decode_values(damaged)
    except WireError:
        return
    assert decode_values(damaged) == arrived or "nan" in repr(arrived)


def test_handle_missing_from_the_message_is_a_wire_error() -> None:
    place = msgspec.msgpack.Ext(1, (7).to_bytes(4, "little"))
    good = msgspec.msgpack.decode(encode_values([HANDLES[0]]))
    with pytest.raises(WireError, match="not the values of a call"):
        decode_values(msgspec.msgpack.encode([*good[:2], place]))
