"""The file and offset of each tensor in a model folder.

    model.safetensors                     or   model-00001-of-00003.safetensors ...
                                               model.safetensors.index.json

- A file has the safetensors format (https://github.com/huggingface/safetensors, "Format"): u64
  length of the header, little-endian; the header, JSON padded by spaces; the tensors, row by row,
  one after the other. Names and index are those of transformers.
- The layout follows from names, types and full shapes only, so ranks agree on it without talking,
  and each can write its rows at their place in the full tensor.
"""

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Safetensors' names of element types."""
MAX_FILE_BYTES = 4 * 2**30
"""Limit of the tensors in one file; a larger tensor has its own. Stock transformers reads both."""
SUFFIX = ".safetensors"
INDEX = f"{SUFFIX}.index.json"
_ALIGN = 8
_METADATA = {"format": "pt"}
"""Required by transformers."""


class TensorSpec(NamedTuple):
    """Name, type and full shape of a tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class FileOffset(NamedTuple):
    """The place at which a tensor begins."""

    file_name: str
    offset: int


class FolderLayout(NamedTuple):
    """The layout of one folder."""

    heads: dict[str, bytes]
    """The first bytes of each file: length and header."""
    spots: dict[str, FileOffset]
    """Place of each tensor by name, in order."""
    table: bytes
    """Transformers' index of tensors by file; empty if there is one file."""


def plan_layout(
    specs: Iterable[TensorSpec], stem: str, max_bytes: int = MAX_FILE_BYTES
) -> FolderLayout:
    """Return the layout of tensors in files named after `stem`."""
    # Wide elements first, so that each tensor begins at a multiple of its element size.
    ordered = sorted(specs, key=lambda each: -each.dtype.itemsize)
    files = _split_files(ordered, max_bytes)
    heads: dict[str, bytes] = {}
    spots: dict[str, FileOffset] = {}
    for number, members in enumerate(files, 1):
        name = f"{stem}{SUFFIX}"
        if len(files) > 1:
            name = f"{stem}-{number:05d}-of-{len(files):05d}{SUFFIX}"
        heads[name] = _head(members)
        offset = len(heads[name])
        for each in members:
            spots[each.name] = FileOffset(name, offset)
            offset += each.num_bytes
    total_bytes = sum(each.num_bytes for each in ordered)
    return FolderLayout(heads, spots, _index(spots, total_bytes) if len(files) > 1 else b"")


def _split_files(ordered: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    files: list[list[TensorSpec]] = [[]]
    filled = 0
    for each in ordered:
        if files[-1] and filled + each.num_bytes > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(each)
        filled += each.num_bytes
    return files


def _head(members: Sequence[TensorSpec]) -> bytes:
    header: dict[str, Any] = {"__metadata__": _METADATA}
    start = 0
    for each in members:
        stop = start + each.num_bytes
        where = {
            "dtype": DTYPE_NAMES[each.dtype],
            "shape": each.shape,
            "data_offsets": (start, stop),
        }
        header[each.name] = where
        start = stop
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGN)
    return struct.pack("<Q", len(text)) + text


def _index(spots: dict[str, FileOffset], total_bytes: int) -> bytes:
    files = {name: spot.file_name for name, spot in spots.items()}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": files}
    return msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"
