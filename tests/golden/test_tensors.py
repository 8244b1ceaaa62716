"""The bytes between owners of tensors and their consumers are those that other processes speak."""

import msgspec
import pytest

from rollmesh.tensors.frames import (
    LENGTH_BYTES,
    Answer,
    Ask,
    column,
    decode_answer,
    decode_ask,
    frame,
    numbers_of,
)
from tests.golden.tensors import FILE, SAMPLES, kinds

GOLDEN = dict(line.split() for line in FILE.read_text().splitlines())


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_has_the_bytes_that_were_frozen(message: Ask | Answer) -> None:
    assert frame(message).hex() == GOLDEN[type(message).__name__]


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_frozen_bytes_still_say_the_same(message: Ask | Answer) -> None:
    header = bytes.fromhex(GOLDEN[type(message).__name__])[LENGTH_BYTES:]
    decode = decode_ask if isinstance(message, Ask) else decode_answer
    assert decode(header) == message


def test_every_kind_of_message_is_frozen_once() -> None:
    assert {type(message) for message in SAMPLES} == kinds()
    assert len(SAMPLES) == len(GOLDEN) == len(kinds())


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_sample_shows_every_field(message: Ask | Answer) -> None:
    for field in msgspec.structs.fields(message):
        if field.default is not msgspec.NODEFAULT:
            assert getattr(message, field.name) != field.default


def test_a_column_is_little_endian_and_eight_bytes_a_number() -> None:
    assert column([1, 2**63]).hex() == "0100000000000000" + "0000000000000080"
    assert numbers_of(bytes.fromhex("ff00000000000000")) == [255]
