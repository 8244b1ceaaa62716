"""Shards of other owners: each is fetched once, and kept within a budget of bytes.

    unknown --asked for--> FETCHING --it came--> KEPT --end_step, clear, the budget--> unknown
                           FETCHING --end_step, clear; it came--> unknown, handed out all the same
                           FETCHING --the fetch failed--> unknown, and who waits fails alike
                           FETCHING --its thread was interrupted--> unknown, and who waits asks anew

Owns a process's copies, and the table of what is on its way. Invariants: nobody asks for what is
here or on its way; what was cleared, or whose step ended, while it was on its way is not kept, so
nothing comes back; at most `max_bytes` of memory are kept, the longest unused goes first, and what
leaves while somebody views it is no longer counted. The lock is held for dictionary operations,
STRETCH shards at a time, and nothing is freed under it. Any thread may call; driven by the plane.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import msgspec

from rollmesh.tensors.backend import check_fetched
from rollmesh.tensors.handles import UNTAGGED, Content, RTensor
from rollmesh.tensors.shelf import Kept, Shelf

_Shard = TypeVar("_Shard")
"""Its id, or what is known of it."""
Fetch = Callable[[list[RTensor]], list[Content]]
"""Contents of handles, in their order, or an error."""
STRETCH = 64
"""Shards that are looked up, kept or dropped while others wait, for a tenth of a millisecond."""


class BufferStats(msgspec.Struct, frozen=True):
    """What is kept, and what it was good for."""

    num_tensors: int
    total_bytes: int
    """Memory that they hold."""
    num_hits: int
    """Shards that were here when a call asked for them."""
    num_fetched: int
    bytes_by_step: dict[int, int]
    """Of them, by the step that took them or UNTAGGED."""


class _Flight:
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
        self._shelf = Shelf(max_bytes)
        self._flights: dict[int, _Flight] = {}
        """Who fetches what; a shard that does not stand here any more is not kept."""
        self._lock = threading.Lock()
        self._ended_step = UNTAGGED
        self._num_hits = 0
        self._num_fetched = 0

    def get_many(self, handles: Iterable[RTensor], fetch: Fetch) -> list[Content]:
        """Their contents, in order. `fetch` is called with those that are neither here nor on their
        way, each once, and what it raises is raised to all who wait for them; FetchMismatch where
        it gives other than was asked. It must not ask this buffer for the same."""
        wanted = [*handles]
        missing = {handle.shard_id: handle for handle in wanted}
        found: dict[int, Content] = {}
        while missing:
            flight = _Flight(self._ended_step)
            try:
                awaited = self._sort(missing, found, flight)
                if flight.handles:
                    self._land(flight, fetch([*flight.handles.values()]))
            except Exception as error:
                flight.error = _again(error)
                raise
            finally:
                self._end(flight)
            # One's own first, and then those of others: so two cannot wait for each other.
            found.update(flight.contents)
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
        """Drop these, or with None all; how many were kept."""
        if shard_ids is not None:
            return sum(self._drop(some) for some in _stretches([*shard_ids]))
        with self._lock:
            shelf, self._shelf = self._shelf, Shelf(self._max_bytes)
            self._flights = {}
        return len(shelf)

    def stats(self) -> BufferStats:
        """As of now."""
        with self._lock:
            return BufferStats(
                len(self._shelf),
                self._shelf.total_bytes,
                self._num_hits,
                self._num_fetched,
                self._shelf.bytes_by_step,
            )

    def _sort(
        self, missing: dict[int, RTensor], found: dict[int, Content], flight: _Flight
    ) -> dict[int, _Flight]:
        """What is here goes to `found`, what nobody fetches to `flight`; the rest is awaited."""
        awaited: dict[int, _Flight] = {}
        for some in _stretches([*missing]):
            with self._lock:
                for shard_id in some:
                    other = self._flights.get(shard_id)
                    if (content := self._shelf.use(shard_id)) is not None:
                        found[shard_id] = content
                        self._num_hits += 1
                    elif other is not None and not other.is_over.is_set():
                        awaited[shard_id] = other
                    else:
                        # In this order: an interruption in between leaves nothing in the table.
                        flight.handles[shard_id] = missing[shard_id]
                        self._flights[shard_id] = flight
        return awaited

    def _land(self, flight: _Flight, contents: list[Content]) -> None:
        """Give them to who waits, and keep what nobody cleared meanwhile."""
        handles = [*flight.handles.values()]
        check_fetched(handles, contents)
        flight.contents = dict(zip(flight.handles, contents, strict=True))
        for some in _stretches([*zip(handles, contents, strict=True)]):
            with self._lock:
                self._keep(flight, some)
                self._num_fetched += len(some)
        while self._is_over():
            self._evict()

    def _end(self, flight: _Flight) -> None:
        """Whatever became of it, nobody waits for it any more."""
        try:
            for some in _stretches([*flight.handles]):
                with self._lock:
                    for shard_id in some:
                        if self._flights.get(shard_id) is flight:
                            del self._flights[shard_id]
        finally:
            flight.is_over.set()

    def _keep(self, flight: _Flight, landed: Sequence[tuple[RTensor, Content]]) -> None:
        """What was not cleared meanwhile, and whose step has not ended. The lock is held."""
        flights, newest = self._flights, self._ended_step
        none_has_ended = flight.ended_step == newest
        for handle, content in landed:
            shard_id, step = handle.shard_id, handle.step
            if flights.get(shard_id) is flight:
                del flights[shard_id]
                if step > newest or (step == UNTAGGED and none_has_ended):
                    self._shelf.put(handle, content)

    def _is_over(self) -> bool:
        with self._lock:
            return self._shelf.is_over

    def _evict(self) -> None:
        """Past the budget, drop some of those that were not used for longest."""
        gone: list[Kept] = []
        with self._lock:
            while self._shelf.is_over and len(gone) < STRETCH:
                gone.append(self._shelf.take_down_coldest())

    def _drop_ended(self, last_step: int) -> int:
        gone: list[Kept] = []
        with self._lock:
            while len(gone) < STRETCH and (kept := self._shelf.take_down_ended(last_step)):
                gone.append(kept)
        return len(gone)

    def _drop(self, shard_ids: Sequence[int]) -> int:
        """Whether here or on their way; how many were here."""
        # What they held is freed at the return, when the lock is open.
        gone: list[Kept] = []
        with self._lock:
            for shard_id in shard_ids:
                self._flights.pop(shard_id, None)
                kept = self._shelf.take_down(shard_id)
                if kept is not None:
                    gone.append(kept)
        return len(gone)


def _wait(awaited: dict[int, _Flight]) -> dict[int, Content]:
    """What others fetched of it, without what was interrupted; their errors."""
    found: dict[int, Content] = {}
    for shard_id, flight in awaited.items():
        flight.is_over.wait()
        if flight.error is not None:
            raise _again(flight.error) from None
        if shard_id in flight.contents:
            found[shard_id] = flight.contents[shard_id]
    return found


def _again(error: Exception) -> Exception:
    """The same to raise elsewhere: one that is kept and raised keeps its callers' frames alive."""
    same: Exception = type(error).__new__(type(error), *error.args)
    same.__dict__.update(error.__dict__)
    return same


def _stretches(shards: Sequence[_Shard]) -> Iterator[Sequence[_Shard]]:
    for start in range(0, len(shards), STRETCH):
        yield shards[start : start + STRETCH]
