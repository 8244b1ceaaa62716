"""Parcels: what was sent is what arrives, and whatever else arrives is a WireError."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.core.errors import WireError
from rollmesh.trainer.controller.answers import decode_values, encode_values
from tests.unit.trainer.controller.handles import handle

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


def test_a_handle_that_stands_at_many_places_travels_once() -> None:
    once, often = encode_values([HANDLES[0]]), encode_values([HANDLES[0]] * 100)
    assert len(often) < len(once) + 100 * 8
    assert decode_values(often) == [HANDLES[0]] * 100


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"batch": [object()]}, r"\.batch\[0\] is a object; store tensors first"),
        (2**70, "cannot travel"),
        ("\ud800", "cannot travel"),
    ],
)
def test_what_cannot_travel_is_refused_where_it_is_sent(value: Any, said: str) -> None:
    with pytest.raises(WireError, match=said):
        encode_values(value)


def test_values_without_end_are_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(WireError, match="cannot travel"):
        encode_values(endless)


@given(st.binary(max_size=64))
def test_garbage_is_a_wire_error(body: bytes) -> None:
    with pytest.raises(WireError):
        decode_values(body)


@given(values, st.data())
def test_damage_is_noticed_or_gives_values(value: Any, data: st.DataObject) -> None:
    good = bytearray(encode_values([value, *HANDLES]))
    good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(good[: data.draw(st.integers(0, len(good)))])
    try:
        arrived = decode_values(damaged)
    except WireError:
        return
    assert decode_values(damaged) == arrived or "nan" in repr(arrived)


def test_a_handle_that_is_not_in_the_pack_is_a_wire_error() -> None:
    place = msgspec.msgpack.Ext(1, (7).to_bytes(4, "little"))
    good = msgspec.msgpack.decode(encode_values([HANDLES[0]]))
    with pytest.raises(WireError, match="not a call's values"):
        decode_values(msgspec.msgpack.encode([*good[:2], place]))
