"""Weights in shared memory of this host, as they are described to an embedded engine.

- `load_format` "shared_memory" of /update_weights_from_tensor exists in our engine only; SGLang's
  own format is a pickle, which must not be read from a socket.
- Each entry of `serialized_named_tensors` is base64 of a SharedSegment as JSON: {"path", "pieces":
  [{"name", "dtype", "shape", "offset", "num_bytes"}]}.
"""

import base64
from collections.abc import Sequence

import msgspec

from rollmesh.core.errors import ModelError

LOAD_FORMAT = "shared_memory"


class TensorPiece(msgspec.Struct, frozen=True):
    """One tensor, in C order."""

    name: str
    """Name in the model folder."""
    dtype: str
    """torch's name of it, such as `float32`."""
    shape: tuple[int, ...]
    offset: int
    """Offset of its first byte in the segment."""
    num_bytes: int


class SharedSegment(msgspec.Struct, frozen=True):
    """Shared memory that every process of the user on this host can map, and its tensors."""

    path: str
    pieces: tuple[TensorPiece, ...]


def encode_parts(parts: Sequence[SharedSegment]) -> list[str]:
    """Return the segments as `serialized_named_tensors`."""
    return [base64.b64encode(msgspec.json.encode(part)).decode() for part in parts]


def decode_parts(entries: Sequence[str]) -> list[SharedSegment]:
    """Decode `serialized_named_tensors`; ModelError if an entry is malformed."""
    try:
        read = [base64.b64decode(entry, validate=True) for entry in entries]
        return [msgspec.json.decode(text, type=SharedSegment) for text in read]
    except (ValueError, msgspec.MsgspecError) as error:
        why = f"serialized_named_tensors: malformed {LOAD_FORMAT} entry: {error}"
        raise ModelError(why) from None
