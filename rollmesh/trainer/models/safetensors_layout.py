"""Where each tensor of a model's folder stands: in which file, from which byte on.

    model.safetensors                     or   model-00001-of-00003.safetensors ...
                                               model.safetensors.index.json

A file is safetensors' own format (https://github.com/huggingface/safetensors, "Format"): u64 length
of the header, little-endian; the header, JSON, padded by spaces; the tensors, row by row, one after
the other; names and table are transformers'. Invariant: it follows from names, types and whole
shapes alone, so ranks that never speak of it agree, and each can write its rows where they belong
in the whole tensor. Pure; driven by carriers/shards.py and checkpoints/tray.py.
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
"""Of tensors in one file; a larger one stands alone. Stock transformers reads several as well."""
SUFFIX = ".safetensors"
INDEX = f"{SUFFIX}.index.json"
_ALIGN = 8
_METADATA = {"format": "pt"}
"""Transformers wants to be told."""


class TensorSpec(NamedTuple):
    """A tensor, wherever its rows are."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class FileOffset(NamedTuple):
    """Where a tensor begins."""

    file_name: str
    offset: int


class FolderLayout(NamedTuple):
    """Of one folder."""

    heads: dict[str, bytes]
    """What each file begins with."""
    spots: dict[str, FileOffset]
    """By the name of each tensor, in their order."""
    table: bytes
    """Which tensor is in which file, as transformers has it; empty where there is one file."""


def plan_layout(
    wholes: Iterable[TensorSpec], stem: str, max_bytes: int = MAX_FILE_BYTES
) -> FolderLayout:
    """Place all of them in files named after `stem`."""
    # Wide elements first: then each tensor begins at a multiple of its element's size.
    ordered = sorted(wholes, key=lambda each: -each.dtype.itemsize)
    files = _dealt(ordered, max_bytes)
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


def _dealt(ordered: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
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
    told: dict[str, Any] = {"__metadata__": _METADATA}
    start = 0
    for each in members:
        stop = start + each.num_bytes
        where = {
            "dtype": DTYPE_NAMES[each.dtype],
            "shape": each.shape,
            "data_offsets": (start, stop),
        }
        told[each.name] = where
        start = stop
    text = msgspec.json.encode(told)
    text += b" " * (-len(text) % _ALIGN)
    return struct.pack("<Q", len(text)) + text


def _index(spots: dict[str, FileOffset], total_bytes: int) -> bytes:
    files = {name: spot.file_name for name, spot in spots.items()}
    told = {"metadata": {"total_size": total_bytes}, "weight_map": files}
    return msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n"
