"""Freed memory goes back to the system; where that is not possible, everything else works."""

import ctypes
import subprocess
import sys
import time
from ctypes import CFUNCTYPE, addressof, c_size_t, c_void_p
from typing import Any

import pytest

from rollmesh.core.heap import Heap, freed_bytes, its_own, note_freed, this_process

needs_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim"
)


class Musl:
    """A C library with neither malloc_trim nor mallopt."""


class OldLibrary:
    """A C library whose mallopt refuses every option."""

    def mallopt(self, name: int, value: int) -> int:
        return 0


def nothing_to_load() -> Any:
    raise OSError("no such library")


@pytest.mark.parametrize("load", [Musl, nothing_to_load])
def test_heap_without_the_symbols_cannot_trim_or_settle(load: Any) -> None:
    heap = Heap(load)
    assert not heap.can_trim
    assert not heap.settle()
    assert heap.trim() is None


MALLOC, FREE = CFUNCTYPE(c_void_p, c_size_t), CFUNCTYPE(None, c_void_p)
OTHER_BLOCK = ctypes.create_string_buffer(64)
"""A block of another allocator."""


class Variant:
    """The libraries of this process, with some functions replaced."""

    def __init__(self, **replaced: Any) -> None:
        self._libraries = this_process()
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._libraries, name)


@needs_glibc
def test_heap_is_off_where_another_allocator_was_preloaded() -> None:
    preloaded = Variant(malloc=MALLOC(lambda _: addressof(OTHER_BLOCK)), free=FREE(lambda _: None))
    heap = Heap(lambda: its_own(preloaded))
    assert not heap.can_trim
    assert not heap.settle()


@needs_glibc
def test_heap_is_off_where_the_statistics_are_those_of_another_allocator() -> None:
    assert not Heap(lambda: its_own(Variant(mallinfo=ctypes.CDLL("libm.so.6").cos))).can_trim


@needs_glibc
def test_heap_is_on_where_malloc_is_an_entry_of_the_executables_jump_table() -> None:
    libraries = this_process()
    executable = Variant(malloc=MALLOC(libraries.malloc), free=FREE(libraries.free))
    assert Heap(lambda: its_own(executable)).can_trim


@needs_glibc
def test_heap_of_this_interpreter_is_on() -> None:
    """Interpreters differ: python3 of Debian is not position-independent."""
    assert Heap().can_trim


def test_layout_that_the_library_refuses_is_reported() -> None:
    assert not Heap(OldLibrary).settle()


def test_symbols_are_looked_up_once() -> None:
    looked: list[str] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            looked.append(name)
            return lambda *_: 1

    heap = Heap(Watched)
    for _ in range(3):
        heap.trim()
    assert sorted(looked) == ["malloc_trim", "mallopt"]


def test_trim_returns_the_seconds_that_it_took() -> None:
    class Slow:
        mallopt = staticmethod(lambda *_: 1)

        def malloc_trim(self, _pad: int) -> int:
            until_s = time.perf_counter() + 0.005
            while time.perf_counter() < until_s:
                pass
            return 1

    heap = Heap(Slow)
    start_s = time.perf_counter()
    took_s = heap.trim()
    assert took_s is not None
    assert 0.005 <= took_s <= time.perf_counter() - start_s


GROWS = """
import sys
from rollmesh.core.heap import Heap
from rollmesh.core.metrics import rss_bytes

heap = Heap()
if sys.argv[1] == "settled":
    assert heap.settle()
before = rss_bytes()
small, large = [], []
for _ in range(300):  # small blocks that stay between large ones that are freed
    large.append(b"x" * 500_000)
    small.append(b"x" * 5_000)
    b"x" * (2_000_000 + 40_000 * len(large))
peak = rss_bytes() - before
del large
if sys.argv[1] == "settled":
    heap.trim()
print(peak, rss_bytes() - before)
"""


@needs_glibc
def test_memory_freed_between_small_blocks_returns_to_the_system() -> None:
    def run(how: str) -> tuple[int, int]:
        argv = [sys.executable, "-c", GROWS, how]
        printed = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
        peak, rest = map(int, printed.split())
        return peak, rest

    peak, rest = run("settled")
    _, rest_without = run("default")
    assert peak > 140e6
    assert rest < 0.1 * peak
    assert rest_without > 10 * rest, "this load does not fragment the heap"


def test_freed_bytes_are_counted() -> None:
    before = freed_bytes()
    note_freed(10)
    note_freed(5)
    assert freed_bytes() - before == 15
