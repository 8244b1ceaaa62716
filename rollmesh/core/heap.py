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


def this_process() -> Any:
    """Return the libraries of this process; OSError if the system does not list them."""
    return its_own(ctypes.CDLL(None))


def its_own(libraries: Any) -> Any:
    """Return `libraries` if `malloc` belongs to the library whose heap can be trimmed; OSError
    otherwise.
    """
    if _base_of(libraries, "malloc") != _base_of(libraries, "malloc_trim"):
        raise OSError("malloc belongs to another library")
    return libraries


def _base_of(libraries: Any, name: str) -> int | None:
    place = _Place()
    function = ctypes.cast(getattr(libraries, name), ctypes.c_void_p)
    libraries.dladdr(function, ctypes.byref(place))
    base: int | None = place.base
    return base


class Heap:
    """The heap of a process; `load` returns the C library's functions by name."""

    def __init__(self, load: Callable[[], Any] = this_process) -> None:
        self._mallopt = _symbol(load, "mallopt")
        self._malloc_trim = _symbol(load, "malloc_trim")

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


def _symbol(load: Callable[[], Any], name: str) -> Any:
    try:
        return getattr(load(), name)
    except (OSError, AttributeError):
        return None


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
