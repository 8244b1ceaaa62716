"""Where bytes that were sent come to lie: in memory that was used before, as long as there is some.

    free --a fetch--> IN USE --its array has gone--> over --the next fetch--> free

Owns the memory, which is at most `max_bytes`; what does not fit lies in memory of its own, as all
does where that is 0. A fresh page costs 3 us here, half as much as what it holds costs to receive,
so batch after batch is received into the same ones. Invariants: bytes go from the socket to their
place, shards that were received together side by side, and each is free by itself; nobody writes
there while anybody looks. Any thread; driven by connection.py, and asked by relay.py where an array
lies.
"""

import sys
import threading
from collections.abc import Callable, Sequence

import numpy as np

from rollmesh.core.errors import ConfigError, StoreFull
from rollmesh.core.logs import get_logger
from rollmesh.tensors.arena import Arena, Slot
from rollmesh.tensors.loans import Array, Loans
from rollmesh.tensors.pins import Place
from rollmesh.tensors.segment import SHARED_MEMORY

log = get_logger()

Fill = Callable[[Sequence[memoryview]], None]
"""Writes to these, one after the other, as many bytes as they hold."""


class Landing:
    """See the module."""

    def __init__(self, max_bytes: int = 0, is_shared: bool = False) -> None:
        """Other processes of this machine may look at a shared one."""
        self._max_bytes = max_bytes
        self._folder = SHARED_MEMORY if is_shared else None
        self._arena: Arena | None = None
        """From the first fetch on: who has all his owners beside him needs none."""
        self._used: Loans[Slot] = Loans(lambda: None)
        self._lock = threading.Lock()

    def receive(self, sizes: Sequence[int], fill: Fill) -> list[Array]:
        """Arrays of these sizes, read-only, filled by `fill`; what that raises."""
        arena = self._opened()
        slots = self._take(arena, sizes) if arena is not None else None
        if arena is None or slots is None:
            return _afresh(sizes, fill)
        try:
            fill(arena.writable(slots))
        except BaseException:
            arena.free(slots)
            raise
        arrays = [arena.read_only(slot) for slot in slots]
        self._used.lend(slots, arrays)
        return arrays

    def place_of(self, array: Array) -> Place | None:
        """Where others see it; None where they do not."""
        arena = self._arena
        if arena is None or arena.path is None or (offset := arena.offset_of(array)) is None:
            return None
        return Place(str(arena.path), offset, array.nbytes)

    def close(self) -> None:
        """Nobody else sees it any more; what is looked at stays."""
        with self._lock:
            self._max_bytes = 0
            arena = self._arena
        if arena is not None:
            arena.close()

    def _opened(self) -> Arena | None:
        with self._lock:
            if self._arena is None and self._max_bytes:
                try:
                    self._arena = Arena(self._max_bytes, self._folder)
                except ConfigError as error:
                    log.warning("landing.none", why=str(error), effect="each fetch gets new memory")
                    self._max_bytes = 0
            return self._arena

    def _take(self, arena: Arena, sizes: Sequence[int]) -> list[Slot] | None:
        with self._lock:
            over = self._used.take_ended(sys.maxsize)
        arena.free(over)
        try:
            return arena.allocate(sizes)
        except StoreFull:
            return None


def _afresh(sizes: Sequence[int], fill: Fill) -> list[Array]:
    arrays = [np.empty(num_bytes, np.uint8) for num_bytes in sizes]
    fill([array.data for array in arrays])
    for array in arrays:
        array.flags.writeable = False
    return arrays
