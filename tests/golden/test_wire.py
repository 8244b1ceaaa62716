"""Every message keeps the bytes that other processes and old journals hold."""

import msgspec
import pytest

from rollmesh.wire.frames import decode
from rollmesh.wire.messages import AnyMessage
from tests.golden.wire import FILE, SAMPLES, frozen, kinds

GOLDEN = dict(line.split() for line in FILE.read_text().splitlines())


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_has_the_bytes_that_were_frozen(message: AnyMessage) -> None:
    name, text = frozen(message).split()
    assert text == GOLDEN[name]


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_frozen_bytes_still_decode_to_the_same_message(message: AnyMessage) -> None:
    packet = decode([bytes.fromhex(GOLDEN[type(message).__name__]), b"body", b"buffer"])
    assert packet.message == message
    assert packet.router == "i5d1e"
    assert (packet.body, packet.buffers) == (b"body", (b"buffer",))


def test_every_kind_of_message_is_frozen_once() -> None:
    assert {type(message) for message in SAMPLES} == kinds()
    assert len(SAMPLES) == len(GOLDEN) == len(kinds())


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_sample_shows_every_field(message: AnyMessage) -> None:
    for field in msgspec.structs.fields(message):
        if field.default is not msgspec.NODEFAULT:
            assert getattr(message, field.name) != field.default


def test_the_header_names_the_protocol_the_router_and_the_kind() -> None:
    protocol, router, body = msgspec.msgpack.decode(bytes.fromhex(GOLDEN["ClientHello"]))
    assert (protocol, router, body) == (1, "i5d1e", ["client_hello", "c1", 3, True])
