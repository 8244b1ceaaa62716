"""Case of the tensor benchmark: how long other threads wait while 100,000 shards are freed.

The locks of a store and a buffer measure how long they are held. A figure is the longest hold of
any lock, in CPU time of its thread, to which other work can only add; the minimum over all rounds
is reported.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks.lib.tensor_mesh import TensorBench
from rollmesh.core.clock import SystemClock
from rollmesh.tensors.arena import Arena
from rollmesh.tensors.fetch_buffer import FetchBuffer
from rollmesh.tensors.handles import Content, RTensor
from rollmesh.tensors.store import OwnerStore, StoreSettings

NUM_SHARDS = 100_000
SHARD_BYTES = 64
MAX_BYTES = 2 * NUM_SHARDS * SHARD_BYTES
STEP = 1

_Lock = threading.Lock
_Room = OwnerStore | FetchBuffer
_Empty = Callable[[_Room, list[int]], int]


class TimedLock:
    """A lock that records its longest hold."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._lock = _Lock()
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._began_s = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.longest_s = max(self.longest_s, time.thread_time() - self._began_s)
        self._lock.release()


def locks(bench: TensorBench) -> None:
    """Measure a store and a buffer, each emptied in both ways."""
    ways: dict[str, _Empty] = {
        "clear": lambda room, ids: room.clear(ids),
        "end_step": lambda room, _: room.end_step(STEP),
    }
    rooms: dict[str, Callable[[], _Room]] = {
        "store": lambda: OwnerStore(
            StoreSettings(max_bytes=MAX_BYTES), SystemClock(), Arena(MAX_BYTES, None)
        ),
        "buffer": lambda: FetchBuffer(MAX_BYTES),
    }
    num_rounds = 3 if bench.is_quick else 7
    for name, make in rooms.items():
        for way, empty in ways.items():
            longest_s = min(_longest_hold_s(make, empty) for _ in range(num_rounds))
            bench.note(f"locks.{name}", {f"{way}_ms": 1e3 * longest_s})


def _longest_hold_s(make: Callable[[], _Room], empty: _Empty) -> float:
    with _timed_locks() as made:
        room = make()
    ids = _filled(room)
    for lock in made:
        lock.longest_s = 0.0
    gc.disable()  # garbage collection stops all threads, whatever lock is held
    num_freed = empty(room, ids)
    gc.enable()
    assert num_freed == NUM_SHARDS, num_freed
    if isinstance(room, OwnerStore):
        room.close()
    return max(lock.longest_s for lock in made)


@contextmanager
def _timed_locks() -> Iterator[list[TimedLock]]:
    """Replace the lock type; yields the locks created meanwhile."""
    made: list[TimedLock] = []

    def make() -> TimedLock:
        made.append(TimedLock())
        return made[-1]

    threading.Lock = make  # type: ignore[assignment]  # for what is measured alone
    try:
        yield made
    finally:
        threading.Lock = _Lock


def _filled(room: _Room) -> list[int]:
    """Fill `room` with NUM_SHARDS shards and return their ids."""
    if isinstance(room, OwnerStore):
        return [each.shard_id for each in room.put(_contents(), STEP)]
    owner, shape = "tcp://127.0.0.1:41234", (SHARD_BYTES,)
    ids = [7 << 32 | number for number in range(NUM_SHARDS)]
    handles = [RTensor(each, owner, STEP, "uint8", shape, SHARD_BYTES) for each in ids]
    room.get_many(handles, lambda _: _contents())
    return ids


def _contents() -> list[Content]:
    """Contents with an array each."""
    block = np.zeros(NUM_SHARDS * SHARD_BYTES, np.uint8).data.toreadonly()
    return [
        Content("uint8", (SHARD_BYTES,), np.frombuffer(block, np.uint8, SHARD_BYTES, offset))
        for offset in range(0, len(block), SHARD_BYTES)
    ]
