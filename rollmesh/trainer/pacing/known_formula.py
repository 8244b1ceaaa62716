"""The known formula: admission by what was ever accepted, for loops and comparisons that want it.

    capacity = min(max_concurrent - running,
                   (max_staleness + policy_version + 1) * batch - (accepted + running))

AReaL, "A Large-Scale Asynchronous Reinforcement Learning System" (Fu et al. 2025, arXiv
2505.24298), eq. 3, with the recovery of its later releases: `accepted` is set to what the recovered
version stands for. It bounds counts, and no sample's age; docs/explanation/staleness.md says where
the two
part. Owns those counts, in whatever its caller counts (there: groups). Invariant: all numbers are
of one moment, whichever thread asks; capacity may be negative. Pure; driven by compat.py.
"""

import threading
from collections.abc import Callable

import msgspec


class KnownCounts(msgspec.Struct, kw_only=True):
    """What has become of rollouts."""

    enqueued: int = 0
    """Waiting to be submitted."""
    running: int = 0
    accepted: int = 0
    """Ever; less what a recovery took back."""
    rejected: int = 0


class KnownFormula:
    """See the module."""

    def __init__(
        self,
        policy_version: Callable[[], int],
        max_concurrent: int,
        batch: int,
        max_staleness: int,
    ) -> None:
        """`policy_version()` is how many steps have been trained; bounds of less than 1 count as
        1."""
        self._policy_version = policy_version
        self._max_concurrent = max(1, max_concurrent)
        self._batch = max(1, batch)
        self._max_staleness = max_staleness
        self.pending_limit = (max_staleness + 1) * batch
        """What may wait to be submitted."""
        self._counts = KnownCounts()
        self._lock = threading.Lock()

    @property
    def capacity(self) -> int:
        """What may be submitted now."""
        steps = self._max_staleness + self._policy_version() + 1
        with self._lock:
            counts = self._counts
            under_way = counts.accepted + counts.running
            return min(self._max_concurrent - counts.running, steps * self._batch - under_way)

    @property
    def counts(self) -> KnownCounts:
        """A copy."""
        with self._lock:
            return msgspec.structs.replace(self._counts)

    def enqueue(self) -> None:
        """One waits."""
        with self._lock:
            self._counts.enqueued += 1

    def submit(self) -> None:
        """One that waited runs."""
        with self._lock:
            self._counts.enqueued -= 1
            self._counts.running += 1

    def accept(self) -> None:
        """One that ran will train."""
        with self._lock:
            self._counts.running -= 1
            self._counts.accepted += 1

    def reject(self) -> None:
        """One that ran will not."""
        with self._lock:
            self._counts.running -= 1
            self._counts.rejected += 1

    def recover(self, policy_version: int) -> None:
        """Go on from there: each version up to it has consumed a batch; what runs goes on."""
        with self._lock:
            self._counts.accepted = policy_version * self._batch
