"""Names that users of AReaL know, for training loops that were written against them.

    collect_shards, flatten_shard_ids           the shards of a batch
    clear_node, clear_fetch_buffer              free them
    storage_stats, fetch_buffer_stats           check that they are free
    ArealStalenessManager                       admission by counts: StalenessManager there

- Ids are passed here and never handles, so freeing a batch does not fetch it.
- The manager bounds counts, not the age of any sample; `rollmesh.trainer.staleness` bounds ages.
- Functions work on the process's data plane. Differences from AReaL are named where they are.
"""

import threading
from collections.abc import Sequence
from typing import Protocol

import msgspec

from rollmesh.tensors.handles import RTensor, collect
from rollmesh.tensors.handles import collect_shards as collect_shards
from rollmesh.tensors.plane import current


def flatten_shard_ids(nested: object) -> list[int]:
    """Return the ids of all shards that `nested` has handles of, in order, each once."""
    return list({handle.shard_id: None for handle in collect(nested, RTensor)})


def clear_node(owner: str, shard_ids: Sequence[int]) -> int:
    """Free shards of `owner` and their copies here; return how many it held.

    Raises OwnerGone, where AReaL ignores a failure.
    """
    return current().clear_at(owner, shard_ids)


def clear_fetch_buffer(shard_ids: Sequence[int] | None = None) -> int:
    """Drop copies of these shards (None: of all), and return how many there were."""
    return current().evict(shard_ids)


def storage_stats() -> dict[str, int]:
    """Return `num_tensors` and `total_bytes` of the tensors that this process owns.

    The bytes are those that are kept in memory, also for a slice; AReaL counts the slice.
    """
    storage = current().stats().storage
    return _sizes(storage.num_tensors, storage.total_bytes) if storage else _sizes(0, 0)


def fetch_buffer_stats() -> dict[str, int]:
    """Return `num_tensors` and `total_bytes` of the copies in this process; AReaL has a count."""
    buffer = current().stats().buffer
    return _sizes(buffer.num_tensors, buffer.total_bytes) if buffer else _sizes(0, 0)


def _sizes(num_tensors: int, total_bytes: int) -> dict[str, int]:
    return {"num_tensors": num_tensors, "total_bytes": total_bytes}


class VersionProvider(Protocol):
    """An object that knows the number of trained steps."""

    def get_version(self) -> int:
        """Return the number of trained steps."""


class RolloutCounts(msgspec.Struct, kw_only=True):
    """Rollouts by state."""

    enqueued: int = 0
    """Waiting to be submitted."""
    running: int = 0
    accepted: int = 0
    """In total, less those that a recovery took back."""
    rejected: int = 0


class ArealStalenessManager:
    """Admits rollouts by the number that was ever accepted.

        capacity = min(max_concurrent - running,
                       (max_staleness + version + 1) * batch - (accepted + running))

    AReaL, "A Large-Scale Asynchronous Reinforcement Learning System" (Fu et al. 2025, arXiv
    2505.24298), eq. 3, with the recovery of its later releases. Counts are in units of the caller
    (AReaL: groups), and consistent for all threads. docs/explanation/staleness.md compares it with
    StalenessManager.
    """

    def __init__(
        self,
        version_provider: VersionProvider,
        max_concurrent_rollouts: int,
        consumer_batch_size: int,
        max_staleness: int,
    ) -> None:
        """Bounds below 1 count as 1."""
        self._version_provider = version_provider
        self._max_concurrent = max(1, max_concurrent_rollouts)
        self._batch = max(1, consumer_batch_size)
        self._max_staleness = max_staleness
        self._pending_limit = (max_staleness + 1) * consumer_batch_size
        self._counts = RolloutCounts()
        self._lock = threading.Lock()

    def get_capacity(self) -> int:
        """Return how many rollouts may be submitted now; may be negative."""
        steps = self._max_staleness + self._version_provider.get_version() + 1
        with self._lock:
            counts = self._counts
            admitted = counts.accepted + counts.running
            return min(self._max_concurrent - counts.running, steps * self._batch - admitted)

    def get_pending_limit(self) -> int:
        """Return how many rollouts may wait to be submitted."""
        return self._pending_limit

    def get_stats(self) -> RolloutCounts:
        """Return a copy of the counts."""
        with self._lock:
            return msgspec.structs.replace(self._counts)

    def on_rollout_enqueued(self) -> None:
        """Count a rollout that waits to be submitted."""
        with self._lock:
            self._counts.enqueued += 1

    def on_rollout_submitted(self) -> None:
        """Count a waiting rollout as running."""
        with self._lock:
            self._counts.enqueued -= 1
            self._counts.running += 1

    def on_rollout_accepted(self) -> None:
        """Count a running rollout as one that will train."""
        with self._lock:
            self._counts.running -= 1
            self._counts.accepted += 1

    def on_rollout_rejected(self) -> None:
        """Count a running rollout as one that will not train."""
        with self._lock:
            self._counts.running -= 1
            self._counts.rejected += 1

    def on_version_recovered(self, policy_version: int) -> None:
        """Continue from `policy_version`: each version consumed one batch; running ones stay."""
        with self._lock:
            self._counts.accepted = policy_version * self._batch
