"""What a consumer and an owner say to each other: u32 length, msgpack header, raw buffers behind.

    consumer                            owner
      Hello                      ->
                                 <-     Welcome | Refused
      Proof                      ->
                                 <-     Admitted | Refused
      Fetch(in memory)           ->
                                 <-     Lent: where they lie in memory that both can see
      Fetch(by stream)           ->
                                 <-     Sent: their sizes, and behind it their bytes
                                          | Elsewhere: a neighbour fetches them for it
      Carry, to that neighbour   ->
                                 <-     Lent
      Take                       ->
                                 <-     Taken
      Clear | End                ->
                                 <-     Cleared
      Returned                   ->     (no answer)

Fetch, Carry and Take may also be answered by Missing or Refused. Lists of numbers travel as
columns of little-endian uint64: 2,048 ids are 16 KiB and no loop. Tensors are never inside a
header, never base64, never pickled, and keep their dtype. Invariant: whatever arrives, decoding
gives a message or raises WireError. Driven by handshake.py, guest.py and connection.py.
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
"""A longer header ends its connection before room is made for it."""
MAX_IDS: Final = 2**14
"""Shards named in one message; a consumer with more asks again. Their places take 400 kB."""
NONCE_BYTES: Final = 32

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Step = Annotated[int, msgspec.Meta(ge=0)]


class Hello(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="hello"):
    """A consumer has dialled."""

    protocol: int
    nonce: Nonce


class Proof(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="proof"):
    """It has the mesh's keys; b'' where it has none."""

    proof: bytes
    memory: str = ""
    """The memory in which it could lend what it fetches; '' where there is none."""
    relay: str = ""
    """The address at which it does."""


class Fetch(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="fetch"):
    """Give these shards; those in `returned` are no longer looked at."""

    ids: bytes
    is_by_memory: bool
    returned: bytes = b""
    may_point: bool = False
    """The consumer understands Elsewhere, and asks there."""


class Carry(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="carry"):
    """Fetch these shards of another owner, and lend them."""

    handles: bytes
    """A pack, of one owner."""
    returned: bytes = b""


class Clear(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="clear"):
    """Free these shards."""

    ids: bytes
    returned: bytes = b""


class Take(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="take"):
    """Free these shards when `step` ends; whoever says so lives, so that leases begin anew."""

    ids: bytes
    step: Step
    returned: bytes = b""


class End(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="end"):
    """This step has ended, with all before it: free what they took."""

    step: Step
    returned: bytes = b""


class Returned(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="returned"):
    """These loans have ended; a shard that was lent twice stands here twice."""

    ids: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="welcome"):
    """The owner's half of the handshake."""

    protocol: int
    nonce: Nonce
    proof: bytes


class Admitted(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="admitted"):
    """Asks are answered from now on."""

    memory: str
    """The memory that shards can be lent in; '' where there is none."""
    folder: str
    """Where that is seen in the file system."""


class Lent(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="lent"):
    """Shard i lies in paths[segments[i]], from offsets[i] on, sizes[i] bytes."""

    paths: list[str]
    segments: bytes
    offsets: bytes
    sizes: bytes


class Sent(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="sent"):
    """The shards' bytes follow, one after the other."""

    sizes: bytes


class Elsewhere(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="elsewhere"):
    """They are all here, and are brought to the consumer's machine by a neighbour."""

    address: str


class Taken(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="taken"):
    """All of them are of that step now."""


class Cleared(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="cleared"):
    """So many were there, and are freed."""

    number: int


class Missing(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="missing"):
    """One of the shards is not there, so none is given."""

    shard_id: int
    reason: MissReason


class Refused(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="refused"):
    """The owner does not do that, and says why."""

    why: str


Ask = Hello | Proof | Fetch | Carry | Take | Clear | End | Returned
Answer = Welcome | Admitted | Lent | Sent | Elsewhere | Taken | Cleared | Missing | Refused

_encoder = msgspec.msgpack.Encoder()
_asks: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(Ask)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def frame(message: Ask | Answer) -> bytes:
    """Length and header, ready to be sent."""
    header = _encoder.encode(message)
    return len(header).to_bytes(LENGTH_BYTES, "little") + header


def length_of(prefix: bytes, max_bytes: int = MAX_HEADER_BYTES) -> int:
    """How long the header behind `prefix` is; WireError if it says more than `max_bytes`."""
    length = int.from_bytes(prefix, "little")
    if length > max_bytes:
        raise WireError(f"a header of {length} bytes; at most {max_bytes}")
    return length


def decode_ask(header: bytes) -> Ask:
    """What a consumer said; WireError on anything else."""
    try:
        return _asks.decode(header)
    except DECODE_ERRORS as error:
        raise WireError(f"not an ask: {error}") from None


def decode_answer(header: bytes) -> Answer:
    """What an owner said; WireError on anything else."""
    try:
        return _answers.decode(header)
    except DECODE_ERRORS as error:
        raise WireError(f"not an answer: {error}") from None


def column(numbers: Iterable[int]) -> bytes:
    """As little-endian uint64, which is what our machines have."""
    return array("Q", numbers).tobytes()


def numbers_of(column: bytes) -> list[int]:
    """The inverse; WireError where it does not divide."""
    numbers = array("Q")
    try:
        numbers.frombytes(column)
    except ValueError:
        raise WireError(f"a column of {len(column)} bytes; 8 a number") from None
    return numbers.tolist()
