"""Messages to multipart frames and back: `[header, body, *buffers]` behind zmq's own route frame.

- The header is msgpack of `[protocol, router incarnation, message]`. Only the endpoints decode the
  body; routers and journals forward it.
- Buffers are raw arrays in native little-endian order, never inside JSON or base64, never pickled.
- A body or buffer of more than MAX_PART_BYTES is split into frames, counted in a fourth header
  field, so that hubs can admit short frames only from peers that have proved nothing.
- `decode` returns a Packet or raises WireError for any input; it never trusts a count or a tag.
- Bodies: a GroupAsk as msgpack in AskGroup and RunGroup; a GroupRecord as JSON in GroupFinished,
  since it embeds the agents' own JSON, with int32 token ids and float32 log-probs in buffers.
"""

from collections.abc import Sequence

import msgspec

from rollmesh.core.errors import DECODE_ERRORS, WireError
from rollmesh.core.types import GroupRecord
from rollmesh.wire.messages import AnyMessage, GroupAsk

PROTOCOL = 1
"""Raised when a message changes other than by a field appended with a default."""

MAX_PART_BYTES = 4 * 2**20
"""Length of a frame, except the last of a body or buffer."""

Buffer = bytes | bytearray | memoryview

MAX_ERROR_TEXT = 200
"""Maximum characters of an error text that quotes a peer."""


class Envelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Content of each header."""

    protocol: int
    router: str
    """From the router: its incarnation. To the router: the last incarnation received, or ''."""
    message: AnyMessage


class _SplitEnvelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Header of a message with a body or buffer in several frames; decodes the others too."""

    protocol: int
    router: str
    message: AnyMessage
    num_parts: tuple[int, ...] = ()
    """Number of frames of the body and of each buffer. Empty: one each."""


class _Front(msgspec.Struct, frozen=True, array_like=True):
    """Beginning of the header in every protocol version."""

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
    """Return the packet's frames, without a route."""
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
    """Split a buffer into views; a short one is returned whole."""
    if len(buffer) <= MAX_PART_BYTES:
        return [buffer]
    view = memoryview(buffer)
    return [view[at : at + MAX_PART_BYTES] for at in range(0, len(view), MAX_PART_BYTES)]


def decode(frames: Sequence[Buffer]) -> Packet:
    """Decode frames; WireError in one line if they are not a packet."""
    if len(frames) < 2:
        raise WireError(f"{len(frames)} frames; a header and a body are required")
    try:
        envelope = _envelopes.decode(frames[0])
    except DECODE_ERRORS as error:
        raise WireError(_foreign(frames[0]) or f"not a header: {error}") from None
    if envelope.protocol != PROTOCOL:
        raise WireError(_foreign(frames[0]))
    body, *buffers = _joined(frames[1:], envelope.num_parts) if envelope.num_parts else frames[1:]
    return Packet(envelope.message, envelope.router, body, tuple(buffers))


def _joined(frames: Sequence[Buffer], num_parts: tuple[int, ...]) -> list[Buffer]:
    """Join the body and the buffers of a split message."""
    if min(num_parts) < 1 or sum(num_parts) != len(frames):
        raise WireError(
            f"{len(frames)} frames where its header counts {num_parts}"[:MAX_ERROR_TEXT]
        )
    joined: list[Buffer] = []
    at = 0
    for num in num_parts:
        joined.append(frames[at] if num == 1 else b"".join(frames[at : at + num]))
        at += num
    return joined


def _foreign(header: Buffer) -> str:
    """Return an error for a header of another protocol version, which may be unreadable, else
    ''."""
    try:
        protocol = _fronts.decode(header).protocol
    except DECODE_ERRORS:
        return ""
    same = protocol == PROTOCOL
    return "" if same else f"the peer uses protocol {protocol}, this process {PROTOCOL}"


MAX_ASK_BYTES = 32 * 2**20
"""Maximum size of a request for a group."""


_ask_encoder = msgspec.msgpack.Encoder()
_ask_decoder = msgspec.msgpack.Decoder(GroupAsk)
_record_encoder = msgspec.json.Encoder()
_record_decoder = msgspec.json.Decoder(GroupRecord)


def encode_ask(ask: GroupAsk) -> bytes:
    """Encode the body of an AskGroup; WireError if the task is too large or cannot be encoded."""
    try:
        body = _ask_encoder.encode(ask)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise WireError(f"task {ask.task.id!r} cannot be encoded: {error}") from None
    if len(body) > MAX_ASK_BYTES:
        why = f"task {ask.task.id!r} has {len(body)} bytes; at most {MAX_ASK_BYTES}"
        raise WireError(f"{why}: let it name a file that the environment reads")
    return body


def decode_ask(body: Buffer) -> GroupAsk:
    """Decode the body of an AskGroup; WireError if it is malformed."""
    try:
        return _ask_decoder.decode(body)
    except DECODE_ERRORS as error:
        raise WireError(f"malformed group request: {error}") from None


def encode_record(record: GroupRecord) -> bytes:
    """Encode the body of a GroupFinished."""
    return _record_encoder.encode(record)


def decode_record(body: Buffer) -> GroupRecord:
    """Decode the body of a GroupFinished; WireError if it is malformed."""
    try:
        return _record_decoder.decode(body)
    except DECODE_ERRORS as error:
        raise WireError(f"malformed group record: {error}") from None
