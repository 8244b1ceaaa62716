"""Hand a batch from one process to another, for a trainer with its own processes.

    python -m examples.tensors

- One process stores a batch and sends its handles, a few bytes each; the other fetches what it
  needs, once, and frees the batch.
- Afterwards neither process holds any of it.
- This is the data plane without rollmesh's trainer controller.
"""

import subprocess
import sys
from typing import Any

import torch

from rollmesh.compat import (
    clear_fetch_buffer,
    clear_node,
    collect_shards,
    fetch_buffer_stats,
    flatten_shard_ids,
    storage_stats,
)
from rollmesh.core.clock import SystemClock
from rollmesh.tensors.fetch_buffer import FetchBuffer
from rollmesh.tensors.handles import RTensor, collect, pack, unpack
from rollmesh.tensors.peers import Peers
from rollmesh.tensors.plane import Plane, use
from rollmesh.tensors.server import TensorServer
from rollmesh.tensors.store import OwnerStore, StoreSettings

MAX_BYTES = 64 << 20
NUM_ROLLOUTS = 64


def batch() -> list[dict[str, Any]]:
    """Return rollouts of many lengths."""
    return [
        {
            "input_ids": torch.arange(length, dtype=torch.int32),
            "logprobs": torch.full((length,), -0.5, dtype=torch.bfloat16),
            "reward": length % 2,
        }
        for length in range(1000, 1000 + NUM_ROLLOUTS)
    ]


def own() -> None:
    """Store a batch and hand it to another process."""
    store = OwnerStore(StoreSettings(max_bytes=MAX_BYTES), SystemClock())
    server = TensorServer(store, "tcp://127.0.0.1:0")
    server.start()
    plane = Plane(store)
    use(plane)
    handles = plane.remotize(batch())
    packed = pack(collect(handles, RTensor))
    print(f"stored {storage_stats()}; the handles are {len(packed)} bytes", flush=True)
    subprocess.run([sys.executable, "-m", "examples.tensors", "fetch"], input=packed, check=True)
    print(f"left   {storage_stats()}")
    server.stop()
    store.close()


def fetch() -> None:
    """Read handles from standard input, read their tensors, and free them."""
    peers = Peers()
    plane = Plane(buffer=FetchBuffer(MAX_BYTES), backend=peers)
    use(plane)
    handles = unpack(sys.stdin.buffer.read())
    longest = max(handles, key=lambda handle: handle.num_bytes).to_local()
    print(f"one tensor: {longest.dtype} {list(longest.shape)}, ends in {int(longest[-1])}")
    tensors = plane.localize(handles)
    print(f"fetched {fetch_buffer_stats()}; {sum(each.numel() for each in tensors)} numbers")
    dropped = clear_fetch_buffer(flatten_shard_ids(handles[:2]))
    print(f"dropped {dropped} copies, {fetch_buffer_stats()['num_tensors']} are here")
    for owner, shard_ids in collect_shards(handles).items():
        print(f"freed {clear_node(owner, shard_ids)} shards, copies and all")
    assert fetch_buffer_stats()["total_bytes"] == 0
    peers.close()


if __name__ == "__main__":
    fetch() if sys.argv[1:] == ["fetch"] else own()
