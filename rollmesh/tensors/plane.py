"""The tensor data plane of one process: its own store, its fetch buffer and its transport.

    remotize   tensors --own store--> handles, which are sent
    localize   handles --own store | buffer < backend--> read-only tensors

- What this process owns is read from its own store, never over a socket or through the buffer.
- A call fetches a shard once, and returns one tensor for all its places. What a step or a clear
  ends, ends in the store and in the buffer.
- A forked child gets nothing: its loans would not count, and it lacks the threads.
- A process without a store keeps its tensors; one without a plane (plain torchrun) has an empty
  one, so that the same code runs there.
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from rollmesh.core.errors import AddressError, TensorError
from rollmesh.tensors.fetch_buffer import BufferStats, FetchBuffer, TensorBackend, check_fetched
from rollmesh.tensors.handles import NUMBER_BITS, UNTAGGED, Content, RTensor, transform
from rollmesh.tensors.store import OwnerStore, StorageStats
from rollmesh.tensors.torch_bridge import ReadOnlyTensor, Tensor, to_content, to_tensor

MAX_OWNERS_AT_ONCE = 8
"""Owners that one call fetches from concurrently."""


class PlaneStats(msgspec.Struct, frozen=True):
    """Statistics of a plane; None for a part that the process does not have."""

    storage: StorageStats | None
    buffer: BufferStats | None


class Plane:
    """The parts of the data plane that this process needs; from any thread."""

    def __init__(
        self,
        store: OwnerStore | None = None,
        buffer: FetchBuffer | None = None,
        backend: TensorBackend | None = None,
    ) -> None:
        self.store = store
        self.buffer = buffer
        self.backend = backend
        self._pid = os.getpid()

    def remotize(self, nested: Any, step: int = UNTAGGED) -> Any:
        """Replace each tensor in `nested` by a handle; the tensors are stored here and taken by
        `step`.

        Stored is what the handle says: any dtype, bit by bit, detached, on the host, a slice
        without the rest of its memory. A padded tensor stays padded. A tensor at two places is
        stored once. StoreFull if the budget is used up; then none is stored.
        """
        store = self.store
        if store is None:
            return nested

        def stored(tensors: list[Tensor]) -> list[RTensor]:
            return store.put([to_content(each) for each in tensors], step)

        return transform(nested, Tensor, stored)

    def localize(self, nested: Any) -> Any:
        """Replace each handle in `nested` by a read-only tensor; tensors stay.

        Raises ShardMissing for the first shard that its owner does not hold, OwnerGone if an owner
        does not answer.
        """
        return transform(nested, RTensor, self._tensors)

    def take(self, handles: Sequence[RTensor], step: int) -> None:
        """Assign the shards to `step` at their owners, as OwnerStore's `take`; OwnerGone if one
        does not answer, after all others are taken."""
        own = dict.fromkeys(self._own(handles))
        of_owner: dict[str, list[int]] = {}
        for each in handles:
            if each.shard_id not in own:
                of_owner.setdefault(each.owner, []).append(each.shard_id)
        takes = [partial(self._take_at, *each, step) for each in of_owner.items()]
        if self.store is not None:
            takes.insert(0, partial(self.store.take, [*own], step))
        errors: list[Exception] = []
        for take in takes:
            try:
                take()
            except (TensorError, AddressError) as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def end_step_at(self, owner: str, step: int) -> int:
        """Free what is tagged up to `step` at another owner; return how many shards it held.
        OwnerGone if the outcome is unknown."""
        return self._backend_for(owner).end_step(owner, step)

    def end_step(self, step: int) -> None:
        """Free what is tagged up to `step` in this process."""
        if self.store is not None:
            self.store.end_step(step)
        if self.buffer is not None:
            self.buffer.end_step(step)

    def clear(self, shard_ids: Sequence[int]) -> int:
        """Free these shards here, copies first; return how many the store held."""
        self.evict(shard_ids)
        return self.store.clear(shard_ids) if self.store is not None else 0

    def clear_at(self, owner: str, shard_ids: Sequence[int]) -> int:
        """Free these shards of `owner`, and the copies here first, so that a concurrent fetch finds
        them gone; return how many it held. OwnerGone if the outcome is unknown."""
        if self.store is not None and owner == self.store.owner:
            return self.clear(shard_ids)
        self.evict(shard_ids)
        return self._backend_for(owner).clear(owner, list(shard_ids))

    def evict(self, shard_ids: Sequence[int] | None) -> int:
        """Drop copies of these shards of other owners, or all for None; return how many there
        were."""
        if shard_ids and isinstance(shard_ids[0], RTensor):
            raise TensorError("shards are freed by their ids: flatten_shard_ids(handles)")
        return self.buffer.clear(shard_ids) if self.buffer is not None else 0

    def stats(self) -> PlaneStats:
        return PlaneStats(
            self.store.stats() if self.store is not None else None,
            self.buffer.stats() if self.buffer is not None else None,
        )

    def _tensors(self, handles: list[RTensor]) -> list[ReadOnlyTensor]:
        if os.getpid() != self._pid:
            raise TensorError("a plane that was made before a fork is the parent's: localize there")
        distinct = {each.shard_id: each for each in handles}
        contents = self._contents([*distinct.values()])
        tensors = dict(zip(distinct, map(to_tensor, contents), strict=True))
        return [tensors[each.shard_id] for each in handles]

    def _contents(self, handles: list[RTensor]) -> list[Content]:
        contents = {each: self._read(each) for each in self._own(handles)}
        if not contents:
            return self._fetched(handles)
        others = [handle for handle in handles if handle.shard_id not in contents]
        other_ids = [handle.shard_id for handle in others]
        contents.update(zip(other_ids, self._fetched(others), strict=True))
        return [contents[handle.shard_id] for handle in handles]

    def _own(self, handles: Iterable[RTensor]) -> list[int]:
        """Return the ids that belong to this process or an earlier incarnation of it, whose loss
        the store reports."""
        if self.store is None:
            return []
        owner, incarnation = self.store.owner, self.store.incarnation
        return [
            each.shard_id
            for each in handles
            if each.owner == owner or each.shard_id >> NUMBER_BITS == incarnation
        ]

    def _read(self, shard_id: int) -> Content:
        assert self.store is not None
        return self.store.read(shard_id)

    def _fetched(self, handles: list[RTensor]) -> list[Content]:
        if not handles:
            return []
        if self.buffer is not None:
            return self.buffer.get_many(handles, self._fetch)
        contents = self._fetch(handles)
        check_fetched(handles, contents)
        return contents

    def _fetch(self, handles: list[RTensor]) -> list[Content]:
        """Fetch from the owners, concurrently if there are several."""
        of_owner: dict[str, list[RTensor]] = {}
        for handle in handles:
            of_owner.setdefault(handle.owner, []).append(handle)
        if len(of_owner) == 1:
            return self._fetch_from(handles[0].owner, handles)
        with ThreadPoolExecutor(min(len(of_owner), MAX_OWNERS_AT_ONCE), "fetch") as pool:
            fetched = list(pool.map(self._fetch_from, of_owner, of_owner.values()))
        found: dict[int, Content] = {}
        for asked, contents in zip(of_owner.values(), fetched, strict=True):
            check_fetched(asked, contents)
            found.update((each.shard_id, got) for each, got in zip(asked, contents, strict=True))
        return [found[each.shard_id] for each in handles]

    def _fetch_from(self, owner: str, handles: list[RTensor]) -> list[Content]:
        return self._backend_for(owner).fetch(owner, handles)

    def _take_at(self, owner: str, shard_ids: list[int], step: int) -> None:
        self._backend_for(owner).take(owner, shard_ids, step)

    def _backend_for(self, owner: str) -> TensorBackend:
        if not owner:
            raise TensorError("its owner has no server: start its TensorServer before remotizing")
        if self.backend is None:
            raise TensorError(f"this process has no way to {owner}: give its plane a backend")
        return self.backend


class _Process:
    plane = Plane()


def use(plane: Plane) -> Plane:
    """Make `plane` the process's plane and return the previous one."""
    before, _Process.plane = _Process.plane, plane
    return before


def current() -> Plane:
    """Return the process's plane."""
    return _Process.plane
