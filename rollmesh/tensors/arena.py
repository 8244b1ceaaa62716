"""Reused memory for shards: one segment, its slots, and the pages under them.

    page   BARE --a slot is allocated on it--> BACKED --freed, and needed elsewhere--> BARE

- At most `max_bytes` of memory are used, whatever is held, freed or still in use. What fits into
  the budget finds space, however fragmented: the segment has SPREAD times as many addresses, and
  memory under free runs returns to the system when a new run needs it.
- All pages of a slot are backed before it is written.
- Freed slots otherwise keep their memory: a fresh page costs microseconds, so a step of 300 MiB a
  quarter of a second; the next step reuses the pages of the last one.
- Locks are held for the map only. If no file can be created (no /dev/shm), the memory is private
  and `path` is None.
"""

import mmap
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from operator import attrgetter
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollmesh.core.errors import ConfigError, StoreFull, TensorError
from rollmesh.core.free_space import FreeSpace, Run
from rollmesh.core.logs import get_logger
from rollmesh.tensors.segment import SHARED_MEMORY, Segment

log = get_logger()

PAGE_BYTES = mmap.PAGESIZE
ALIGN_BYTES = 64
"""A cache line, which satisfies every dtype and every vector unit."""
SPREAD = 4
"""Reserved addresses for each byte of the budget."""
AHEAD_PAGES = 2**21 // PAGE_BYTES
"""Pages are allocated up to a multiple of this, so that small slots need no system call each."""
STRIDE_PAGES = 2**22 // PAGE_BYTES
"""Pages in one system call that holds the interpreter's lock."""
LONG_COPY_BYTES = 2**18
"""Longer copies release the interpreter's lock. Short ones keep it and so cost half: 0.7 us instead
of 1.2 for 16 KiB in the cache."""
FREED_PER_LOCK = 256
"""Runs that are freed while the lock is held."""

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: allocates all pages at once."""
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class ArenaSlot(msgspec.Struct, frozen=True, gc=False):
    """An allocated range of the segment."""

    offset: int
    num_bytes: int


class Arena:
    """Allocates slots in one segment of memory; from any thread."""

    def __init__(self, max_bytes: int, folder: Path | None = SHARED_MEMORY) -> None:
        """Without `folder` the memory is private. ConfigError if there are no addresses for it."""
        self.max_bytes = max_bytes
        self.held_bytes = 0
        """Total of all slots, in whole cache lines."""
        self._max_pages = max(-(-max_bytes // PAGE_BYTES), 1)
        self._space = FreeSpace(SPREAD * self._max_pages * PAGE_BYTES)
        self._segment = _segment(folder, self._space.num_bytes, max_bytes)
        self._map = self._segment.memory if self._segment else _private(self._space.num_bytes)
        self._memory = memoryview(self._map)
        self._readable = self._memory.toreadonly()
        self._address = _address(np.frombuffer(self._memory, np.uint8))
        self._lock = threading.Lock()
        """Protects the map of free space."""
        self._backed = bytearray()
        """1 for each page that has memory; none beyond the end has. Changed under `_paging`; the
        pages of a slot only change by its holder, who may read them without the lock."""
        self._num_backed = 0
        self._paging = threading.Lock()
        self._owner_pid = os.getpid()

    @property
    def path(self) -> Path | None:
        """Path of the segment, for processes that attach to it."""
        return self._segment.path if self._segment else None

    @property
    def backed_bytes(self) -> int:
        """Memory allocated from the system."""
        return self._num_backed * PAGE_BYTES

    def allocate(self, sizes: Sequence[int]) -> list[ArenaSlot]:
        """Return a slot of each size, adjacent if possible; StoreFull, and nothing is allocated, if
        they do not all fit."""
        if os.getpid() != self._owner_pid:
            raise TensorError("a store that was made before a fork is the parent's: make another")
        marks = list(accumulate(map(_in_lines, sizes)))
        wanted = marks[-1] if marks else 0
        with self._lock:
            fits = self.held_bytes + wanted <= self.max_bytes
            pieces = self._space.take(marks) if fits else None
            if pieces is not None:
                self.held_bytes += wanted
        if pieces is None:
            raise StoreFull(wanted, self.held_bytes, self.max_bytes)
        slots = list(_slots(pieces, sizes))
        for start, stop in _runs(slots):
            why = self._back(start // PAGE_BYTES, -(-stop // PAGE_BYTES))
            if why:
                self.free(slots)
                raise StoreFull(wanted, self.held_bytes, self.max_bytes, why)
        return slots

    def free(self, slots: Iterable[ArenaSlot]) -> None:
        """Free the slots."""
        runs = _runs(sorted(slots, key=attrgetter("offset")))
        while batch := list(islice(runs, FREED_PER_LOCK)):
            with self._lock:
                for start, stop in batch:
                    self._space.give(start, stop)
                    self.held_bytes -= stop - start

    def write(self, slot: ArenaSlot, data: NDArray[np.uint8]) -> None:
        """Copy uint8 [slot.num_bytes] into the slot."""
        if slot.num_bytes < LONG_COPY_BYTES:
            self._memory[slot.offset : slot.offset + slot.num_bytes] = data.data
        else:
            np.copyto(self.view(slot), data)

    def view(self, slot: ArenaSlot) -> NDArray[np.uint8]:
        """Return a writable view, uint8 [slot.num_bytes]."""
        return np.frombuffer(self._memory, np.uint8, slot.num_bytes, slot.offset)

    def read_only(self, slot: ArenaSlot) -> NDArray[np.uint8]:
        """Return a read-only view; nothing derived from it is writable."""
        return np.frombuffer(self._readable, np.uint8, slot.num_bytes, slot.offset)

    def writable(self, slots: Iterable[ArenaSlot]) -> list[memoryview]:
        """Return the slots' bytes in order, in as few writable views as possible."""
        return [self._memory[start:stop] for start, stop in _joined(slots)]

    def readable(self, slots: Iterable[ArenaSlot]) -> list[memoryview]:
        """Return the slots' bytes in order, in as few read-only views as possible."""
        return [self._readable[start:stop] for start, stop in _joined(slots)]

    def offset_of(self, array: NDArray[np.uint8]) -> int | None:
        """Return the array's offset in the segment, or None if it is not there."""
        offset = _address(array) - self._address
        return offset if 0 <= offset < len(self._memory) else None

    def close(self) -> None:
        """Remove the segment's name; its memory is freed with its last user."""
        if self._segment is not None:
            self._segment.close()

    def _back(self, first: int, last: int) -> str:
        """Allocate memory for all of these pages; return why that failed, or ''."""
        if last <= len(self._backed) and self._backed.find(0, first, last) < 0:
            return ""
        with self._paging:
            wanted = last - first - self._backed.count(1, first, last)
            self._give_back(wanted - (self._max_pages - self._num_backed))
            room = self._max_pages - self._num_backed - wanted
            if room < 0:
                return "which leaves too few whole pages"
            end = self._space.num_bytes // PAGE_BYTES
            if not self._get_pages(first, last + min(-last % AHEAD_PAGES, room, end - last)):
                return ""
            # The folder is smaller than the budget, or others fill it.
            self._give_back(wanted)
            return self._get_pages(first, last)

    def _get_pages(self, first: int, last: int) -> str:
        """Allocate memory for the pages that have none; return why that failed, or ''."""
        self._backed.extend(bytes(max(last - len(self._backed), 0)))
        for start, stop in list(self._page_runs(0, first, last)):
            if self._segment:
                try:
                    self._segment.back(start * PAGE_BYTES, (stop - start) * PAGE_BYTES)
                except OSError as error:
                    return f"and {self._segment.path.parent} has {str(error.strerror).lower()}"
            try:
                self._advise(_POPULATE_WRITE, start, stop)
            except OSError:  # an older kernel: the first write allocates each page
                pass
            self._backed[start:stop] = b"\1" * (stop - start)
            self._num_backed += stop - start
        return ""

    def _give_back(self, num_pages: int) -> None:
        """Return up to `num_pages` to the system: first those beyond all slots, then those of the
        longest free runs."""
        seized: list[Run] = []
        while num_pages > 0:
            backed_end = (self._backed.rfind(1) + 1) * PAGE_BYTES
            with self._lock:
                run = self._space.take_to(backed_end) or self._space.take_longest()
            if not run:
                break
            seized.append(run)
            num_pages -= self._give_pages(*run, num_pages)
        with self._lock:
            for run in seized:
                self._space.give(*run)

    def _give_pages(self, start: int, stop: int, at_most: int) -> int:
        """Release whole pages of free bytes; return how many."""
        advice = mmap.MADV_REMOVE if self._segment else mmap.MADV_DONTNEED
        number = 0
        for first, last in self._page_runs(1, -(-start // PAGE_BYTES), stop // PAGE_BYTES):
            last = min(last, first + at_most - number)
            try:
                self._advise(advice, first, last)
            except OSError:  # not supported by the file system or a sandbox
                break
            self._backed[first:last] = bytes(last - first)
            self._num_backed -= last - first
            number += last - first
            if number == at_most:
                break
        return number

    def _advise(self, advice: int, first: int, last: int) -> None:
        for page in range(first, last, STRIDE_PAGES):
            num_pages = min(STRIDE_PAGES, last - page)
            self._map.madvise(advice, page * PAGE_BYTES, num_pages * PAGE_BYTES)

    def _page_runs(self, state: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield the runs of pages from `first` to `last` that are in `state`."""
        last = min(last, len(self._backed))
        while (begin := self._backed.find(state, first, last)) >= 0:
            end = self._backed.find(1 - state, begin, last)
            first = last if end < 0 else end
            yield begin, first


def _address(array: NDArray[np.uint8]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _in_lines(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _slots(pieces: Iterable[tuple[int, int]], sizes: Iterable[int]) -> Iterator[ArenaSlot]:
    remaining = iter(sizes)
    for start, number in pieces:
        for num_bytes in islice(remaining, number):
            yield ArenaSlot(start, num_bytes)
            start += _in_lines(num_bytes)


def _runs(slots: Iterable[ArenaSlot]) -> Iterator[Run]:
    """Yield the ranges that the slots cover, adjacent ones joined."""
    start = stop = 0
    for slot in slots:
        if slot.offset != stop:
            if start != stop:
                yield start, stop
            start = stop = slot.offset
        stop += _in_lines(slot.num_bytes)
    if start != stop:
        yield start, stop


def _joined(slots: Iterable[ArenaSlot]) -> Iterator[Run]:
    """Yield the exact bytes of the slots, those without a gap joined."""
    start = stop = 0
    for slot in slots:
        if slot.offset != stop:
            if start != stop:
                yield start, stop
            start = slot.offset
        stop = slot.offset + slot.num_bytes
    if start != stop:
        yield start, stop


def _private(num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except OSError as error:
        # An address limit, or a host that does not overcommit memory.
        what = f"no addresses for {num_bytes} bytes, {SPREAD} for each of a budget of tensors"
        remedy = "raise `ulimit -v`, set vm.overcommit_memory to 0, or lower the budget"
        raise ConfigError(f"{what}: {str(error.strerror).lower()}; {remedy}") from None


def _segment(folder: Path | None, num_bytes: int, max_bytes: int) -> Segment | None:
    """Create the segment; None if the folder cannot hold it."""
    if folder is None:
        return None
    try:
        segment = Segment(folder, num_bytes)
        folder_bytes = os.statvfs(folder).f_blocks * os.statvfs(folder).f_frsize
    except OSError as error:
        why = f"{folder}: {str(error.strerror).lower()}"
        log.info("arena.private", why=why, effect="consumers on this host receive over TCP")
        return None
    if 0 < folder_bytes < max_bytes:  # 0 means no bound
        remedy = "enlarge it (in a container by --shm-size), or lower the budget"
        about = {"folder": str(folder), "folder_bytes": folder_bytes, "max_bytes": max_bytes}
        log.warning("arena.beyond_folder", **about, remedy=remedy)
    return segment
