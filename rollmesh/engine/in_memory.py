"""Weights that lie in memory of this host, in the words in which an engine of ours is told of them.

The `load_format` "shared_memory" of /update_weights_from_tensor, ours alone: SGLang's own is a
pickle, which is nothing to read from a socket. Each entry of `serialized_named_tensors` is base64
of a Part as JSON: {"path", "pieces": [{"name", "dtype", "shape", "offset", "num_bytes"}]}.
Invariant: what `told` writes, `parts_of` reads; both ends of the route use these two. Driven by the
trainer's carriers and by embedded/shared_memory.py.
"""

import base64
from collections.abc import Sequence

import msgspec

from rollmesh.core.errors import ModelError

LOAD_FORMAT = "shared_memory"


class Piece(msgspec.Struct, frozen=True):
    """One tensor, in C order."""

    name: str
    """As a model folder has it."""
    dtype: str
    """torch's name of it, such as `float32`."""
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the part."""
    num_bytes: int


class Part(msgspec.Struct, frozen=True):
    """Memory that every process of the user on this host can map, and the tensors in it."""

    path: str
    pieces: tuple[Piece, ...]


def told(parts: Sequence[Part]) -> list[str]:
    """What an engine reads of them."""
    return [base64.b64encode(msgspec.json.encode(part)).decode() for part in parts]


def parts_of(entries: Sequence[str]) -> list[Part]:
    """What was told; ModelError where it is no such thing."""
    try:
        read = [base64.b64decode(entry, validate=True) for entry in entries]
        return [msgspec.json.decode(text, type=Part) for text in read]
    except (ValueError, msgspec.MsgspecError) as error:
        why = f"serialized_named_tensors: not what {LOAD_FORMAT} is: {error}"
        raise ModelError(why) from None
