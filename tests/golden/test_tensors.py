"""Messages between tensor owners and their consumers keep their bytes."""

import msgspec
import pytest

from rollmesh.tensors.frames import (
    LENGTH_BYTES,
    Answer,
    Request,
    decode_answer,
    decode_request,
    frame,
    pack_numbers,
    unpack_numbers,
)
from tests.golden.tensors import FILE, SAMPLES, kinds, name_of

GOLDEN = dict(line.split() for line in FILE.read_text().splitlines())


@pytest.mark.parametrize("message", SAMPLES, ids=name_of)
def test_a_message_has_the_bytes_that_were_frozen(message: Request | Answer) -> None:
    assert frame(message).hex() == GOLDEN[name_of(message)]


@pytest.mark.parametrize("message", SAMPLES, ids=name_of)
def test_frozen_bytes_still_decode_to_the_same_message(message: Request | Answer) -> None:
    header = bytes.fromhex(GOLDEN[name_of(message)])[LENGTH_BYTES:]
    decode = decode_request if isinstance(message, Request) else decode_answer
    assert decode(header) == message


def test_every_kind_of_message_is_frozen_once() -> None:
    assert {type(message) for message in SAMPLES} == kinds()
    assert len(SAMPLES) == len(GOLDEN) == len(kinds())


@pytest.mark.parametrize("message", SAMPLES, ids=name_of)
def test_a_sample_shows_every_field(message: Request | Answer) -> None:
    for field in msgspec.structs.fields(message):
        if field.default is not msgspec.NODEFAULT:
            assert getattr(message, field.name) != field.default


def test_a_column_is_little_endian_and_eight_bytes_a_number() -> None:
    assert pack_numbers([1, 2**63]).hex() == "0100000000000000" + "0000000000000080"
    assert unpack_numbers(bytes.fromhex("ff00000000000000")) == [255]
