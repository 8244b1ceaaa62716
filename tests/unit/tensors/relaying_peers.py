"""A mesh of owners in one process: real stores, connected without sockets.

The connection is a Backend that records what was requested.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollmesh.core.errors import OwnerGone
from rollmesh.tensors.arena import Arena
from rollmesh.tensors.fetch_buffer import FetchBuffer
from rollmesh.tensors.handles import Content, RTensor
from rollmesh.tensors.plane import Plane, use
from rollmesh.tensors.store import OwnerStore, StoreSettings
from rollmesh.testing.clock import FakeClock

MAX_BYTES = 2**20


class StoreBackend:
    """A Backend that reads from the stores of a mesh, by address."""

    def __init__(self) -> None:
        self.stores: dict[str, OwnerStore] = {}
        self.fetches: list[tuple[str, int]] = []
        """Owner and number of shards of each fetch."""
        self.cleared: list[str] = []

    def fetch(self, owner: str, handles: list[RTensor]) -> list[Content]:
        self.fetches.append((owner, len(handles)))
        return [self._store(owner).read(each.shard_id) for each in handles]

    def take(self, owner: str, shard_ids: list[int], step: int) -> None:
        self._store(owner).take(shard_ids, step)

    def end_step(self, owner: str, step: int) -> int:
        return self._store(owner).end_step(step)

    def clear(self, owner: str, shard_ids: list[int]) -> int:
        self.cleared.append(owner)
        return self._store(owner).clear(shard_ids)

    def close(self) -> None:
        self.stores.clear()

    def _store(self, owner: str) -> OwnerStore:
        if owner not in self.stores:
            raise OwnerGone(owner, "nothing listens there")
        return self.stores[owner]


class Mesh:
    """Processes, each with its own plane."""

    def __init__(self, folder: Path) -> None:
        self.backend = StoreBackend()
        self._folder = folder
        self._arenas: list[Arena] = []

    def process(self, port: int, *, buffer: bool = True) -> Plane:
        """A process that owns shards at this port, and fetches those of others."""
        arena = Arena(MAX_BYTES, self._folder)
        self._arenas.append(arena)
        store = OwnerStore(StoreSettings(max_bytes=MAX_BYTES, lease_s=600), FakeClock(), arena)
        store.owner = f"tcp://127.0.0.1:{port}"
        self.backend.stores[store.owner] = store
        return Plane(store, FetchBuffer(MAX_BYTES) if buffer else None, self.backend)

    def consumer(self) -> Plane:
        """A process that owns nothing."""
        return Plane(None, FetchBuffer(MAX_BYTES), self.backend)

    def close(self) -> None:
        """Close all stores."""
        self.backend.close()
        for arena in self._arenas:
            arena.close()


@contextmanager
def process_of(plane: Plane) -> Iterator[None]:
    """Make the plane that of this process."""
    before = use(plane)
    try:
        yield
    finally:
        use(before)
