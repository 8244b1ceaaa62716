"""What the processes of the tensor benchmark say to each other, and what an arm is.

    Publish > Published      Fetch > Fetched      EndStep | Look > Held

An arm is a way to bring tensors from an owner to a consumer: two classes, each in a process of its
own. Invariant: no message carries a tensor. Driven by _tensors_mesh.py, which asks, and by
_tensors_party.py, which answers.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from benchmarks._tensors_batches import Piece

ARMS = {
    "raw": "_tensors_floor:Raw",
    "shm": "_tensors_ours:Shm",
    "raw_warm": "_tensors_floor:RawWarm",
    "tcp": "_tensors_ours:Tcp",
    "remote": "_tensors_ours:Remote",
    "pioneer": "_tensors_pioneer:Pioneer",
}
"""Where the `...Owner` and `...Consumer` of each stand; raw_warm has the owner of raw."""


class Publish(msgspec.Struct, tag=True):
    """To an owner: store that batch, which `step` takes."""

    batch: str
    seed: int
    step: int


class Published(msgspec.Struct):
    """It is there."""

    address: str
    handles: bytes
    num_bytes: int
    digest: int
    took_s: float
    cpu_s: float


class Fetch(msgspec.Struct, tag=True):
    """To a consumer: bring that here, in one call or in one for each."""

    address: str
    handles: bytes
    one_by_one: bool = False


class Fetched(msgspec.Struct):
    """It is here."""

    took_s: list[float]
    """By call."""
    cpu_s: float
    """Of all its threads, without reading."""
    digest: int
    read_s: float
    """A reading of all of it, which maps pages that are not yet mapped."""


class EndStep(msgspec.Struct, tag=True):
    """To both: `step` is over."""

    step: int


class Look(msgspec.Struct, tag=True):
    """To both."""


class Held(msgspec.Struct, omit_defaults=True):
    """What a process has."""

    num_tensors: int = 0
    total_bytes: int = 0
    retained_bytes: int = 0
    """Freed, and still looked at by somebody."""
    cpu_s: float = 0.0
    """Since it began."""

    @property
    def is_empty(self) -> bool:
        return not (self.num_tensors or self.total_bytes or self.retained_bytes)


Ask = Publish | Fetch | EndStep | Look


class Stored(NamedTuple):
    """What a consumer needs to fetch it."""

    address: str
    handles: bytes


class Owner(Protocol):
    """One half of an arm."""

    def prepare(self, pieces: Sequence[Piece]) -> None:
        """Make of them what a program would have; not timed."""

    def publish(self) -> None:
        """Store what was prepared; timed."""

    def take(self, step: int) -> Stored:
        """A batch has it; not timed."""

    def end_step(self, step: int) -> None:
        """Free it."""

    def held(self) -> Held:
        """What is stored."""

    def close(self) -> None:
        """Leave nothing behind."""


class Consumer(Protocol):
    """The other half."""

    def prepare(self, stored: Stored) -> list[Any]:
        """One item for each array; not timed."""

    def fetch(self, items: list[Any]) -> list[Any]:
        """The arrays; timed."""

    def sum_of(self, array: Any) -> int:
        """Of its 64-bit words."""

    def end_step(self, step: int) -> None:
        """Free what is kept of it."""

    def held(self) -> Held:
        """What is kept."""

    def close(self) -> None:
        """Leave nothing behind."""
