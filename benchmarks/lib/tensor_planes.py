"""rollmesh's arms of the tensor benchmark: planes that own, and planes that fetch.

- The owner of `shm` has shared memory. That of `tcp` has none, so its consumer receives like one on
  another host.
- The consumers of `remote` share a host and lend each other what they have fetched.
- All calls go through the plane.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.lib.tensor_protocol import MIB, HeldBytes, Piece, Stored
from rollmesh.compat import fetch_buffer_stats, flatten_shard_ids, storage_stats
from rollmesh.core.clock import SystemClock
from rollmesh.tensors.arena import Arena
from rollmesh.tensors.fetch_buffer import FetchBuffer
from rollmesh.tensors.handles import RTensor, pack, unpack
from rollmesh.tensors.peers import Peers
from rollmesh.tensors.plane import Plane, use
from rollmesh.tensors.relay import TensorRelay
from rollmesh.tensors.segment import SHARED_MEMORY
from rollmesh.tensors.server import TensorServer
from rollmesh.tensors.store import OwnerStore, StoreSettings

MAX_BYTES = 1024 * MIB


class ShmOwner:
    """A store that is served on loopback."""

    folder: Path | None = SHARED_MEMORY

    def __init__(self) -> None:
        torch.set_num_threads(1)
        settings = StoreSettings(max_bytes=MAX_BYTES)
        self._store = OwnerStore(settings, SystemClock(), Arena(MAX_BYTES, self.folder))
        self._server = TensorServer(self._store, "tcp://127.0.0.1:0")
        self._server.start()
        self._plane = Plane(store=self._store)
        use(self._plane)
        self._tensors: list[torch.Tensor] = []
        self._handles: list[RTensor] = []

    def prepare(self, pieces: Sequence[Piece]) -> None:
        """Create CPU tensors."""
        self._tensors = [
            torch.from_numpy(each.data).view(getattr(torch, each.dtype)).view(each.shape)
            for each in pieces
        ]

    def publish(self) -> None:
        """Copy the tensors once, into the arena."""
        self._handles = self._plane.remotize(self._tensors)

    def take(self, step: int) -> Stored:
        """Take the shards for a step, as a controller does."""
        self._store.take(flatten_shard_ids(self._handles), step)
        return Stored(self._store.owner, pack([each.tagged(step) for each in self._handles]))

    def end_step(self, step: int) -> None:
        """Free shards tagged up to `step`."""
        self._plane.end_step(step)

    def held(self) -> HeldBytes:
        """Counts of the store."""
        retained_bytes = self._store.stats().retained_bytes
        return HeldBytes(retained_bytes=retained_bytes, **storage_stats())

    def close(self) -> None:
        """Stop the server and free the segment with the store."""
        self._server.stop()
        self._store.close()


class TcpOwner(ShmOwner):
    """An owner whose memory no other process can map."""

    folder = None


class ShmConsumer:
    """A fetch buffer, and a connection to each owner."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._peers, self._buffer = self._dial(), FetchBuffer(MAX_BYTES)
        self._plane = Plane(buffer=self._buffer, backend=self._peers)
        use(self._plane)

    def prepare(self, stored: Stored) -> list[RTensor]:
        """Unpack the handles."""
        return unpack(stored.handles)

    def fetch(self, items: list[RTensor]) -> list[torch.Tensor]:
        """Fetch the tensors."""
        if len(items) == 1:
            return [items[0].to_local()]
        tensors: list[torch.Tensor] = self._plane.localize(items)
        return tensors

    def sum_of(self, array: torch.Tensor) -> int:
        """Sum of the 64-bit words."""
        return int(array.reshape(-1).view(torch.int64).sum())

    def end_step(self, step: int) -> None:
        """Free the step's shards in the buffer."""
        self._plane.end_step(step)

    def held(self) -> HeldBytes:
        """Counts of the buffer."""
        return HeldBytes(**fetch_buffer_stats())

    def close(self) -> None:
        """Close the connections."""
        self._peers.close()

    def _dial(self) -> Peers:
        return Peers(landing_bytes=MAX_BYTES)


class RemoteConsumer(ShmConsumer):
    """One of several consumers on another host than the owner's, which map what one of them
    fetched.
    """

    def __init__(self) -> None:
        super().__init__()
        settings = StoreSettings(max_bytes=MIB)
        self._store = OwnerStore(settings, SystemClock())
        relay = TensorRelay(self._buffer, self._peers)
        self._server = TensorServer(self._store, "tcp://127.0.0.1:0", None, relay)
        self._peers.lend_at(self._server.start())

    def close(self) -> None:
        """Stop lending and close the connections."""
        self._server.stop()
        super().close()
        self._store.close()

    def _dial(self) -> Peers:
        return Peers(landing_bytes=MAX_BYTES, is_shared=True)


TcpConsumer, RemoteOwner = ShmConsumer, TcpOwner
