"""What brings shards from their owners: the door that each transport keeps to.

Owns the protocol, and the check of what came. Invariants: what passes the check is, for each
handle and in their order, an array of that type, shape and size; a transport that cannot say what
became of a call raises a TensorError, and never gives less in silence. Kept to by peer.py, which is
ours, and by ray_backend.py; driven by the plane, and by the buffer between.

Contents that are entry for their next use, counted by the memory that they hold.

Owns the order of use, which shards each step has, and the count of bytes. Invariant: `total_bytes`
is the memory that would be freed if all went: a block that several shards were received into counts
whole, once, until the last of them goes. Each operation costs as much as the shards it names, and
whoever takes one down gets what was there, so that it is freed when he likes. Not for threads;
driven by the buffer, in its lock.

Shards of other owners: each is fetched once, and entry within a budget of bytes.

    unknown --asked for--> FETCHING --it came--> KEPT --end_step, clear, the budget--> unknown
                           FETCHING --end_step, clear; it came--> unknown, handed out all the same
                           FETCHING --the fetch failed--> unknown, and who waits fails alike
                           FETCHING --its thread was interrupted--> unknown, and who waits asks anew

Owns a process's copies, and the table of what is on its way. Invariants: nobody asks for what is
here or on its way; what was cleared, or whose step ended, while it was on its way is not entry, so
nothing comes back; at most `max_bytes` of memory are entry, the longest unused goes first, and what
leaves while somebody views it is no longer counted. The lock is held for dictionary operations,
CHUNK shards at a time, and nothing is freed under it. Any thread may call; driven by the plane.
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
    """Any thread may call, several at once."""

    def fetch(self, owner: str, handles: list[RTensor]) -> list[Content]:
        """The contents of some shards of `owner`, in order and read-only; ShardMissing for the
        first that it does not hold, OwnerGone where it does not answer."""

    def take(self, owner: str, shard_ids: list[int], step: int) -> None:
        """Their owner frees them when `step` ends; as OwnerStore's `take`, and OwnerGone where
        nobody knows."""

    def end_step(self, owner: str, step: int) -> int:
        """Free at `owner` what `step`, or one before it, took; how many it held. OwnerGone where
        nobody knows."""

    def clear(self, owner: str, shard_ids: list[int]) -> int:
        """Free them at their owner; how many it held. OwnerGone where nobody knows."""

    def close(self) -> None:
        """End what is open; what was fetched stays valid."""


def check_fetched(handles: Sequence[RTensor], contents: Sequence[Content]) -> None:
    """FetchMismatch unless these are the contents of `handles`."""
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
    """What is here of one step, or of none."""

    step: int
    ids: dict[int, None]
    num_bytes: int = 0


class CacheEntry(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One shard that is here."""

    content: Content
    of_step: StepEntries
    """It goes with the last of them, when no lock is held: that of 100,000 takes a millisecond."""


class LruCache:
    """See the module."""

    def __init__(self, max_bytes: int) -> None:
        self.total_bytes = 0
        self._max_bytes = max_bytes
        self._entries: OrderedDict[int, CacheEntry] = OrderedDict()
        """The longest unused first."""
        self._steps: dict[int, StepEntries] = {}
        self._sharers: dict[int, int] = {}
        """How many shards are entry of a block, by the block's id()."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes_by_step(self) -> dict[int, int]:
        """Of the shards themselves: what else a block holds is of no step."""
        return {step: each.num_bytes for step, each in self._steps.items()}

    @property
    def is_over(self) -> bool:
        """Whether something has to go; never because of one shard alone."""
        return self.total_bytes > self._max_bytes

    def use(self, shard_id: int) -> Content | None:
        """Its content, if it is here; now it is the newest in use."""
        entry = self._entries.get(shard_id)
        if entry is None:
            return None
        self._entries.move_to_end(shard_id)
        return entry.content

    def put(self, handle: RTensor, content: Content) -> None:
        """Keep it, which is not here yet, unless its memory alone is more than may be entry."""
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
        """Keep it no longer, if it is here."""
        entry = self._entries.pop(shard_id, None)
        if entry is not None:
            self._forget(shard_id, entry)
        return entry

    def remove_coldest(self) -> CacheEntry:
        """The one that was not used for longest; there is one."""
        shard_id, entry = self._entries.popitem(last=False)
        self._forget(shard_id, entry)
        return entry

    def remove_ended(self, last_step: int) -> CacheEntry | None:
        """One of the steps up to `last_step`, untagged ones among them, if one is here."""
        for step, of_step in self._steps.items():
            if step <= last_step:
                # The newest, and popped: who looks for an end again and again walks over all gaps.
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
        """One shard more is entry of it; the bytes that this adds."""
        num_sharers = self._sharers.get(id(block), 0)
        self._sharers[id(block)] = num_sharers + 1
        return 0 if num_sharers else block.nbytes

    def _unshared(self, block: NDArray[np.generic]) -> int:
        """One less; the bytes that this frees."""
        num_sharers = self._sharers.pop(id(block)) - 1
        if num_sharers:
            self._sharers[id(block)] = num_sharers
        return 0 if num_sharers else block.nbytes


_Shard = TypeVar("_Shard")
"""Its id, or what is known of it."""
FetchFn = Callable[[list[RTensor]], list[Content]]
"""Contents of handles, in their order, or an error."""
CHUNK = 64
"""Shards that are looked up, entry or dropped while others wait, for a tenth of a millisecond."""


class BufferStats(msgspec.Struct, frozen=True):
    """What is entry, and what it was good for."""

    num_tensors: int
    total_bytes: int
    """Memory that they hold."""
    num_hits: int
    """Shards that were here when a call asked for them."""
    num_fetched: int
    bytes_by_step: dict[int, int]
    """Of them, by the step that took them or UNTAGGED."""


class _FetchInFlight:
    """One thread's fetch, for all who want its shards: UNDER_WAY > LANDED | FAILED | INTERRUPTED.

    It has `contents` from LANDED on, an `error` where it FAILED, and is over without either where
    its thread was INTERRUPTED.
    """

    def __init__(self, ended_step: int) -> None:
        self.ended_step = ended_step
        """The newest that had ended when it began."""
        self.handles: dict[int, RTensor] = {}
        self.contents: dict[int, Content] = {}
        self.error: Exception | None = None
        self.is_over = threading.Event()


class FetchBuffer:
    """See the module; one per consuming process."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._cache = LruCache(max_bytes)
        self._in_flight: dict[int, _FetchInFlight] = {}
        """Who fetches what; a shard that does not stand here any more is not entry."""
        self._lock = threading.Lock()
        self._ended_step = UNTAGGED
        self._num_hits = 0
        self._num_fetched = 0

    def get_many(self, handles: Iterable[RTensor], fetch: FetchFn) -> list[Content]:
        """Their contents, in order. `fetch` is called with those that are neither here nor on their
        way, each once, and what it raises is raised to all who wait for them; FetchMismatch where
        it gives other than was asked. It must not ask this buffer for the same."""
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
            # One's own first, and then those of others: so two cannot wait for each other.
            found.update(fetching.contents)
            found.update(_wait(awaited))
            missing = {each: handle for each, handle in missing.items() if each not in found}
        return [found[handle.shard_id] for handle in wanted]

    def end_step(self, step: int) -> int:
        """Drop what is tagged up to `step`, and what is untagged; how many. A step that has ended
        before changes nothing, so it may be said with each message."""
        with self._lock:
            if step <= self._ended_step:
                return 0
            self._ended_step = step
        num_dropped = 0
        while num_more := self._drop_ended(step):
            num_dropped += num_more
        return num_dropped

    def clear(self, shard_ids: Iterable[int] | None) -> int:
        """Drop these, or with None all; how many were entry."""
        if shard_ids is not None:
            return sum(self._drop(some) for some in _chunks([*shard_ids]))
        with self._lock:
            cache, self._cache = self._cache, LruCache(self._max_bytes)
            self._in_flight = {}
        return len(cache)

    def stats(self) -> BufferStats:
        """As of now."""
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
        """What is here goes to `found`, what nobody fetches to `fetching`; the rest is awaited."""
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
                        # In this order: an interruption in between leaves nothing in the table.
                        fetching.handles[shard_id] = missing[shard_id]
                        self._in_flight[shard_id] = fetching
        return awaited

    def _complete(self, fetching: _FetchInFlight, contents: list[Content]) -> None:
        """Give them to who waits, and keep what nobody cleared meanwhile."""
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
        """Whatever became of it, nobody waits for it any more."""
        try:
            for some in _chunks([*fetching.handles]):
                with self._lock:
                    for shard_id in some:
                        if self._in_flight.get(shard_id) is fetching:
                            del self._in_flight[shard_id]
        finally:
            fetching.is_over.set()

    def _keep(self, fetching: _FetchInFlight, fetched: Sequence[tuple[RTensor, Content]]) -> None:
        """What was not cleared meanwhile, and whose step has not ended. The lock is held."""
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
        """Past the budget, drop some of those that were not used for longest."""
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
        """Whether here or on their way; how many were here."""
        # What they held is freed at the return, when the lock is open.
        gone: list[CacheEntry] = []
        with self._lock:
            for shard_id in shard_ids:
                self._in_flight.pop(shard_id, None)
                entry = self._cache.remove(shard_id)
                if entry is not None:
                    gone.append(entry)
        return len(gone)


def _wait(awaited: dict[int, _FetchInFlight]) -> dict[int, Content]:
    """What others fetched of it, without what was interrupted; their errors."""
    found: dict[int, Content] = {}
    for shard_id, fetching in awaited.items():
        fetching.is_over.wait()
        if fetching.error is not None:
            raise _copy_error(fetching.error) from None
        if shard_id in fetching.contents:
            found[shard_id] = fetching.contents[shard_id]
    return found


def _copy_error(error: Exception) -> Exception:
    """The same to raise elsewhere: one that is entry and raised keeps its callers' frames alive."""
    same: Exception = type(error).__new__(type(error), *error.args)
    same.__dict__.update(error.__dict__)
    return same


def _chunks(shards: Sequence[_Shard]) -> Iterator[Sequence[_Shard]]:
    for start in range(0, len(shards), CHUNK):
        yield shards[start : start + CHUNK]
