"""Messages to multipart frames and back: `[header, body, *buffers]` behind zmq's own route frame.

- The header is msgpack of `[protocol, router incarnation, message]`. Only the ends open the body.
  Buffers are raw arrays in native little-endian order, never inside JSON or base64, never pickled.
- A body or buffer of more than MAX_PART_BYTES travels as several frames. The header then has a
  fourth field: the number of frames of the body and of each buffer. So hubs can admit short frames
  only, from peers that have proved nothing.
- Whatever arrives, `decode` returns a Packet or raises WireError. It never trusts a count or a tag.
"""

from collections.abc import Sequence

import msgspec

from rollmesh.core.errors import DECODE_ERRORS, WireError
from rollmesh.wire.messages import AnyMessage

PROTOCOL = 1
"""Raised when a message changes other than by a field appended with a default."""

MAX_PART_BYTES = 4 * 2**20
"""Length of a frame, but for the last of a body or buffer."""

Buffer = bytes | bytearray | memoryview

MAX_SAID = 200
"""Characters of an error's text that may quote a peer."""


class Envelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What every header holds."""

    protocol: int
    router: str
    """From the router: its incarnation. To the router: the incarnation last heard, or ''."""
    message: AnyMessage


class _SplitEnvelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The header of a message with a body or buffer in several frames; reads the others too."""

    protocol: int
    router: str
    message: AnyMessage
    num_parts: tuple[int, ...] = ()
    """Frames of the body and of each buffer. Empty: one each."""


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
_envelopes = msgspec.msgpack.Decoder(_SplitEnvelope)
_fronts = msgspec.msgpack.Decoder(_Front)


def encode(packet: Packet) -> list[Buffer]:
    """The packet's frames, without a route."""
    if len(packet.body) > MAX_PART_BYTES or any(len(b) > MAX_PART_BYTES for b in packet.buffers):
        return _encode_split(packet)
    header = _encoder.encode(Envelope(PROTOCOL, packet.router, packet.message))
    return [header, packet.body, *packet.buffers]


def _encode_split(packet: Packet) -> list[Buffer]:
    parts = [_split(each) for each in (packet.body, *packet.buffers)]
    num_parts = tuple(len(each) for each in parts)
    envelope = _SplitEnvelope(PROTOCOL, packet.router, packet.message, num_parts)
    return [_encoder.encode(envelope), *(part for each in parts for part in each)]


def _split(buffer: Buffer) -> list[Buffer]:
    """Its parts in order, which are views of it; itself where it is short."""
    if len(buffer) <= MAX_PART_BYTES:
        return [buffer]
    view = memoryview(buffer)
    return [view[at : at + MAX_PART_BYTES] for at in range(0, len(view), MAX_PART_BYTES)]


def decode(frames: Sequence[Buffer]) -> Packet:
    """The inverse of `encode`; WireError in one line on anything that is not a packet."""
    if len(frames) < 2:
        raise WireError(f"{len(frames)} frames where a header and a body belong")
    try:
        envelope = _envelopes.decode(frames[0])
    except DECODE_ERRORS as error:
        raise WireError(_foreign(frames[0]) or f"not a header: {error}") from None
    if envelope.protocol != PROTOCOL:
        raise WireError(_foreign(frames[0]))
    body, *buffers = _joined(frames[1:], envelope.num_parts) if envelope.num_parts else frames[1:]
    return Packet(envelope.message, envelope.router, body, tuple(buffers))


def _joined(frames: Sequence[Buffer], num_parts: tuple[int, ...]) -> list[Buffer]:
    """The body and the buffers of a split message, each in one piece."""
    if min(num_parts) < 1 or sum(num_parts) != len(frames):
        raise WireError(f"{len(frames)} frames where its header counts {num_parts}"[:MAX_SAID])
    joined: list[Buffer] = []
    at = 0
    for num in num_parts:
        joined.append(frames[at] if num == 1 else b"".join(frames[at : at + num]))
        at += num
    return joined


def _foreign(header: Buffer) -> str:
    """That a header is of another protocol, whose messages we need not be able to read; or ''."""
    try:
        protocol = _fronts.decode(header).protocol
    except DECODE_ERRORS:
        return ""
    same = protocol == PROTOCOL
    return "" if same else f"the peer speaks protocol {protocol}, we speak {PROTOCOL}"
