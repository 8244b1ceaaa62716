"""A process's whole data plane: store, server, connections and buffer, opened and closed as one.

Invariant: after `close` no thread, descriptor or shared memory of ours is left. `held` says of a
plane what messages say of it. Driven by rank.py, and by whoever has a controller.
"""

from rollmesh.core.clock import SystemClock
from rollmesh.tensors.buffer import FetchBuffer
from rollmesh.tensors.peer import Peers
from rollmesh.tensors.plane import Plane
from rollmesh.tensors.relay import Relay
from rollmesh.tensors.server import TensorServer
from rollmesh.tensors.store import OwnerStore, StoreSettings
from rollmesh.trainer.controller.spec import PlaneSpec
from rollmesh.wire.keys import Keys
from rollmesh.wire.ranks import HeldTensors


class Household:
    """See the module."""

    def __init__(self, spec: PlaneSpec, keys: Keys | None) -> None:
        """AddressError where `spec.bind` is taken, or needs keys."""
        settings = StoreSettings(max_bytes=spec.store_bytes, lease_s=spec.lease_s)
        self._store = OwnerStore(settings, SystemClock())
        self._peers = Peers(keys, spec.buffer_bytes, is_shared=True)
        buffer = FetchBuffer(spec.buffer_bytes)
        self._server = TensorServer(self._store, spec.bind, keys, Relay(buffer, self._peers))
        self.plane = Plane(self._store, buffer, self._peers)
        try:
            self.address = self._server.start()
            self._peers.lend_at(self.address)
        except BaseException:
            self.close()
            raise

    def settle(self) -> None:
        """Other owners know what we look at no longer."""
        self._peers.settle()

    def abandon(self) -> None:
        """For a process that ends at once: what others could attach to is gone, and no more."""
        self._peers.abandon()
        self._store.close()

    def close(self) -> None:
        """End all of it."""
        self._server.stop()
        self._peers.close()
        self._store.close()


def held(plane: Plane) -> tuple[HeldTensors, HeldTensors]:
    """What a process holds as owner, and as consumer."""
    stats = plane.stats()
    stored = buffered = HeldTensors()
    if storage := stats.storage:
        stored = HeldTensors(
            storage.num_tensors,
            storage.total_bytes,
            storage.retained_bytes,
            tuple(sorted(storage.bytes_by_step.items())),
        )
    if buffer := stats.buffer:
        by_step = tuple(sorted(buffer.bytes_by_step.items()))
        buffered = HeldTensors(buffer.num_tensors, buffer.total_bytes, 0, by_step)
    return stored, buffered
