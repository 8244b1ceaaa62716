"""The C library's heap under this process: how it is laid out, and how what is free in it is given
back to the system.

Invariants: symbols are looked up once; where one is missing (no glibc, musl, macOS), or another
allocator was preloaded (jemalloc, mimalloc) and glibc's heap is empty, the measure is off, says so,
and everything else goes on; nothing here runs on an event loop but `settle`, at the start. Who
frees much says so by `note_freed`. Figures behind the layout stand in docs/explanation/memory.md.
Driven by the processes' main functions and, for trims, by runtime/heap_trimmer.py.
"""

import ctypes
import time
from collections.abc import Callable
from typing import Any

MMAP_THRESHOLD_BYTES = 4 * 2**20
"""What is larger has pages of its own, which go back when it is freed. Fresh pages cost 1 ms a MB
and more in a virtual machine, so screenshots and their copies (0.5 MB) use warm ones again. glibc
would raise this by itself up to 32 MiB, and long bodies would lie between small things for ever."""
TRIM_THRESHOLD_BYTES = 2**30
"""A shorter free end of the heap is not given back by whoever frees: the keeper does that."""
NUM_ARENAS = 1
"""malloc_trim(3) does not give back what is free at the end of any but the first."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Of malloc.h."""
_GLIBCS_TRIM_BYTES = 128 * 1024
"""Where nobody trims, glibc goes on to do so."""


class _Place(ctypes.Structure):
    """Dl_info of dlfcn.h: where a function stands."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def this_process() -> Any:
    """The libraries that are loaded here; OSError where the system cannot say."""
    return its_own(ctypes.CDLL(None))


def its_own(libraries: Any) -> Any:
    """The same, where `malloc` is of the library whose heap can be trimmed; OSError elsewhere."""
    if _base_of(libraries, "malloc") != _base_of(libraries, "malloc_trim"):
        raise OSError("malloc is another library's")
    return libraries


def _base_of(libraries: Any, name: str) -> int | None:
    place = _Place()
    function = ctypes.cast(getattr(libraries, name), ctypes.c_void_p)
    libraries.dladdr(function, ctypes.byref(place))
    base: int | None = place.base
    return base


class Heap:
    """The heap of a process; `load` gives the C library's functions by name."""

    def __init__(self, load: Callable[[], Any] = this_process) -> None:
        self._mallopt = _symbol(load, "mallopt")
        self._malloc_trim = _symbol(load, "malloc_trim")

    @property
    def can_trim(self) -> bool:
        """Whether `trim` does anything."""
        return self._malloc_trim is not None

    def settle(self) -> bool:
        """Lay the heap out as above; before there are threads. False where that is not possible."""
        if self._mallopt is None:
            return False
        layout = (
            (_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
            (_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES if self.can_trim else _GLIBCS_TRIM_BYTES),
            (_M_ARENA_MAX, NUM_ARENAS),
        )
        return all(self._mallopt(name, value) == 1 for name, value in layout)

    def trim(self) -> float | None:
        """Give free memory back to the system; the seconds that it took, None where it is off.

        Others' Python code goes on meanwhile, until it wants memory of the arena that is looked at.
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
    """A count that outlives who adds to it."""

    num_bytes = 0


def note_freed(num_bytes: int) -> None:
    """So much was let go; from any thread.

    It is a hint: two threads that count at the same moment may lose one of their counts.
    """
    _Freed.num_bytes += num_bytes


def freed_bytes() -> int:
    """All that was told to `note_freed`: it only grows."""
    return _Freed.num_bytes
