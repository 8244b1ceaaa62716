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


class Envelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What every header holds."""

    protocol: int
    router: str
    """From the router: its incarnation. To the router: the incarnation last heard, or ''."""
    message: AnyMessage


class _Front(msgspec.Struct, frozen=True, array_like=True):
    """What stays the same at the front of every protocol's header."""

    protocol: int


class Packet(msgspec.Struct, frozen=True, gc=False):
    """One decoded message."""

    message: AnyMessage
    router: str = ""
    body: Buffer = b""
    buffers: tuple[Buffer, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)
_fronts = msgspec.msgpack.Decoder(_Front)


def encode(packet: Packet) -> list[Buffer]:
    """The packet's frames, without a route."""
    header = _encoder.encode(Envelope(PROTOCOL, packet.router, packet.message))
    return [header, packet.body, *packet.buffers]


def decode(frames: Sequence[Buffer]) -> Packet:
    """The inverse of `encode`; WireError in one line on anything that is not a packet."""
    if len(frames) < 2:
        raise WireError(f"{len(frames)} frames where a header and a body belong")
    try:
        envelope = _envelopes.decode(frames[0])
    except UNREADABLE as error:
        raise WireError(_foreign(frames[0]) or f"not a header: {error}") from None
    if envelope.protocol != PROTOCOL:
        raise WireError(_foreign(frames[0]))
    return Packet(envelope.message, envelope.router, frames[1], tuple(frames[2:]))


def _foreign(header: Buffer) -> str:
    """That a header is of another protocol, whose messages we need not be able to read; or ''."""
    try:
        protocol = _fronts.decode(header).protocol
    except UNREADABLE:
        return ""
    same = protocol == PROTOCOL
    return "" if same else f"the peer speaks protocol {protocol}, we speak {PROTOCOL}"
