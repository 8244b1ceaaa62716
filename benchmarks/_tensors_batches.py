"""What the tensor benchmark sends: batches of arrays, all of them views of one block of chance.

    big        32 of [2048, 1176] float32, 294 MiB: the patches of images
    small      256 trajectories of 8 keys, each of 4,224 int32: 2,048 arrays, 33 MiB
    tiny       so many of 1 KiB
    shifting   300 MiB in 24 to 64 arrays of six dtypes, never of the same shapes

Invariants: a batch is the same in every process that makes it of the same seed; each array begins
at 64 bytes and is whole 64-bit words, by which it is summed. Driven by _tensors_party.py.
"""

import functools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MIB = 2**20
BLOCK_BYTES = 320 * MIB
SHIFTING_BYTES = 300 * MIB
ALIGNED_BYTES = 64
NUM_TINY = 2_000
ITEM_BYTES = {
    "float32": 4, "bfloat16": 2, "int32": 4, "float8_e4m3fn": 1, "int64": 8, "float16": 2,
}  # fmt: skip

Bytes = NDArray[np.uint8]


class Piece(NamedTuple):
    """One array: what it is, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes


def make(name: str, seed: int) -> list[Piece]:
    """The batch of that name; another seed takes other bytes, and for `shifting` other shapes."""
    return BATCHES[name](random.Random(f"{name} {seed}"))


def digest(sums: Iterable[int]) -> int:
    """Of the arrays' sums by 64-bit words, in order: two that changed places do not pass."""
    return sum(place * each for place, each in enumerate(sums, 1)) % 2**63


def sum_of(data: Bytes) -> int:
    """By 64-bit words, whatever overflows."""
    return int(np.add.reduce(data.view(np.int64)))


def digest_of(pieces: Sequence[Piece]) -> int:
    """As a consumer should find it."""
    return digest(sum_of(each.data) for each in pieces)


@functools.cache
def _block() -> Bytes:
    words = np.random.default_rng(0).integers(0, 2**63, BLOCK_BYTES // 8, np.int64)
    return words.view(np.uint8)


def _piece(rng: random.Random, dtype: str, shape: tuple[int, ...]) -> Piece:
    num_bytes = ITEM_BYTES[dtype]
    for size in shape:
        num_bytes *= size
    start = ALIGNED_BYTES * rng.randrange((BLOCK_BYTES - num_bytes) // ALIGNED_BYTES)
    return Piece(dtype, shape, _block()[start : start + num_bytes])


def _big(rng: random.Random) -> list[Piece]:
    return [_piece(rng, "float32", (2048, 1176)) for _ in range(32)]


def _small(rng: random.Random) -> list[Piece]:
    return [_piece(rng, "int32", (4224,)) for _ in range(256 * 8)]


def _tiny(rng: random.Random) -> list[Piece]:
    return [_piece(rng, "float32", (256,)) for _ in range(NUM_TINY)]


def _shifting(rng: random.Random) -> list[Piece]:
    shares = [2 ** rng.uniform(0, 4) for _ in range(rng.randint(24, 64))]
    num_bytes = [SHIFTING_BYTES * share / sum(shares) for share in shares]
    dtypes = [rng.choice(list(ITEM_BYTES)) for _ in shares]
    pairs = zip(dtypes, num_bytes, strict=True)
    return [_piece(rng, dtype, (int(size / ITEM_BYTES[dtype]) // 8, 8)) for dtype, size in pairs]


BATCHES: dict[str, Callable[[random.Random], list[Piece]]] = {
    "big": _big,
    "small": _small,
    "tiny": _tiny,
    "shifting": _shifting,
}
