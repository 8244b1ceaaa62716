"""An owner or a consumer of tensors in its own process, which tests stop and kill.

    tensor_process.py owner shared|private NUM_BYTES            serves one shard of 0, 1, 2...
    tensor_process.py consumer                                  fetches the handles on its stdin
    tensor_process.py carrier                                   the same, and lends it to neighbours
    tensor_process.py crowd SEED                                the same, line after line

An owner prints its handle as hex and the path of its memory, a consumer the sum of its shard; then
both wait until their stdin ends, as does the child of an owner that received `fork`. A crowd
process prints for each line how many handles it fetched, keeps some of the shards, checks them
repeatedly, and at the end prints the number of wrong reads.
"""

import os
import random
import sys
from contextlib import closing
from pathlib import Path

import numpy as np

from rollmesh.core.clock import SystemClock
from rollmesh.core.errors import ShardMissing
from rollmesh.tensors.arena import Arena
from rollmesh.tensors.fetch_buffer import FetchBuffer
from rollmesh.tensors.handles import Content, pack, unpack
from rollmesh.tensors.peers import Peers
from rollmesh.tensors.relay import TensorRelay
from rollmesh.tensors.segment import SHARED_MEMORY
from rollmesh.tensors.server import TensorServer
from rollmesh.tensors.store import OwnerStore, StoreSettings

MAX_BYTES = 2**28


def own(kind: str, num_bytes: int) -> None:
    """Serve until stdin ends."""
    folder = SHARED_MEMORY if kind == "shared" else Path("/nowhere")
    arena = Arena(MAX_BYTES, folder)
    store = OwnerStore(StoreSettings(max_bytes=MAX_BYTES), SystemClock(), arena)
    server = TensorServer(store, "tcp://127.0.0.1:0")
    server.start()
    data = np.arange(num_bytes).astype(np.uint8)
    handles = store.put([Content("uint8", (num_bytes,), data)])
    report(pack(handles).hex())
    report(str(arena.path))
    if sys.stdin.readline().strip() == "fork":
        if os.fork() == 0:
            sys.stdin.read()
            os._exit(0)
        report("forked")
        sys.stdin.read()
    server.stop()
    store.close()


def consume() -> None:
    """Look at a shard until stdin ends."""
    (handle,) = unpack(bytes.fromhex(sys.stdin.readline()))
    with closing(Peers()) as peers:
        (content,) = peers.fetch(handle.owner, [handle])
        report(str(int(content.data.sum())))
        sys.stdin.read()
        report(str(int(content.data.sum())))


def carry() -> None:
    """Look at a shard, and lend it to neighbours, until stdin ends."""
    (handle,) = unpack(bytes.fromhex(sys.stdin.readline()))
    with closing(Peers(landing_bytes=MAX_BYTES, is_shared=True)) as peers:
        store = OwnerStore(StoreSettings(max_bytes=2**20), SystemClock())
        relay = TensorRelay(FetchBuffer(MAX_BYTES), peers)
        server = TensorServer(store, "tcp://127.0.0.1:0", relay=relay)
        peers.lend_at(server.start())
        (content,) = peers.fetch(handle.owner, [handle])
        report(str(int(content.data.sum())))
        sys.stdin.read()
        server.stop()
        store.close()


def crowd(seed: int) -> None:
    """Each shard is full of the last byte of its id."""
    rng = random.Random(seed)
    kept: list[tuple[int, Content]] = []
    num_wrong = 0
    with closing(Peers(landing_bytes=2**20)) as peers:
        for line in sys.stdin:
            handles = unpack(bytes.fromhex(line))
            try:
                contents = peers.fetch(handles[0].owner, handles)
            except ShardMissing:
                contents = []
            report(str(len(contents)))
            kept += zip([each.shard_id & 0xFF for each in handles], contents, strict=False)
            rng.shuffle(kept)
            del kept[rng.randrange(20) :]
            num_wrong += sum(not (content.data == byte).all() for byte, content in kept)
    report(str(num_wrong))


def report(line: str) -> None:
    """Print a line for the parent process."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "owner":
        own(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1] == "carrier":
        carry()
    elif sys.argv[1] == "crowd":
        crowd(int(sys.argv[2]))
    else:
        consume()
