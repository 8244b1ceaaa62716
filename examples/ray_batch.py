"""A batch on a Ray cluster: this process stores it, an actor trains on it, the step's end frees it.

    python -m examples.ray_batch                     a cluster of its own, on this machine
    python -m examples.ray_batch --cluster HOST:6379

- The actor receives a pack of handles; it fetches the tensors through Ray's object store and reads
  them in place.
- After each step neither process holds a byte of the batch.
- Needs `pip install '.[train,ray]'`.
"""

import argparse
from contextlib import closing

import ray
import torch

from rollmesh.core.clock import SystemClock
from rollmesh.core.ids import new_id
from rollmesh.tensors.fetch_buffer import FetchBuffer
from rollmesh.tensors.handles import RTensor, pack, unpack
from rollmesh.tensors.plane import Plane
from rollmesh.tensors.ray_backend import RayPeers, RayServer
from rollmesh.tensors.store import OwnerStore, StoreSettings

NUM_STEPS = 3
NUM_SAMPLES = 64
MAX_BYTES = 2**28


class Rank:
    """A consumer of batches in its own process."""

    def __init__(self) -> None:
        self._plane = Plane(buffer=FetchBuffer(MAX_BYTES), backend=RayPeers())

    def train(self, packed: bytes, step: int) -> tuple[float, int]:
        """Return the mean over all samples, and the bytes left after the end of the step."""
        tensors = self._plane.localize(unpack(packed))
        mean = float(torch.cat(tensors).mean())
        del tensors
        self._plane.end_step(step)
        stats = self._plane.stats().buffer
        assert stats is not None
        return mean, stats.total_bytes


def main(cluster: str | None) -> None:
    """Run NUM_STEPS steps."""
    ray.init(cluster, num_cpus=None if cluster else 1, log_to_driver=False)
    store = OwnerStore(StoreSettings(max_bytes=MAX_BYTES), SystemClock())
    server = RayServer(store, f"ray://{new_id('example')}")
    rank = ray.remote(Rank).remote()
    with closing(store):
        print(f"stored at {server.start()}")
        plane = Plane(store=store)
        for step in range(NUM_STEPS):
            lengths = torch.randint(100, 4000, (NUM_SAMPLES,)).tolist()
            batch: list[RTensor] = plane.remotize([torch.rand(each) for each in lengths], step)
            packed = pack(batch)
            mean, num_bytes_there = ray.get(rank.train.remote(packed, step))
            num_bytes = sum(each.num_bytes for each in batch)
            plane.end_step(step)
            size = f"{num_bytes} bytes by {len(packed)} bytes of handles, mean {mean:.3f}"
            left = f"{store.stats().total_bytes} here, {num_bytes_there} there"
            print(f"step {step}: {size}; held then: {left}")
        server.stop()
    ray.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.ray_batch")
    parser.add_argument("--cluster", help="HOST:PORT of a running cluster")
    main(parser.parse_args().cluster)
