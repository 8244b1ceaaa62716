"""An owner or a consumer of tensors as a process of its own, to be stopped and killed.

    tensor_process.py owner shared|private NUM_BYTES            serves one shard of 0, 1, 2...
    tensor_process.py consumer                                  fetches what its stdin names
    tensor_process.py carrier                                   the same, and lends it to neighbours
    tensor_process.py crowd SEED                                the same, line after line

An owner tells its handle as hex and the path of its memory, a consumer the sum of what it sees;
then both wait for the end of their stdin, as does the child that an owner has once it is told to
fork. One of a crowd tells of each line how many it fetched, keeps some of them, looks at those
again and again, and tells at the end how often it saw what it should not. Driven by
test_tensors.py.
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
    """Serve until told to end."""
    folder = SHARED_MEMORY if kind == "shared" else Path("/nowhere")
    arena = Arena(MAX_BYTES, folder)
    store = OwnerStore(StoreSettings(max_bytes=MAX_BYTES), SystemClock(), arena)
    server = TensorServer(store, "tcp://127.0.0.1:0")
    server.start()
    data = np.arange(num_bytes).astype(np.uint8)
    handles = store.put([Content("uint8", (num_bytes,), data)])
    tell(pack(handles).hex())
    tell(str(arena.path))
    if sys.stdin.readline().strip() == "fork":
        if os.fork() == 0:
            sys.stdin.read()
            os._exit(0)
        tell("forked")
        sys.stdin.read()
    server.stop()
    store.close()


def consume() -> None:
    """Look at a shard until told to end."""
    (handle,) = unpack(bytes.fromhex(sys.stdin.readline()))
    with closing(Peers()) as peers:
        (content,) = peers.fetch(handle.owner, [handle])
        tell(str(int(content.data.sum())))
        sys.stdin.read()
        tell(str(int(content.data.sum())))


def carry() -> None:
    """Look at a shard, and let neighbours look, until told to end."""
    (handle,) = unpack(bytes.fromhex(sys.stdin.readline()))
    with closing(Peers(landing_bytes=MAX_BYTES, is_shared=True)) as peers:
        store = OwnerStore(StoreSettings(max_bytes=2**20), SystemClock())
        relay = TensorRelay(FetchBuffer(MAX_BYTES), peers)
        server = TensorServer(store, "tcp://127.0.0.1:0", relay=relay)
        peers.lend_at(server.start())
        (content,) = peers.fetch(handle.owner, [handle])
        tell(str(int(content.data.sum())))
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
            tell(str(len(contents)))
            kept += zip([each.shard_id & 0xFF for each in handles], contents, strict=False)
            rng.shuffle(kept)
            del kept[rng.randrange(20) :]
            num_wrong += sum(not (content.data == byte).all() for byte, content in kept)
    tell(str(num_wrong))


def tell(line: str) -> None:
    """To who started us."""
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
