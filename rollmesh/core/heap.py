"""The C library's heap: its layout, and returning free memory to the system.

- If a symbol is missing (musl, macOS) or another allocator was preloaded (jemalloc, mimalloc),
  trimming is off and everything else works.
- Only `settle` runs on an event loop, at the start.
- Code that frees much memory reports it by `note_freed`. docs/explanation/memory.md has the figures
  behind the layout.
"""

import ctypes
import time
from collections.abc import Callable
from typing import Any

MMAP_THRESHOLD_BYTES = 4 * 2**20
"""Larger blocks have pages of their own, which are returned when freed. Fresh pages cost 1 ms per
MB and more in a virtual machine, so screenshots and their copies (0.5 MB) reuse warm ones. glibc
would raise this by itself up to 32 MiB, and long bodies would stay between small objects forever.
"""
TRIM_THRESHOLD_BYTES = 2**30
"""A shorter free end of the heap is returned by the heap trimmer, not on each free."""
NUM_ARENAS = 1
"""malloc_trim(3) does not return the free end of any arena but the first."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Parameters of malloc.h."""
_GLIBCS_TRIM_BYTES = 128 * 1024
"""glibc's own threshold, where we cannot trim."""


class _Place(ctypes.Structure):
    """Dl_info of dlfcn.h: the library of a function."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


class _Usage(ctypes.Structure):
    """mallinfo of malloc.h. Its counters wrap at 4 GiB; mallinfo2 needs glibc 2.33."""

    _fields_ = tuple(
        (name, ctypes.c_uint32)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


_PROBE_BYTES = 64 * 2**20
"""More than other threads allocate or free during the probe. Its pages are never touched. glibc
adapts its thresholds to freed blocks of up to 32 MiB only.
"""
_NEAR_PROBE_BYTES = range(_PROBE_BYTES // 2, 2 * _PROBE_BYTES)


def this_process() -> Any:
    """Return the libraries of this process; OSError if the system does not list them or `its_own`
    refuses them.
    """
    libraries = ctypes.CDLL(None)
    libraries.malloc.restype, libraries.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libraries.free.restype, libraries.free.argtypes = None, [ctypes.c_void_p]
    libraries.mallinfo.restype = _Usage
    return its_own(libraries)


def its_own(libraries: Any) -> Any:
    """Return `libraries` if `malloc` allocates from the heap that can be trimmed; OSError if not.

    The address of `malloc` does not show its library. If an executable is not position-independent
    and stores a pointer to malloc (python3 of Debian), dlsym returns an entry of the executable's
    own jump table. Therefore a block is allocated, and must appear in the statistics of that heap.
    """
    if _base_of(libraries, "mallinfo") != _base_of(libraries, "malloc_trim"):
        raise OSError("the statistics of the heap belong to another library")
    before = libraries.mallinfo()
    block = libraries.malloc(_PROBE_BYTES)
    after = libraries.mallinfo()
    libraries.free(block)
    if (_used_bytes(after) - _used_bytes(before)) % 2**32 not in _NEAR_PROBE_BYTES:
        raise OSError("malloc belongs to another library")
    return libraries


def _used_bytes(usage: Any) -> int:
    used: int = usage.uordblks + usage.hblkhd
    return used


def _base_of(libraries: Any, name: str) -> int | None:
    place = _Place()
    function = ctypes.cast(getattr(libraries, name), ctypes.c_void_p)
    libraries.dladdr(function, ctypes.byref(place))
    base: int | None = place.base
    return base


class Heap:
    """The heap of a process; `load` returns the C library's functions by name."""

    def __init__(self, load: Callable[[], Any] = this_process) -> None:
        try:
            libraries = load()
        except (OSError, AttributeError):
            libraries = None
        self._mallopt = getattr(libraries, "mallopt", None)
        self._malloc_trim = getattr(libraries, "malloc_trim", None)

    @property
    def can_trim(self) -> bool:
        """Whether `trim` has an effect."""
        return self._malloc_trim is not None

    def settle(self) -> bool:
        """Configure the heap, before there are threads; return False if that is not possible."""
        if self._mallopt is None:
            return False
        layout = (
            (_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
            (_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES if self.can_trim else _GLIBCS_TRIM_BYTES),
            (_M_ARENA_MAX, NUM_ARENAS),
        )
        return all(self._mallopt(name, value) == 1 for name, value in layout)

    def trim(self) -> float | None:
        """Return free memory to the system; return the seconds that it took, None if it is off.

        Other Python threads run meanwhile, until they need memory of the arena in progress.
        """
        if self._malloc_trim is None:
            return None
        begun_s = time.perf_counter()
        self._malloc_trim(ctypes.c_size_t(0))
        return time.perf_counter() - begun_s


SOME_FREED_BYTES = 2**20
"""Freed memory that is worth a trim once nothing more is freed."""


class _Freed:
    """A process-wide counter."""

    num_bytes = 0


def note_freed(num_bytes: int) -> None:
    """Count freed memory, from any thread.

    It is a hint: two threads that count at the same moment may lose one of their counts.
    """
    _Freed.num_bytes += num_bytes


def freed_bytes() -> int:
    """Return the sum of all `note_freed`; it only grows."""
    return _Freed.num_bytes
