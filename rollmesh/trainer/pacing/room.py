"""Where samples lie from their arrival until their step has ended: in a room, which the policy has.

    PlainRoom   arrays of this process, for a policy that trains in it
    StoreRoom   shards of this process's store: the intake writes them there, and ranks are sent
                their handles

Invariants: a sample is written once into its room, and never copied on the way to who trains it; it
lies there until it is cleared or its step ends. Driven by stock.py, and by the policy.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from rollmesh.serve.client.samples import (
    BYTES_PER_TOKEN,
    Fill,
    Laid,
    Lay,
    Sample,
    SampleArrays,
    arrays_in,
    lay_plainly,
)
from rollmesh.tensors.holdings import Kind
from rollmesh.tensors.store import OwnerStore


class Room(Protocol):
    """See the module."""

    def lay(self, lengths: Sequence[int], fill: Fill) -> list[Laid]:
        """As `Lay` says; StoreFull, and none is laid, where they do not fit."""

    def holds(self, sample: Sample) -> bool:
        """Whether it lies here, and not elsewhere for want of room."""

    def clear(self, samples: Sequence[Sample]) -> None:
        """They are not trained; what lies elsewhere is passed over."""


class PlainRoom:
    """Of any size."""

    def lay(self, lengths: Sequence[int], fill: Fill) -> list[Laid]:
        return lay_plainly(lengths, fill)

    def holds(self, sample: Sample) -> bool:
        del sample
        return True

    def clear(self, samples: Sequence[Sample]) -> None:
        """Their memory goes with them."""


class StoreRoom:
    """As large as the store's budget."""

    def __init__(self, store: OwnerStore) -> None:
        self._store = store

    def lay(self, lengths: Sequence[int], fill: Fill) -> list[Laid]:
        sizes = [BYTES_PER_TOKEN * each for each in lengths]
        with self._store.reserve([Kind("uint8", (size,), size) for size in sizes]) as reserved:
            fill([arrays_in(memory) for memory in reserved.memory])
            handles = reserved.commit()
        return [Laid(arrays_in(self._store.read(each.shard_id).data), each) for each in handles]

    def holds(self, sample: Sample) -> bool:
        return sample.handle is not None

    def clear(self, samples: Sequence[Sample]) -> None:
        self._store.clear([each.handle.shard_id for each in samples if each.handle is not None])


def moved(samples: Sequence[Sample], lay: Lay) -> list[Sample]:
    """The same samples where `lay` lays them; what it raises."""

    def fill(places: Sequence[SampleArrays]) -> None:
        for sample, place in zip(samples, places, strict=True):
            for name, array in place._asdict().items():
                array[:] = getattr(sample, name)

    laid = lay([len(sample.token_ids) for sample in samples], fill)
    return [
        msgspec.structs.replace(sample, handle=each.handle, **each.arrays._asdict())
        for sample, each in zip(samples, laid, strict=True)
    ]
