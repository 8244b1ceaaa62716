"""Messages to multipart frames and back: `[header, body, *buffers]` behind zmq's own route frame.

The header is msgpack of `[protocol, router incarnation, message]`; the body is bytes that only the
ends open; buffers are raw arrays in native little-endian order, never inside JSON or base64, never
pickled. Invariant: whatever arrives, `decode` returns a Packet or raises WireError; it never trusts
a count or a tag. Driven by sockets.py and by the journal, which stores the same frames.
"""

from collections.abc import Sequence

import msgspec

from rollmesh.core.errors import WireError
from rollmesh.wire.messages import AnyMessage

PROTOCOL = 1
"""Raised when a message changes other than by a field appended with a default."""

Buffer = bytes | bytearray | memoryview

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises on bytes from outside: besides its own errors also text that is not UTF-8 and
nesting without end."""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What every header holds."""

    protocol: int
    router: str
    """From the router: its incarnation. To the router: the incarnation last heard, or ''."""
    message: msgspec.Raw


class Packet(msgspec.Struct, frozen=True, gc=False):
    """One decoded message."""

    message: AnyMessage
    router: str = ""
    body: Buffer = b""
    buffers: tuple[Buffer, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)
_messages: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(packet: Packet) -> list[Buffer]:
    """The packet's frames, without a route."""
    message = msgspec.Raw(_encoder.encode(packet.message))
    header = _encoder.encode(Envelope(PROTOCOL, packet.router, message))
    return [header, packet.body, *packet.buffers]


def decode(frames: Sequence[Buffer]) -> Packet:
    """The inverse of `encode`; WireError in one line on anything that is not a packet."""
    if len(frames) < 2:
        raise WireError(f"{len(frames)} frames where a header and a body belong")
    try:
        envelope = _envelopes.decode(frames[0])
        if envelope.protocol != PROTOCOL:
            raise WireError(f"the peer speaks protocol {envelope.protocol}, we speak {PROTOCOL}")
        message = _messages.decode(envelope.message)
    except UNREADABLE as error:
        raise WireError(f"not a header: {error}") from None
    return Packet(message, envelope.router, frames[1], tuple(frames[2:]))
