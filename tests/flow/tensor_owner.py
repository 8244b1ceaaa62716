"""An owner of tensors that runs a test's commands, one line at a time.

It has one store, in the folder of its argument. Each line that it reads is answered by one line.
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
    """Store 100,000 bytes of 7; return their range."""
    data = np.full(100_000, 7, np.uint8)
    (handle,) = store.put([Content("uint8", (100_000,), data)])
    (place,) = store.pins.places([handle.shard_id], "test")
    return msgspec.json.encode(place).decode()


def fork(store: OwnerStore) -> str:
    """Return the output of a forked child that stores, closes the store and exits normally."""
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
    with open(reading) as output:
        return output.read()


def linger(_: OwnerStore) -> str:
    """Return the output of a forked child that runs until stdin ends, even if its parent has
    ended.
    """
    reading, writing = os.pipe()
    if not os.fork():
        os.write(writing, b"it lingers")
        sys.stdin.read()
        os._exit(0)
    os.close(writing)
    with open(reading) as output:
        return output.read(10)


def main() -> None:
    """Answer lines until stdin ends."""
    settings = StoreSettings(max_bytes=MAX_BYTES)
    store = OwnerStore(settings, SystemClock(), Arena(MAX_BYTES, Path(sys.argv[1])))
    commands = {"put": put, "fork": fork, "linger": linger}
    for line in sys.stdin:
        sys.stdout.write(commands[line.strip()](store) + "\n")
        sys.stdout.flush()


def range_of(line: str) -> SharedRange:
    """Parse the answer of `put`."""
    return msgspec.json.decode(line, type=SharedRange)


if __name__ == "__main__":
    main()
