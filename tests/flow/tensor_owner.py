"""An owner of tensors that does what a test says, one line at a time.

Owns one store, in the folder that is its argument. Invariant: each line it reads is answered by one
line. Driven by test_tensor_memory.py.
"""

import os
import sys
from pathlib import Path

import msgspec
import numpy as np

from rollmesh.core.clock import SystemClock
from rollmesh.core.errors import TensorError
from rollmesh.tensors.arena import Arena
from rollmesh.tensors.handles import Content
from rollmesh.tensors.segment import SharedRange
from rollmesh.tensors.store import OwnerStore, StoreSettings

MAX_BYTES = 2**22


def put(store: OwnerStore) -> str:
    """Where 100,000 bytes of 7 lie."""
    data = np.full(100_000, 7, np.uint8)
    (handle,) = store.put([Content("uint8", (100_000,), data)])
    (place,) = store.pins.places([handle.shard_id], "test")
    return msgspec.json.encode(place).decode()


def fork(store: OwnerStore) -> str:
    """What a child says that puts, closes the store and ends as any program does."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            put(store)
        except TensorError as error:
            os.write(writing, str(error).encode())
        store.close()
        sys.exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with open(reading) as told:
        return told.read()


def linger(_: OwnerStore) -> str:
    """What a child says that stays until there are no more lines, whatever becomes of us."""
    reading, writing = os.pipe()
    if not os.fork():
        os.write(writing, b"it lingers")
        sys.stdin.read()
        os._exit(0)
    os.close(writing)
    with open(reading) as told:
        return told.read(10)


def main() -> None:
    """Until there are no more lines."""
    settings = StoreSettings(max_bytes=MAX_BYTES)
    store = OwnerStore(settings, SystemClock(), Arena(MAX_BYTES, Path(sys.argv[1])))
    deeds = {"put": put, "fork": fork, "linger": linger}
    for line in sys.stdin:
        sys.stdout.write(deeds[line.strip()](store) + "\n")
        sys.stdout.flush()


def range_of(line: str) -> SharedRange:
    """What `put` said."""
    return msgspec.json.decode(line, type=SharedRange)


if __name__ == "__main__":
    main()
