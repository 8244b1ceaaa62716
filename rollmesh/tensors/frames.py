"""Messages between a consumer and an owner: u32 length, msgpack header, then raw buffers.

    consumer                            owner
      Hello                      ->
                                 <-     Welcome | Refused
      KeyProof                   ->
                                 <-     Admitted | Refused
      Fetch(in memory)           ->
                                 <-     Lent: where the shards are in memory that both can see
      Fetch(by stream)           ->
                                 <-     Sent: their sizes, then their bytes
                                          | FetchElsewhere: a peer on its machine has them
      FetchForPeer, to that peer ->
                                 <-     Lent
      TakeShards                 ->
                                 <-     ShardsTaken
      Clear | EndStep            ->
                                 <-     Cleared
      Returned                   ->     (no answer)

- Fetch, FetchForPeer and TakeShards may also be answered by Missing or Refused.
- Lists of numbers are little-endian uint64 in one bytes field: 2,048 ids are 16 KiB.
- Tensors are never inside a header, never base64, never pickled, and keep their dtype.
- Whatever arrives, decoding gives a message or raises WireError.
"""

from array import array
from collections.abc import Iterable
from typing import Annotated, Final

import msgspec

from rollmesh.core.errors import DECODE_ERRORS, MissReason, WireError

PROTOCOL: Final = 1
"""Raised when a message changes other than by a field appended with a default."""
LENGTH_BYTES: Final = 4
MAX_HEADER_BYTES: Final = 2**20
"""A longer header ends its connection before memory is allocated for it."""
MAX_IDS: Final = 2**14
"""Shards named in one message; a consumer with more sends several. Their places take 400 kB."""
NONCE_BYTES: Final = 32

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Step = Annotated[int, msgspec.Meta(ge=0)]


class Hello(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="hello"):
    """The first message of a consumer."""

    protocol: int
    nonce: Nonce


class KeyProof(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="proof"):
    """Proof that the consumer has the mesh's keys; b'' without keys."""

    proof: bytes
    memory: str = ""
    """The memory in which the consumer can lend what it fetches; '' for none."""
    relay: str = ""
    """The address at which it lends."""


class Fetch(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="fetch"):
    """Request these shards; the loans in `returned` have ended."""

    ids: bytes
    is_by_memory: bool
    returned: bytes = b""
    may_redirect: bool = False
    """The consumer understands FetchElsewhere."""


class FetchForPeer(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="carry"):
    """Fetch these shards from another owner, and lend them."""

    handles: bytes
    """A pack of handles of one owner."""
    returned: bytes = b""


class Clear(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="clear"):
    """Free these shards."""

    ids: bytes
    returned: bytes = b""


class TakeShards(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="take"):
    """Free these shards when `step` ends. It shows that the trainer is alive, so leases are
    renewed."""

    ids: bytes
    step: Step
    returned: bytes = b""


class EndStep(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="end"):
    """Free what this step, and every step before it, took."""

    step: Step
    returned: bytes = b""


class Returned(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="returned"):
    """These loans have ended; a shard that was lent twice is listed twice."""

    ids: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="welcome"):
    """The owner's half of the handshake."""

    protocol: int
    nonce: Nonce
    proof: bytes


class Admitted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="admitted"):
    """Requests are answered from now on."""

    memory: str
    """The memory in which shards can be lent; '' for none."""
    folder: str
    """Its folder in the file system."""


class Lent(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="lent"):
    """Shard i is in paths[segments[i]], from offsets[i] on, sizes[i] bytes."""

    paths: list[str]
    segments: bytes
    offsets: bytes
    sizes: bytes


class Sent(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="sent"):
    """The shards' bytes follow, one after the other."""

    sizes: bytes


class FetchElsewhere(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="elsewhere"):
    """The shards exist; a peer on the consumer's machine fetches them."""

    address: str


class ShardsTaken(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="taken"):
    """All of them belong to that step now."""


class Cleared(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="cleared"):
    """So many were held, and are freed."""

    number: int


class Missing(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="missing"):
    """One of the shards is not held, so none is given."""

    shard_id: int
    reason: MissReason


class Refused(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="refused"):
    """The owner does not do that, and why."""

    why: str


Request = Hello | KeyProof | Fetch | FetchForPeer | TakeShards | Clear | EndStep | Returned
Answer = (
    Welcome | Admitted | Lent | Sent | FetchElsewhere | ShardsTaken | Cleared | Missing | Refused
)

_encoder = msgspec.msgpack.Encoder()
_asks: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def frame(message: Request | Answer) -> bytes:
    """Encode a message: length and header."""
    header = _encoder.encode(message)
    return len(header).to_bytes(LENGTH_BYTES, "little") + header


def length_of(prefix: bytes, max_bytes: int = MAX_HEADER_BYTES) -> int:
    """Return the length of the header after `prefix`; WireError if it is above `max_bytes`."""
    length = int.from_bytes(prefix, "little")
    if length > max_bytes:
        raise WireError(f"a header of {length} bytes; at most {max_bytes}")
    return length


def decode_request(header: bytes) -> Request:
    """Decode a consumer's message; WireError for anything else."""
    try:
        return _asks.decode(header)
    except DECODE_ERRORS as error:
        raise WireError(f"not an ask: {error}") from None


def decode_answer(header: bytes) -> Answer:
    """Decode an owner's message; WireError for anything else."""
    try:
        return _answers.decode(header)
    except DECODE_ERRORS as error:
        raise WireError(f"not an answer: {error}") from None


def pack_numbers(numbers: Iterable[int]) -> bytes:
    """Encode as little-endian uint64."""
    return array("Q", numbers).tobytes()


def unpack_numbers(pack_numbers: bytes) -> list[int]:
    """Decode `pack_numbers`; WireError if the length is no multiple of 8."""
    numbers = array("Q")
    try:
        numbers.frombytes(pack_numbers)
    except ValueError:
        raise WireError(f"a column of {len(pack_numbers)} bytes; 8 a number") from None
    return numbers.tolist()
