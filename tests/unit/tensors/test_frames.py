"""Frames between owner and consumer decode to what was encoded; anything else is a WireError."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.core.errors import WireError
from rollmesh.tensors.frames import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    MAX_IDS,
    NONCE_BYTES,
    Admitted,
    Answer,
    Clear,
    Cleared,
    Fetch,
    FetchElsewhere,
    FetchForPeer,
    Hello,
    KeyProof,
    Lent,
    Missing,
    Refused,
    Request,
    Returned,
    Sent,
    Welcome,
    decode_answer,
    decode_request,
    frame,
    length_of,
    pack_numbers,
    unpack_numbers,
)

ASKS: list[Request] = [
    Hello(1, b"n" * NONCE_BYTES),
    KeyProof(b"proof"),
    Fetch(b"i" * 8, True, b"r" * 8, True),
    FetchForPeer(b"pack", b"r" * 8),
    Clear(b"i" * 8),
    Returned(b"r" * 8),
]
ANSWERS: list[Answer] = [
    Welcome(1, b"n" * NONCE_BYTES, b"proof"),
    Admitted("boot/1/2", "/dev/shm"),
    Lent(["/dev/shm/a"], b"s" * 8, b"o" * 8, b"n" * 8),
    Sent(b"n" * 8),
    FetchElsewhere("tcp://h:1"),
    Cleared(3),
    Missing(2**64 - 1, "cleared"),
    Refused("why"),
]
NUMBERS = st.lists(st.integers(0, 2**64 - 1), max_size=50)


def header_of(framed: bytes) -> bytes:
    assert length_of(framed[:LENGTH_BYTES]) == len(framed) - LENGTH_BYTES
    return framed[LENGTH_BYTES:]


@pytest.mark.parametrize("ask", ASKS)
def test_an_ask_survives_the_way_and_is_no_answer(ask: Request) -> None:
    header = header_of(frame(ask))
    assert decode_request(header) == ask
    with pytest.raises(WireError, match="not an answer"):
        decode_answer(header)


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_survives_the_way_and_is_no_ask(answer: Answer) -> None:
    header = header_of(frame(answer))
    assert decode_answer(header) == answer
    with pytest.raises(WireError, match="not an ask"):
        decode_request(header)


def test_a_later_peer_may_append_fields() -> None:
    assert decode_answer(msgspec.msgpack.encode(["cleared", 3, "new"])) == Cleared(3)


def test_a_length_that_no_header_has_is_refused_before_room_is_made() -> None:
    assert length_of(MAX_HEADER_BYTES.to_bytes(4, "little")) == MAX_HEADER_BYTES
    for length in (MAX_HEADER_BYTES + 1, 2**31, 2**32 - 1):
        with pytest.raises(WireError, match=f"a header of {length} bytes"):
            length_of(length.to_bytes(4, "little"))


def test_the_longest_answer_to_the_longest_ask_is_a_header() -> None:
    full = pack_numbers([2**64 - 1] * MAX_IDS)
    assert len(frame(Fetch(full, True, full))) < MAX_HEADER_BYTES
    assert len(frame(Lent(["/dev/shm/" + "x" * 200] * 1024, full, full, full))) < MAX_HEADER_BYTES


@given(NUMBERS)
def test_numbers_survive_as_a_column(numbers: list[int]) -> None:
    assert unpack_numbers(pack_numbers(numbers)) == numbers
    assert len(pack_numbers(numbers)) == 8 * len(numbers)


def test_a_column_that_does_not_divide_is_refused() -> None:
    with pytest.raises(WireError, match="a column of 9 bytes"):
        unpack_numbers(bytes(9))


@given(st.binary(max_size=200))
def test_random_bytes_never_raise_anything_but_a_wire_error(header: bytes) -> None:
    for decode in (decode_request, decode_answer):
        try:
            assert isinstance(decode(header), Request | Answer)
        except WireError:
            continue


@given(st.data())
def test_a_damaged_header_is_a_message_or_a_wire_error(data: st.DataObject) -> None:
    framed = bytearray(frame(data.draw(st.sampled_from([*ASKS, *ANSWERS]))))
    at = data.draw(st.integers(LENGTH_BYTES, len(framed) - 1))
    framed[at] = data.draw(st.integers(0, 255))
    cut = bytes(framed[LENGTH_BYTES : data.draw(st.integers(LENGTH_BYTES, len(framed)))])
    for decode in (decode_request, decode_answer):
        try:
            assert isinstance(decode(cut), Request | Answer)
        except WireError:
            continue


def test_nesting_without_end_is_refused() -> None:
    deep = b"\x92\xa5hello" + b"\x91" * 10**5
    with pytest.raises(WireError, match="not an ask"):
        decode_request(deep)
