"""What travels in message bodies, to bytes and back; routers and journals forward it unopened.

    AskGroup, RunGroup   GroupAsk, msgpack
    GroupFinished        GroupRecord, JSON, since it embeds the messages as the agents' own JSON;
                         buffers: int32 token ids, float32 log-probs, all rollouts in order

Invariant: what does not decode is a WireError in one line, never another exception. Driven by the
ends: clients and workers.
"""

import msgspec

from rollmesh.core.errors import DECODE_ERRORS, WireError
from rollmesh.core.types import GroupRecord
from rollmesh.wire.frames import Buffer
from rollmesh.wire.messages import GroupAsk

MAX_ASK_BYTES = 32 * 2**20
"""An ask that is longer does not go over the wire."""


_ask_encoder = msgspec.msgpack.Encoder()
_ask_decoder = msgspec.msgpack.Decoder(GroupAsk)
_record_encoder = msgspec.json.Encoder()
_record_decoder = msgspec.json.Decoder(GroupRecord)


def encode_ask(ask: GroupAsk) -> bytes:
    """The body of an AskGroup; WireError if the task is too large, or holds what cannot travel."""
    try:
        body = _ask_encoder.encode(ask)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise WireError(f"task {ask.task.id!r} cannot travel: {error}") from None
    if len(body) > MAX_ASK_BYTES:
        said = f"task {ask.task.id!r} has {len(body)} bytes; at most {MAX_ASK_BYTES}"
        raise WireError(f"{said}: let it name a file, and the environment read that")
    return body


def decode_ask(body: Buffer) -> GroupAsk:
    """The inverse of `encode_ask`; WireError on anything else."""
    try:
        return _ask_decoder.decode(body)
    except DECODE_ERRORS as error:
        raise WireError(f"not a group's ask: {error}") from None


def encode_record(record: GroupRecord) -> bytes:
    """The body of a GroupFinished."""
    return _record_encoder.encode(record)


def decode_record(body: Buffer) -> GroupRecord:
    """The inverse of `encode_record`; WireError on anything else."""
    try:
        return _record_decoder.decode(body)
    except DECODE_ERRORS as error:
        raise WireError(f"not a group's record: {error}") from None
