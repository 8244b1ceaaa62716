"""Batches of the tensor benchmark, and the messages between its processes.

    big        32 of [2048, 1176] float32, 294 MiB: the patches of images
    small      256 trajectories of 8 keys, each of 4,224 int32: 2,048 arrays, 33 MiB
    tiny       arrays of 1 KiB
    shifting   300 MiB in 24 to 64 arrays of six dtypes, never of the same shapes

    Publish > Published      Fetch > Fetched      EndStepRequest | Look > Held

- A batch is the same in every process that makes it with the same seed. Arrays are views of one
  random block, begin at 64 bytes, and are whole 64-bit words, by which they are summed.
- An arm is a way to bring tensors from an owner to a consumer: two classes, each in a process of
  its own. No message contains a tensor.
"""

import functools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
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
    """One array: its type, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes


def make(name: str, seed: int) -> list[Piece]:
    """Make the named batch; another seed gives other bytes and, for `shifting`, other shapes."""
    return BATCHES[name](random.Random(f"{name} {seed}"))


def digest(sums: Iterable[int]) -> int:
    """Combine the arrays' sums, in order, so that swapped arrays are detected."""
    return sum(place * each for place, each in enumerate(sums, 1)) % 2**63


def sum_of(data: Bytes) -> int:
    """Sum of the 64-bit words, with overflow."""
    return int(np.add.reduce(data.view(np.int64)))


def digest_of(pieces: Sequence[Piece]) -> int:
    """Digest that a consumer should compute."""
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


ARMS = {
    "raw": "tensor_floor:Raw",
    "shm": "tensor_planes:Shm",
    "raw_warm": "tensor_floor:RawWarm",
    "tcp": "tensor_planes:Tcp",
    "remote": "tensor_planes:Remote",
    "pioneer": "tensor_pioneer:Pioneer",
}
"""Locations of the `...Owner` and `...Consumer` of each arm; raw_warm uses raw's owner."""


class Publish(msgspec.Struct, tag=True):
    """Request to an owner: store a batch for `step`."""

    batch: str
    seed: int
    step: int


class BatchStored(msgspec.Struct):
    """Answer: the batch is stored."""

    address: str
    handles: bytes
    num_bytes: int
    digest: int
    took_s: float
    cpu_s: float


class FetchRequest(msgspec.Struct, tag=True):
    """Request to a consumer: fetch a batch, in one call or one call per array."""

    address: str
    handles: bytes
    one_by_one: bool = False


class Fetched(msgspec.Struct):
    """Answer: the batch is fetched."""

    took_s: list[float]
    """Per call."""
    cpu_s: float
    """CPU time of all threads, without reading."""
    digest: int
    read_s: float
    """Time to read all arrays, which maps pages that are not yet mapped."""


class EndStepRequest(msgspec.Struct, tag=True):
    """Request to both: end `step`."""

    step: int


class Look(msgspec.Struct, tag=True):
    """Request to both: report what is held."""


class HeldBytes(msgspec.Struct, omit_defaults=True):
    """Answer: tensors and bytes that the process holds."""

    num_tensors: int = 0
    total_bytes: int = 0
    retained_bytes: int = 0
    """Freed, but still referenced."""
    cpu_s: float = 0.0
    """Since the process began."""

    @property
    def is_empty(self) -> bool:
        return not (self.num_tensors or self.total_bytes or self.retained_bytes)


Ask = Publish | FetchRequest | EndStepRequest | Look


class Stored(NamedTuple):
    """Address and handles with which a consumer fetches a batch."""

    address: str
    handles: bytes


class TensorOwner(Protocol):
    """Owner side of an arm."""

    def prepare(self, pieces: Sequence[Piece]) -> None:
        """Make the arrays of a program; not timed."""

    def publish(self) -> None:
        """Store the prepared arrays; timed."""

    def take(self, step: int) -> Stored:
        """Assign the stored arrays to a step; not timed."""

    def end_step(self, step: int) -> None:
        """Free the arrays of a step."""

    def held(self) -> HeldBytes:
        """Count what is stored."""

    def close(self) -> None:
        """Free everything."""


class Consumer(Protocol):
    """Consumer side of an arm."""

    def prepare(self, stored: Stored) -> list[Any]:
        """Return one item per array; not timed."""

    def fetch(self, items: list[Any]) -> list[Any]:
        """Fetch the arrays; timed."""

    def sum_of(self, array: Any) -> int:
        """Sum of the 64-bit words."""

    def end_step(self, step: int) -> None:
        """Free what is kept of a step."""

    def held(self) -> HeldBytes:
        """Count what is kept."""

    def close(self) -> None:
        """Free everything."""
