"""Fetched shards of other owners: each is fetched once and cached within a budget of bytes.

    unknown --requested--> FETCHING --it arrived--> CACHED --end_step, clear, budget--> unknown
                           FETCHING --end_step, clear; it arrived--> unknown, but returned
                           FETCHING --the fetch failed--> unknown, and all waiting calls fail
                           FETCHING --its thread was interrupted--> unknown; waiting calls retry

- A shard that is cached or being fetched is not fetched again. One that was cleared, or whose step
  ended, during its fetch is not cached.
- At most `max_bytes` are cached, least recently used first out. Evicted memory that is still in use
  no longer counts.
- The lock is held for dictionary operations on CHUNK shards at a time; nothing is freed under it.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollmesh.core.errors import FetchMismatch
from rollmesh.tensors.handles import UNTAGGED, Content, RTensor


class TensorBackend(Protocol):
    """A transport to the owners of shards; any thread may call, several at once.

    An implementation that does not know the outcome of a call raises a TensorError, and never
    returns less than was requested.
    """

    def fetch(self, owner: str, handles: list[RTensor]) -> list[Content]:
        """Return the contents of shards of `owner`, in order and read-only; ShardMissing for the
        first that it does not hold, OwnerGone if it does not answer."""

    def take(self, owner: str, shard_ids: list[int], step: int) -> None:
        """Assign shards to `step`, as OwnerStore's `take`; OwnerGone if the outcome is unknown."""

    def end_step(self, owner: str, step: int) -> int:
        """Free at `owner` what `step`, or one before it, took; return how many shards it held.
        OwnerGone if the outcome is unknown."""

    def clear(self, owner: str, shard_ids: list[int]) -> int:
        """Free shards at their owner; return how many it held. OwnerGone if the outcome is
        unknown."""

    def close(self) -> None:
        """Close all connections; what was fetched stays valid."""


def check_fetched(handles: Sequence[RTensor], contents: Sequence[Content]) -> None:
    """Raise FetchMismatch unless `contents` have the types, shapes and sizes of `handles`, in
    order."""
    if len(contents) != len(handles):
        what = f"{len(handles)} shards were asked of {_owners(handles)}, {len(contents)} came"
        raise FetchMismatch(what)
    for handle, content in zip(handles, contents, strict=True):
        is_alike = content.shape == handle.shape and content.dtype == handle.dtype
        if not is_alike or content.data.nbytes != handle.num_bytes:
            came = f"{content.dtype} {list(content.shape)} of {content.data.nbytes} bytes came"
            asked = f"{handle.dtype} {list(handle.shape)} of {handle.num_bytes} bytes"
            what = f"shard {handle.shard_id:#x} of {handle.owner} is {asked}, and {came}"
            raise FetchMismatch(what)
        assert not content.data.flags.writeable, "a shard that others see is read-only"


def _owners(handles: Sequence[RTensor]) -> str:
    return ", ".join(sorted({handle.owner for handle in handles}))


class StepEntries(msgspec.Struct):
    """Entries of one step, or of UNTAGGED."""

    step: int
    ids: dict[int, None]
    num_bytes: int = 0


class CacheEntry(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One cached shard."""

    content: Content
    of_step: StepEntries
    """Released with the last entry, outside the lock: freeing one of 100,000 takes a
    millisecond."""


class LruCache:
    """Least-recently-used cache of contents, by the memory that they hold. Not thread-safe.

    `total_bytes` is the memory that would be freed with all entries: a block into which several
    shards were received counts once, completely, until the last of them is removed. Removed entries
    are returned, so that the caller chooses when they are freed.
    """

    def __init__(self, max_bytes: int) -> None:
        self.total_bytes = 0
        self._max_bytes = max_bytes
        self._entries: OrderedDict[int, CacheEntry] = OrderedDict()
        """Least recently used first."""
        self._steps: dict[int, StepEntries] = {}
        self._sharers: dict[int, int] = {}
        """Number of cached shards of a block, by the block's id()."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes_by_step(self) -> dict[int, int]:
        """Sizes of the shards themselves, by step."""
        return {step: each.num_bytes for step, each in self._steps.items()}

    @property
    def is_over(self) -> bool:
        """Whether entries must be removed; never because of a single shard."""
        return self.total_bytes > self._max_bytes

    def use(self, shard_id: int) -> Content | None:
        """Return the content, or None, and mark it as most recently used."""
        entry = self._entries.get(shard_id)
        if entry is None:
            return None
        self._entries.move_to_end(shard_id)
        return entry.content

    def put(self, handle: RTensor, content: Content) -> None:
        """Add a shard that is not cached, unless its memory alone exceeds the budget."""
        shard_id, step, num_bytes = handle.shard_id, handle.step, handle.num_bytes
        block = content.data.base
        if isinstance(block, np.ndarray):
            if block.nbytes > self._max_bytes:
                return
            self.total_bytes += self._shared(block)
        elif num_bytes > self._max_bytes:
            return
        else:
            self.total_bytes += num_bytes
        of_step = self._steps.get(step)
        if of_step is None:
            of_step = self._steps[step] = StepEntries(step, {})
        of_step.ids[shard_id] = None
        of_step.num_bytes += num_bytes
        self._entries[shard_id] = CacheEntry(content, of_step)

    def remove(self, shard_id: int) -> CacheEntry | None:
        """Remove the shard and return its entry, or None."""
        entry = self._entries.pop(shard_id, None)
        if entry is not None:
            self._forget(shard_id, entry)
        return entry

    def remove_coldest(self) -> CacheEntry:
        """Remove the least recently used entry; there must be one."""
        shard_id, entry = self._entries.popitem(last=False)
        self._forget(shard_id, entry)
        return entry

    def remove_ended(self, last_step: int) -> CacheEntry | None:
        """Remove an entry of a step up to `last_step` (or untagged); None if there is none."""
        for step, of_step in self._steps.items():
            if step <= last_step:
                # popitem takes the newest: searching for the oldest would repeatedly walk over
                # gaps.
                shard_id, _ = of_step.ids.popitem()
                return self.remove(shard_id)
        return None

    def _forget(self, shard_id: int, entry: CacheEntry) -> None:
        data, of_step = entry.content.data, entry.of_step
        num_bytes = data.nbytes
        of_step.ids.pop(shard_id, None)
        of_step.num_bytes -= num_bytes
        if not of_step.ids:
            del self._steps[of_step.step]
        block = data.base
        self.total_bytes -= self._unshared(block) if isinstance(block, np.ndarray) else num_bytes

    def _shared(self, block: NDArray[np.generic]) -> int:
        """Count one more shard of the block; return the bytes that this adds."""
        num_sharers = self._sharers.get(id(block), 0)
        self._sharers[id(block)] = num_sharers + 1
        return 0 if num_sharers else block.nbytes

    def _unshared(self, block: NDArray[np.generic]) -> int:
        """Count one less; return the bytes that this frees."""
        num_sharers = self._sharers.pop(id(block)) - 1
        if num_sharers:
            self._sharers[id(block)] = num_sharers
        return 0 if num_sharers else block.nbytes


_Shard = TypeVar("_Shard")
"""A shard's id, or data about it."""
FetchFn = Callable[[list[RTensor]], list[Content]]
"""Returns the contents of handles, in order, or raises an error."""
CHUNK = 64
"""Shards that are handled while the lock is held, which takes a tenth of a millisecond."""


class BufferStats(msgspec.Struct, frozen=True):
    """Contents and use of a buffer."""

    num_tensors: int
    total_bytes: int
    """Memory that the cached shards hold."""
    num_hits: int
    """Requested shards that were cached."""
    num_fetched: int
    bytes_by_step: dict[int, int]
    """Cached bytes, by the step that took them or UNTAGGED."""


class _FetchInFlight:
    """One thread's fetch, awaited by all who want its shards: RUNNING > DONE | FAILED |
    INTERRUPTED.

    It has `contents` when DONE, an `error` when FAILED, and neither when its thread was
    INTERRUPTED.
    """

    def __init__(self, ended_step: int) -> None:
        self.ended_step = ended_step
        """The newest ended step when it began."""
        self.handles: dict[int, RTensor] = {}
        self.contents: dict[int, Content] = {}
        self.error: Exception | None = None
        self.is_over = threading.Event()


class FetchBuffer:
    """The fetch cache of a consuming process; from any thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._cache = LruCache(max_bytes)
        self._in_flight: dict[int, _FetchInFlight] = {}
        """By shard: its fetch. A shard that is removed from here during its fetch is not cached."""
        self._lock = threading.Lock()
        self._ended_step = UNTAGGED
        self._num_hits = 0
        self._num_fetched = 0

    def get_many(self, handles: Iterable[RTensor], fetch: FetchFn) -> list[Content]:
        """Return the contents, in order.

        `fetch` is called once with the shards that are neither cached nor being fetched; its error
        is raised in every waiting call; FetchMismatch if it returns something else. It must not
        request the same shards from this buffer.
        """
        wanted = [*handles]
        missing = {handle.shard_id: handle for handle in wanted}
        found: dict[int, Content] = {}
        while missing:
            fetching = _FetchInFlight(self._ended_step)
            try:
                awaited = self._partition(missing, found, fetching)
                if fetching.handles:
                    self._complete(fetching, fetch([*fetching.handles.values()]))
            except Exception as error:
                fetching.error = _copy_error(error)
                raise
            finally:
                self._end(fetching)
            # First the own fetch, then those of others: so two calls cannot wait for each other.
            found.update(fetching.contents)
            found.update(_wait(awaited))
            missing = {each: handle for each, handle in missing.items() if each not in found}
        return [found[handle.shard_id] for handle in wanted]

    def end_step(self, step: int) -> int:
        """Drop what is tagged up to `step`, and what is untagged; return how many. Repeating an
        ended step does nothing."""
        with self._lock:
            if step <= self._ended_step:
                return 0
            self._ended_step = step
        num_dropped = 0
        while num_more := self._drop_ended(step):
            num_dropped += num_more
        return num_dropped

    def clear(self, shard_ids: Iterable[int] | None) -> int:
        """Drop these shards, or all for None; return how many were cached."""
        if shard_ids is not None:
            return sum(self._drop(some) for some in _chunks([*shard_ids]))
        with self._lock:
            cache, self._cache = self._cache, LruCache(self._max_bytes)
            self._in_flight = {}
        return len(cache)

    def stats(self) -> BufferStats:
        with self._lock:
            return BufferStats(
                len(self._cache),
                self._cache.total_bytes,
                self._num_hits,
                self._num_fetched,
                self._cache.bytes_by_step,
            )

    def _partition(
        self, missing: dict[int, RTensor], found: dict[int, Content], fetching: _FetchInFlight
    ) -> dict[int, _FetchInFlight]:
        """Put cached shards into `found` and unrequested ones into `fetching`; return the fetches
        of the rest."""
        awaited: dict[int, _FetchInFlight] = {}
        for some in _chunks([*missing]):
            with self._lock:
                for shard_id in some:
                    other = self._in_flight.get(shard_id)
                    if (content := self._cache.use(shard_id)) is not None:
                        found[shard_id] = content
                        self._num_hits += 1
                    elif other is not None and not other.is_over.is_set():
                        awaited[shard_id] = other
                    else:
                        # In this order an interruption leaves no orphaned entry.
                        fetching.handles[shard_id] = missing[shard_id]
                        self._in_flight[shard_id] = fetching
        return awaited

    def _complete(self, fetching: _FetchInFlight, contents: list[Content]) -> None:
        """Publish the contents to waiting calls, and cache what was not cleared meanwhile."""
        handles = [*fetching.handles.values()]
        check_fetched(handles, contents)
        fetching.contents = dict(zip(fetching.handles, contents, strict=True))
        for some in _chunks([*zip(handles, contents, strict=True)]):
            with self._lock:
                self._keep(fetching, some)
                self._num_fetched += len(some)
        while self._is_over():
            self._evict()

    def _end(self, fetching: _FetchInFlight) -> None:
        """Mark the fetch as over, whatever its outcome."""
        try:
            for some in _chunks([*fetching.handles]):
                with self._lock:
                    for shard_id in some:
                        if self._in_flight.get(shard_id) is fetching:
                            del self._in_flight[shard_id]
        finally:
            fetching.is_over.set()

    def _keep(self, fetching: _FetchInFlight, fetched: Sequence[tuple[RTensor, Content]]) -> None:
        """Cache what was not cleared meanwhile and whose step has not ended. The lock is held."""
        in_flight, newest = self._in_flight, self._ended_step
        none_has_ended = fetching.ended_step == newest
        for handle, content in fetched:
            shard_id, step = handle.shard_id, handle.step
            if in_flight.get(shard_id) is fetching:
                del in_flight[shard_id]
                if step > newest or (step == UNTAGGED and none_has_ended):
                    self._cache.put(handle, content)

    def _is_over(self) -> bool:
        with self._lock:
            return self._cache.is_over

    def _evict(self) -> None:
        """Drop least recently used entries beyond the budget."""
        gone: list[CacheEntry] = []
        with self._lock:
            while self._cache.is_over and len(gone) < CHUNK:
                gone.append(self._cache.remove_coldest())

    def _drop_ended(self, last_step: int) -> int:
        gone: list[CacheEntry] = []
        with self._lock:
            while len(gone) < CHUNK and (entry := self._cache.remove_ended(last_step)):
                gone.append(entry)
        return len(gone)

    def _drop(self, shard_ids: Sequence[int]) -> int:
        """Drop shards that are cached or being fetched; return how many were cached."""
        # Their memory is freed at the return, outside the lock.
        gone: list[CacheEntry] = []
        with self._lock:
            for shard_id in shard_ids:
                self._in_flight.pop(shard_id, None)
                entry = self._cache.remove(shard_id)
                if entry is not None:
                    gone.append(entry)
        return len(gone)


def _wait(awaited: dict[int, _FetchInFlight]) -> dict[int, Content]:
    """Wait for other fetches and return their contents, except interrupted ones; raise their
    errors."""
    found: dict[int, Content] = {}
    for shard_id, fetching in awaited.items():
        fetching.is_over.wait()
        if fetching.error is not None:
            raise _copy_error(fetching.error) from None
        if shard_id in fetching.contents:
            found[shard_id] = fetching.contents[shard_id]
    return found


def _copy_error(error: Exception) -> Exception:
    """Copy an error to raise it elsewhere: a stored one that is raised keeps its callers' frames
    alive."""
    same: Exception = type(error).__new__(type(error), *error.args)
    same.__dict__.update(error.__dict__)
    return same


def _chunks(shards: Sequence[_Shard]) -> Iterator[Sequence[_Shard]]:
    for start in range(0, len(shards), CHUNK):
        yield shards[start : start + CHUNK]
