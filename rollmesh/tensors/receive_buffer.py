"""Memory that sent shards are received into, reused as its arrays end; and loans of arrays.

    free --a fetch--> IN USE --its array was freed--> ended --the next fetch--> free

- At most `max_bytes` are kept; what does not fit gets new memory. A fresh page costs 3 us, half as
  much as receiving its content, so batches reuse the same pages.
- Bytes go from the socket to their final place. Shards that were received together are adjacent,
  and each is freed by itself. Memory is not rewritten while an array of it exists.
- A loan ends when the last view of its array is freed, in any thread, which may hold our locks: the
  end is only recorded. Each is reported once. The loans of a forked child do not count.
"""

import contextlib
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollmesh.core.errors import ConfigError, StoreFull
from rollmesh.core.logs import get_logger
from rollmesh.tensors.arena import Arena, ArenaSlot
from rollmesh.tensors.segment import SHARED_MEMORY, SharedRange

Array = NDArray[np.uint8]
Key = TypeVar("Key")
"""The lender's key: a shard's id, or a slot."""


class _Loan(weakref.ref[Array], Generic[Key]):
    """Calls back when its array is freed. weakref.KeyedRef is the same at four times the price."""

    __slots__ = ("key",)
    key: Key


class ArrayLoans(Generic[Key]):
    """Arrays in memory of one lender, and those that have ended. One thread at a time lends and
    takes."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        """`on_end` is called after each end, in any thread; it must not wait for a lock."""
        self._on_end = on_end
        self._lent: dict[int, _Loan[Key]] = {}
        self._ended: deque[Key] = deque()

    def __len__(self) -> int:
        """Number of open loans."""
        return len(self._lent)

    def lend(self, keys: Iterable[Key], arrays: Iterable[Array]) -> None:
        """Record loans of arrays in the lender's memory; each lasts as long as its array."""
        lent, end = self._lent, self._end
        for key, array in zip(keys, arrays, strict=True):
            loan: _Loan[Key] = _Loan(array, end)
            loan.key = key
            lent[id(loan)] = loan

    def give_back(self, keys: Iterable[Key]) -> None:
        """Record loans as ended for which no array was made."""
        self._ended.extend(keys)

    def take_ended(self, limit: int) -> list[Key]:
        """Return at most `limit` loans that have ended and were not returned before."""
        taken: list[Key] = []
        # Another thread may take the last one first.
        with contextlib.suppress(IndexError):
            while len(taken) < limit:
                taken.append(self._ended.popleft())
        return taken

    def _end(self, loan: weakref.ref[Array]) -> None:
        assert isinstance(loan, _Loan)
        del self._lent[id(loan)]
        self._ended.append(loan.key)
        self._on_end()


log = get_logger()

Fill = Callable[[Sequence[memoryview]], None]
"""Fills the given buffers, in order."""


class ReceiveBuffer:
    """Receives contents into reused memory; from any thread."""

    def __init__(self, max_bytes: int = 0, is_shared: bool = False) -> None:
        """Other processes of this machine can map a shared buffer."""
        self._max_bytes = max_bytes
        self._folder = SHARED_MEMORY if is_shared else None
        self._arena: Arena | None = None
        """Created by the first fetch: a process whose owners are all local needs none."""
        self._loans: ArrayLoans[ArenaSlot] = ArrayLoans(lambda: None)
        self._lock = threading.Lock()

    def receive(self, sizes: Sequence[int], fill: Fill) -> list[Array]:
        """Return read-only arrays of these sizes, filled by `fill`; raises what that raises."""
        arena = self._open_arena()
        slots = self._take(arena, sizes) if arena is not None else None
        if arena is None or slots is None:
            return _receive_into_new(sizes, fill)
        try:
            fill(arena.writable(slots))
        except BaseException:
            arena.free(slots)
            raise
        arrays = [arena.read_only(slot) for slot in slots]
        self._loans.lend(slots, arrays)
        return arrays

    def range_of(self, array: Array) -> SharedRange | None:
        """Return where other processes can map the array; None if they cannot."""
        arena = self._arena
        if arena is None or arena.path is None or (offset := arena.offset_of(array)) is None:
            return None
        return SharedRange(str(arena.path), offset, array.nbytes)

    def close(self) -> None:
        """Stop sharing and reusing memory; arrays stay valid."""
        with self._lock:
            self._max_bytes = 0
            arena = self._arena
        if arena is not None:
            arena.close()

    def _open_arena(self) -> Arena | None:
        with self._lock:
            if self._arena is None and self._max_bytes:
                try:
                    self._arena = Arena(self._max_bytes, self._folder)
                except ConfigError as error:
                    log.warning(
                        "receive_buffer.none", why=str(error), effect="each fetch gets new memory"
                    )
                    self._max_bytes = 0
            return self._arena

    def _take(self, arena: Arena, sizes: Sequence[int]) -> list[ArenaSlot] | None:
        with self._lock:
            ended = self._loans.take_ended(sys.maxsize)
        arena.free(ended)
        try:
            return arena.allocate(sizes)
        except StoreFull:
            return None


def _receive_into_new(sizes: Sequence[int], fill: Fill) -> list[Array]:
    arrays = [np.empty(num_bytes, np.uint8) for num_bytes in sizes]
    fill([array.data for array in arrays])
    for array in arrays:
        array.flags.writeable = False
    return arrays
