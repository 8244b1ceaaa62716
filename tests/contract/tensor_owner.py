"""An owner of tensors in its own process, which stores and frees tensors on request.

    python -m tests.contract.tensor_owner tcp://127.0.0.1:0
    python -m tests.contract.tensor_owner ray://NAME --cluster HOST:PORT

The bytes of a shard follow from a seed and its position. Each line of JSON is answered by one; the
first line is the owner's address. Used by tensor_backends.py, which has both ends of the pipe.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import msgspec
import numpy as np

from rollmesh.core.clock import SystemClock
from rollmesh.core.process import die_with_parent
from rollmesh.tensors.handles import UNTAGGED, Content, pack
from rollmesh.tensors.server import TensorServer
from rollmesh.tensors.store import OwnerStore, StoreSettings

MAX_BYTES = 2**26
LEASE_S = 600.0
ITEM_BYTES = {"uint8": 1, "bool": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float32": 4, "int64": 8}
Kind = tuple[str, tuple[int, ...]]
"""dtype and shape"""


class Put(msgspec.Struct, tag=True):
    """Store shards; the answer is their packed handles."""

    kinds: list[Kind]
    seed: int
    step: int = UNTAGGED


class Free(msgspec.Struct, tag=True):
    """Clear these as their owner does; the answer is how many there were."""

    shard_ids: list[int]


class EndStep(msgspec.Struct, tag=True):
    """The answer is how many were freed."""

    step: int


class Count(msgspec.Struct, tag=True):
    """The answer is the number of held tensors and bytes, and of retained bytes."""


Ask = Put | Free | EndStep | Count


def shard(kind: Kind, seed: int, place: int) -> Content:
    """The content of the shard at this position of a Put."""
    dtype, shape = kind
    num_bytes = ITEM_BYTES[dtype] * int(np.prod(shape, dtype=np.int64))
    data = np.frombuffer(np.random.default_rng((seed, place)).bytes(num_bytes), np.uint8)
    return Content(dtype, shape, data)


def shards(kinds: Sequence[Kind], seed: int) -> list[Content]:
    """All shards of a Put."""
    return [shard(kind, seed, place) for place, kind in enumerate(kinds)]


@contextmanager
def served(store: OwnerStore, address: str, cluster: str) -> Iterator[str]:
    """Serve `store`; yield its address."""
    if address.startswith("tcp://"):
        server = TensorServer(store, address)
        yield server.start()
        server.stop()
        return
    import ray  # noqa: PLC0415 - is not installed everywhere

    from rollmesh.tensors.ray_backend import RayServer  # noqa: PLC0415 - see above

    ray.init(cluster, log_to_driver=False)
    ray_server = RayServer(store, address)
    yield ray_server.start()
    ray_server.stop()
    ray.shutdown()


def answer(store: OwnerStore, ask: Ask) -> Any:
    """Do what is asked; return the answer."""
    match ask:
        case Put(kinds, seed, step):
            return pack(store.put(shards(kinds, seed), step)).hex()
        case Free(shard_ids):
            return store.clear(shard_ids)
        case EndStep(step):
            return store.end_step(step)
        case Count():
            stats = store.stats()
            return stats.num_tensors, stats.total_bytes, stats.retained_bytes


def main() -> None:
    """Answer lines until stdin ends."""
    arguments = argparse.ArgumentParser(prog="python -m tests.contract.tensor_owner")
    arguments.add_argument("address")
    arguments.add_argument("--cluster", default="")
    options = arguments.parse_args()
    die_with_parent()
    store = OwnerStore(StoreSettings(max_bytes=MAX_BYTES, lease_s=LEASE_S), SystemClock())
    with closing(store), served(store, options.address, options.cluster) as address:
        print_line(address)
        for line in sys.stdin.buffer:
            print_line(answer(store, msgspec.json.decode(line, type=Ask)))


def print_line(what: Any) -> None:
    """Print one line of JSON."""
    sys.stdout.buffer.write(msgspec.json.encode(what) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
